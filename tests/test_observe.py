from __future__ import annotations

import io
import json
import logging

import pytest

from baltoro.observe import JsonLines, PlainLines, Rate, log


@pytest.mark.parametrize("formatter", [JsonLines(), PlainLines()])
def test_a_line_holds_the_event_and_its_fields(formatter: logging.Formatter) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    to = logging.Logger("baltoro.test")
    to.addHandler(handler)
    log(to, "request done", tokens=3, text="a\nb")
    if isinstance(formatter, JsonLines):
        line = json.loads(out.getvalue())
        assert (line["event"], line["tokens"], line["text"]) == ("request done", 3, "a\nb")
        assert out.getvalue().count("\n") == 1
    else:
        assert "request done tokens=3" in out.getvalue()


def test_a_rate_forgets_what_left_its_window() -> None:
    now = [0.0]
    rate = Rate(window_s=10.0, clock=lambda: now[0])
    rate.add(20)
    now[0] = 5.0
    rate.add(10)
    assert rate.per_second() == 3.0
    now[0] = 10.0
    assert rate.per_second() == 1.0
    now[0] = 15.0
    assert rate.per_second() == 0.0
