from __future__ import annotations

import pytest

from baltoro.protocol import sse

BODY = b'data: {"a":1}\n\n: note\n\nevent: x\r\ndata: one\r\ndata: two\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("cut", range(1, len(BODY)))
def test_events_do_not_depend_on_how_the_bytes_are_cut(cut: int) -> None:
    decoder = sse.Decoder()
    assert [*decoder.push(BODY[:cut]), *decoder.push(BODY[cut:])] == EVENTS


def test_what_was_encoded_is_decoded() -> None:
    body = sse.encode(b'{"x":"\\n"}') + sse.KEEP_ALIVE + sse.DONE
    assert list(sse.Decoder().push(body)) == [b'{"x":"\\n"}', sse.DONE_DATA]


def test_an_unfinished_event_is_not_given_out() -> None:
    decoder = sse.Decoder()
    assert list(decoder.push(b"data: half")) == []
    assert list(decoder.push(b"\n\n")) == [b"half"]
