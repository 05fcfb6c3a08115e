"""Server-sent events: encode what a server sends, decode what a client reads.

In: JSON bytes of one event, or raw bytes of a response body. Out: framed bytes, or the data of each event.
Invariants: an event holds no bare line break (JSON escapes them); the decoder gives the same events however the bytes
are cut, and never holds more than one unfinished event.
Source: WHATWG HTML, section 9.2; OpenAI ends a stream with the data `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Iterator

MEDIA_TYPE = "text/event-stream"
DONE_DATA = b"[DONE]"
DONE = b"data: [DONE]\n\n"
# A comment line: clients skip it, proxies see that the connection lives.
KEEP_ALIVE = b": keep-alive\n\n"


def encode(data: bytes) -> bytes:
    """One event. `data` must hold no line break."""
    return b"data: " + data + b"\n\n"


class Decoder:
    """Bytes of a body -> data of events, one at a time. Single writer: the reader of the body."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def push(self, body: bytes) -> Iterator[bytes]:
        """The data of each event that `body` completes. Fields other than `data`, and comments, are skipped."""
        self._rest += body
        lines = self._rest.replace(b"\r\n", b"\n").split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
