"""The scripts of a GPU session, on a CPU and in small: calls that go on from each other, what is carried between."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from baltoro.model.weights import load_model
from scripts.gpu.tuning import pack, unpack
from tests.trainer.harness import make_data

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model.hidden_size=32", "model.kda_head_dim=8", "model.intermediate_size=32", "model.num_experts=4",
    "model.num_active_experts=2", "model.vocab_size=131", "model.bos_token_id=120", "model.eos_token_id=122",
    "model.pad_token_id=130", "model.media_token_id=126", "batch.tokens=64", "batch.micro_tokens=64",
    "stages=[{ until = 1.0, max_length = 32, mix = { prose = 0.6, talk = 0.4 } }]", "steps=40",
    "eval.every_steps=1000", "eval.tokens=64", "log.every_steps=4", "checkpoint.every_s=1.0",
]  # fmt: skip


def session(folder: Path, seconds: int) -> subprocess.Popen[bytes]:
    """One call of train_tiny.sh, in a process group of its own."""
    environment = {
        **os.environ, "OUT": str(folder / "out"), "CARRY": str(folder / "carry"), "DATA": str(folder / "data"),
        "RUN": str(folder / "run"), "PYTHON": sys.executable, "RECIPE": "recipes/mini.toml", "NO_WHEELS": "1",
        "TRITON_CACHE_DIR": str(folder / "triton"), "MARGIN": "0", "KEEP_EVERY": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    changes = [part for one in (*SMALL, f'data.folder="{folder / "data"}"') for part in ("--set", one)]
    command = ["bash", "scripts/gpu/train_tiny.sh", str(seconds), *changes]
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)


def steps_of(folder: Path) -> list[int]:
    with gzip.open(folder / "out" / "metrics.jsonl.gz", "rt") as lines:
        return [json.loads(line)["step"] for line in lines]


@pytest.mark.nightly
def test_a_killed_call_and_a_second_machine_end_with_the_model(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (data / name).write_text("{}")
    first = session(tmp_path, 600)
    deadline = time.monotonic() + 200
    while not (tmp_path / "out" / "metrics.jsonl.gz").is_file() and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            first.wait(timeout=0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(timeout=30)

    # the next call is on another machine: only what came out of this one is there
    (tmp_path / "out").rename(tmp_path / "carry")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "triton" / "abc").mkdir(parents=True)
    (tmp_path / "triton" / "abc" / "kernel.autotune.json").write_text("{}")
    assert session(tmp_path, 600).wait(timeout=250) == 0
    steps = steps_of(tmp_path)
    assert steps == list(range(1, 41))
    out = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert out == ["metrics.jsonl.gz", "model.tar-aa", "resume.part-0", "triton.tar.xz"]

    home = tmp_path / "home"
    home.mkdir()
    subprocess.run(["tar", "x", "-C", str(home), "-f", str(tmp_path / "out" / "model.tar-aa")], check=True)
    assert load_model(home).config.num_experts == 4


def test_tuning_comes_back_without_what_no_launch_needs(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in ("a/k.autotune.json", "a/k.cubin", "a/k.ttir", "b/k.json", "b/half.json", "b/l.so", "tmp.1/x.cubin"):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text("{" if "half" in name else "{}")
    said = pack(cache, tmp_path / "out" / "file")
    assert "1 tuned kernels" in said and [p.name for p in (tmp_path / "out").iterdir()] == ["file"]
    unpack(tmp_path / "out" / "file", tmp_path / "back")
    found = sorted(str(p.relative_to(tmp_path / "back")) for p in (tmp_path / "back").rglob("*") if p.is_file())
    assert found == ["a/k.autotune.json", "a/k.cubin", "b/k.json", "b/l.so"]


def test_tuning_that_is_too_much_is_carried_as_times_alone(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "k.autotune.json").write_text("{}")
    (cache / "k.cubin").write_bytes(os.urandom(4000))
    assert "carried: times," in pack(cache, tmp_path / "file", limit=2000)
    assert unpack(tmp_path / "file", tmp_path / "back").startswith("1 files")
    (tmp_path / "back" / "k.autotune.json").write_text("newer")
    unpack(tmp_path / "file", tmp_path / "back")
    assert (tmp_path / "back" / "k.autotune.json").read_text() == "newer"
