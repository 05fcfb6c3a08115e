"""A short run of RL on a GPU: engine in a process, one base, captured decodes with the adapter, every check on."""

from __future__ import annotations

from pathlib import Path

import pytest

from baltoro.rl.log import read_log
from baltoro.rl.loop import run
from baltoro.rl.parts import open_parts
from tests.rl.runs import Brief, recipe

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
