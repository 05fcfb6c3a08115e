"""The replay: real scheduler and memory, no model; its counts are those that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from baltoro.bench import cache_traces
from baltoro.bench.books_runner import StepCost
from baltoro.bench.replay import Replay, Replayed
from baltoro.bench.replay_plan import replay_config
from baltoro.bench.replay_plot import plot_replay
from baltoro.bench.replay_report import by_label, write_replay
from baltoro.bench.shapes import named_shape, rank_shape
from baltoro.bench.trace import TraceRequest
from baltoro.bench.trace_make import AgentShape, MixedShape, agent_trace, mixed_trace
from baltoro.errors import ConfigError
from baltoro.model.config import K3Config

MINI = named_shape("mini")


def replay(trace: list[TraceRequest], **options: Any) -> Replayed:
    """On the shape of the small model: endpoints and chunks of 64."""
    assert MINI is not None
    defaults = {"arena_bytes": 4 * 2**20, "page_size": 16, "max_batch_tokens": 256, "max_running": 32}
    return Replay(trace, replay_config(MINI, **(defaults | options)), MINI, cost=StepCost(1.0, 0.0)).run()


def test_a_second_turn_finds_what_the_first_left() -> None:
    trace = [
        TraceRequest(id="a", arrival=0, own=200, output=56),
        TraceRequest(id="b", arrival=0, after="a", own=100, output=8),
    ]
    found = replay(trace)
    cached = [one.num_cached for one in found.outcomes]
    assert cached == [0, 192]  # 255 tokens of the first are computed: its last checkpoint is at 192
    assert found.prompt_tokens == 200 + 356
    assert found.computed_tokens == 200 + 356 - 192
    assert found.totals()["hit_share"] == 192 / 556


def test_time_is_that_of_the_steps_and_requests_wait_for_theirs() -> None:
    trace = [
        TraceRequest(id="a", arrival=0, own=10, output=5),
        TraceRequest(id="b", arrival=100, own=10, output=5),
    ]
    found = replay(trace, overlap=False)
    assert [one.ended for one in found.outcomes] == [5.0, 105.0]
    assert found.steps == 10 and found.time_s == 105.0


def test_a_prompt_that_can_never_fit_is_refused_and_those_behind_it_go_on() -> None:
    trace = [
        TraceRequest(id="a", arrival=0, own=4096, output=1),
        TraceRequest(id="b", arrival=0, own=10, output=2),
    ]
    found = replay(trace)
    assert [(one.id, one.is_refused) for one in found.outcomes] == [("a", True), ("b", False)]
    assert found.totals()["refused"] == 1


@pytest.mark.parametrize("pool", ["unified", "fixed"])
def test_retractions_are_told_by_request(pool: Literal["unified", "fixed"]) -> None:
    trace = [TraceRequest(id=str(at), arrival=0, own=100, output=300) for at in range(24)]
    found = replay(trace, pool=pool, arena_bytes=2**20)
    assert len(found.outcomes) == 24 and {one.num_output for one in found.outcomes} == {300}
    assert sum(one.num_retracted for one in found.outcomes) == found.retractions > 0


def test_the_pool_that_has_no_border_holds_more_of_either_kind() -> None:
    shape = MixedShape(short=(30, 60), long=(1500, 100), num_short=120, num_long=12, wave_s=1e6)
    seconds = {}
    for pool in ("unified", "fixed"):
        found = replay(mixed_trace(shape), pool=pool, arena_bytes=2 * 2**20, max_running=200)
        seconds[pool] = {label.name: label.last_s for label in by_label(found)}
        assert len(found.outcomes) == 198
    assert seconds["unified"]["short"] < 0.8 * seconds["fixed"]["short"]
    assert seconds["unified"]["long"] < 0.8 * seconds["fixed"]["long"]


def test_an_agent_trace_computes_a_fraction_of_what_it_asks() -> None:
    trace = agent_trace(AgentShape(conversations=4, turns=6, system=1000, own=40, output=30))
    found = replay(trace, arena_bytes=32 * 2**20)
    assert found.totals()["computed_share"] < 0.15
    assert replay(trace, arena_bytes=32 * 2**20, prefix_cache=False).totals()["computed_share"] == 1.0


def test_a_shared_beginning_is_found_at_the_third_arrival_and_at_the_second_when_it_was_planted() -> None:
    found = cache_traces.arrivals(shared=1024, tail=3000)
    assert found["unmarked"] == [0, 0, 1024]
    assert found["planted"] == [0, 1024]


def test_record_and_plot_are_written(tmp_path: Path) -> None:
    found = replay([TraceRequest(id="a", arrival=0, own=200, output=56)])
    write_replay(tmp_path / "r.json", found, {"model": "mini"})
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["settings"] == {"model": "mini"} and record["totals"]["requests"] == 1
    assert len(record["samples"]["rows"][0]) == len(record["samples"]["names"])
    plot_replay(found, tmp_path / "r.png", "one request")
    assert (tmp_path / "r.png").stat().st_size > 1000


def test_named_shapes_have_the_bytes_of_the_models() -> None:
    from baltoro.model.sizes import measure

    k3 = named_shape("k3")
    assert k3 is not None and MINI is not None
    assert (len(k3.kda_layers), len(k3.mla_layers)) == (69, 24)
    sizes = measure(k3)
    assert sizes.kv_bytes_per_token == 27648
    assert sizes.recurrent_bytes_per_request == 69 * 96 * 128 * 128 * 4
    assert rank_shape(k3, 8).kda_num_heads == 12
    shipped = K3Config.load("models/mini")
    for name in ("kda_layers", "mla_layers", "kda_num_heads", "kda_head_dim", "kv_row_width", "conv_size"):
        assert getattr(MINI, name) == getattr(shipped, name)
    assert named_shape("no-such") is None
    with pytest.raises(ConfigError, match="cannot share"):
        rank_shape(k3, 97)
