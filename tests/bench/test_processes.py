"""A real server, started and measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from baltoro.bench.memory import first_answer_growth
from baltoro.bench.processes import our_server

MINI = Path(__file__).parents[2] / "models" / "mini"


@pytest.mark.slow
def test_the_engine_grows_by_what_it_announces_and_tells_where_it_began() -> None:
    with our_server(MINI, ["--memory", "64MiB"]) as server:
        growth = first_answer_growth(server, MINI)
        assert server.start_cpu_s > 0
        assert growth.start_bytes < growth.answered_bytes < server.resident_bytes()
    assert growth.weight_bytes > 4e6, "FP32 weights of a model of 2.5M parameters, experts packed"
    assert 0.5 < growth.pool_bytes / 2**26 <= 1
    assert growth.ratio <= 1.3
