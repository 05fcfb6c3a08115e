"""A short run of RL on a GPU: engine in a process, one base, captured decodes with the adapter, every check on."""

from __future__ import annotations

from pathlib import Path

import pytest

from baltoro.rl.log import read_dumps, read_log
from baltoro.rl.loop import run
from baltoro.rl.parts import open_parts
from baltoro.rl.recipe import RLConfig
from baltoro.rl.replay import replay
from tests.rl.runs import Brief, recipe
from tests.rl.test_routes import write_near_ties

# where fla is installed, it tries its kernels for two minutes in the first step
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("sleeps", [False, True])
def test_three_steps(tiny_folder: Path, tmp_path: Path, dtype: str, limit: float, sleeps: bool) -> None:
    options = {"device": "cuda", "dtype": dtype, "graph_batch": 8, "max_running": 16, "memory_bytes": 64 << 20}
    config = recipe(
        tiny_folder,
        threads=None,
        is_deterministic=False,
        engine={"place": "process", "sleeps": sleeps, "options": {**options, "max_context": 256}},
        checks={"max_k3": limit},
        eval={"every_steps": 1, "tasks": 4, "draws": 2},
    )
    parts = open_parts(config, families=[Brief()])
    try:
        run(parts, tmp_path / "run")
    finally:
        parts.close()
    lines = read_log(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[-1]["adapter_norm"] > 0 and all(line["sync"]["num_changed"] for line in lines[1:])
    memory = lines[-1]["memory"]
    # blocks are 512 bytes at least, and this base is small: what counts is that it is not there twice
    assert memory["rest_bytes"] < 0.5 * memory["base_bytes"]
    assert lines[-1]["memory"]["rest_bytes"] <= lines[1]["memory"]["rest_bytes"] + (1 << 16)


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.5), ("bfloat16", 1.1)])
def test_routes_are_replayed_where_near_ties_part_the_two(
    tiny_folder: Path, tmp_path: Path, dtype: str, share: float
) -> None:
    """Two steps with captured decodes; the same rollouts once more, without their routes. Experts come in pairs that
    differ by rounding in float32 and are equal in bfloat16, where little is parted and replay may do no harm."""
    folder = write_near_ties(tiny_folder, tmp_path / "model")
    options = {"device": "cuda", "dtype": dtype, "graph_batch": 8, "max_running": 16, "memory_bytes": 64 << 20}

    def settings(replays_routes: bool) -> RLConfig:
        return recipe(
            folder,
            steps=2,
            threads=None,
            is_deterministic=False,
            rollout={"replays_routes": replays_routes},
            engine={"place": "process", "options": {**options, "max_context": 256}},
            checks={"max_k3": 1.0, "has_start_test": False},
        )

    parts = open_parts(settings(True), families=[Brief()])
    try:
        run(parts, tmp_path / "run")
    finally:
        parts.close()
    lines = read_log(tmp_path / "run")[1:]
    without = replay(settings(False), read_dumps(tmp_path / "run"))
    print(
        dtype, [[(line["k3"], line["max_dlogp"], line["routes_changed"]) for line in some] for some in (lines, without)]
    )
    assert all(line["routes_missing"] == 0 < line["routes_tokens"] for line in lines)
    assert sum(line["k3"] for line in lines) < share * sum(line["k3"] for line in without)
