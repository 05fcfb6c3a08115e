"""A client of the chat API for the terminal: streams an answer, and starts a server of its own when it has none.

In: a base URL or a model folder, messages. Out: pieces of reasoning and answer as they come.
Invariants: standard library only; leaving a stream early closes its connection, which ends the request; a server that
was started here ends with the `with` block.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

from baltoro.errors import ConfigError, PeerError, RequestError, WorkerLost
from baltoro.protocol import sse

Kind = Literal["reasoning", "content"]
TIMEOUT_S = 600.0
STOP_S = 15.0


class Talker:
    """Talks to one server. Errors: PeerError when it cannot be reached or breaks off, RequestError when it refuses."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"--url {url!r} is no address; write it like http://127.0.0.1:8000")
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """The name of the model that is served."""
        with closing(self._connect()) as connection:
            reply = self._ask(connection, "GET", "/v1/models", None)
            name: str = json.loads(reply.read())["data"][0]["id"]
            return name

    def stream(self, body: dict[str, Any]) -> Generator[tuple[Kind, str], None, None]:
        """Pieces of the answer to a chat body."""
        with closing(self._connect()) as connection:
            reply = self._ask(connection, "POST", "/v1/chat/completions", body | {"stream": True})
            decoder = sse.Decoder()
            while piece := self._read(reply):
                for data in decoder.push(piece):
                    if data == sse.DONE_DATA:
                        return
                    yield from _pieces(json.loads(data))
        raise PeerError("the server broke off in the middle of its answer")

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        raw = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._path + path, raw, self._headers)
            reply = connection.getresponse()
            if reply.status == http.client.OK:
                return reply
            text = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(
                f"no server answers at {self._parts.geturl()} ({error}); start one: baltoro serve"
            ) from error
        raise RequestError(f"the server says {reply.status}: {_message(text)}")

    def _read(self, reply: http.client.HTTPResponse) -> bytes:
        try:
            return reply.read1(1 << 16)
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"the server broke off in the middle of its answer ({error})") from error


def _pieces(event: dict[str, Any]) -> Iterator[tuple[Kind, str]]:
    if "error" in event:
        raise WorkerLost(event["error"]["message"])
    for choice in event["choices"]:
        delta = choice["delta"]
        if delta.get("reasoning_content"):
            yield "reasoning", delta["reasoning_content"]
        if delta.get("content"):
            yield "content", delta["content"]


def _message(body: bytes) -> str:
    try:
        message: str = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return message


@contextmanager
def own_server(arguments: list[str], ready: str) -> Iterator[str]:
    """The URL of a server started with `baltoro serve ARGUMENTS`; `ready` begins the line that says it is there.

    Errors: ConfigError if it ends before that; what it said of it is on stderr.
    """
    command = [sys.executable, "-m", "baltoro", "serve", "--port", "0", *arguments]
    # A session of its own: Ctrl-C in the terminal stops an answer, not the server.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                found = re.search(r"http://\S+", line)
                if line.startswith(ready) and found:
                    break
            else:
                raise ConfigError("the server did not start; see above for the reason")
            yield found[0]
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
