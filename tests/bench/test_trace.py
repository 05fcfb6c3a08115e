"""The format of traces, and the ids that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from baltoro.bench.trace import TraceRequest, TraceText, check_trace, read_trace, write_trace
from baltoro.bench.trace_make import AgentShape, MixedShape, agent_trace, make_trace, mixed_trace
from baltoro.errors import ConfigError


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    trace = agent_trace(AgentShape(conversations=3, turns=4)) + mixed_trace(MixedShape(num_short=3, num_long=2))
    trace = sorted([*trace, TraceRequest(id="ids", arrival=0.5, prompt=(3, 1, 2), output=1)], key=lambda r: r.arrival)
    write_trace(tmp_path / "t.jsonl", trace)
    assert read_trace(tmp_path / "t.jsonl") == trace


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "a", "arrival": 0, "output": 1}', "prompt or parts"),
        ('{"id": "a", "arrival": 0, "output": 0, "own": 1}', "at least one token"),
        ('{"id": "a", "arrival": 0, "output": 1, "own": 1, "prefix": "p"}', "prefix and shared"),
        ('{"id": "a", "arrival": 0, "output": 1, "after": "b"}', "not above it"),
        ('{"id": "a", "arrival": 0, "output": 1, "own": 1, "colour": 2}', "line 1"),
        ("[]", "line 1"),
        ("{", "line 1"),
    ],
)
def test_a_wrong_line_is_named_with_its_reason(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "t.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=said):
        read_trace(tmp_path / "t.jsonl")


def test_a_turn_goes_on_from_prompt_and_output_and_a_fork_from_the_same() -> None:
    trace = [
        TraceRequest(id="a", arrival=0, prefix="system", shared=10, own=3, output=4),
        TraceRequest(id="b", arrival=1, after="a", own=2, output=1),
        TraceRequest(id="c", arrival=1, after="a", keep=12, own=2, output=1),
        TraceRequest(id="d", arrival=1, prefix="system", shared=6, own=1, output=1),
    ]
    check_trace(trace)
    text = TraceText(trace, 100)
    prompt, output = text.spell(trace[0])
    after, _ = text.spell(trace[1])
    fork, _ = text.spell(trace[2])
    assert (len(prompt), len(output)) == (13, 4)
    assert after[:17] == prompt + output and len(after) == 19
    assert fork[:12] == prompt[:12] and len(fork) == 14
    assert text.spell(trace[3])[0][:6] == prompt[:6]


def test_an_agent_trace_grows_and_forks() -> None:
    trace = make_trace("agent")
    assert sum(".fork" in request.id for request in trace) > 5
    assert {request.prefix for request in trace if not request.after} == {"system"}
    check_trace(trace)
    with pytest.raises(ConfigError, match="agent, mixed"):
        make_trace("other")
