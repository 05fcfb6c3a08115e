"""`baltoro inspect`, called in process and, on the published index, as a process with a limit on memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baltoro.cli import app
from baltoro.model.build import new_model
from baltoro.model.weight_files import INDEX_NAME
from baltoro.model.weights import save_model
from tests.tiny import tiny_k3


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(new_model(tiny_k3()), tmp_path, max_shard_bytes=1_000_000)
    return tmp_path


def test_a_good_checkpoint_ends_with_zero(folder: Path) -> None:
    code, output = run(folder)
    assert code == 0
    assert "3 of 3 files compared; routed experts unquantised" in output
    assert "Every name is claimed once" in output


def test_problems_are_counted_listed_and_end_with_one(folder: Path) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    for name in [name for name in index["weight_map"] if ".experts.5." in name]:
        index["weight_map"][name.replace(".experts.5.", ".experts.55.")] = index["weight_map"].pop(name)
    (folder / INDEX_NAME).write_text(json.dumps(index))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    code, output = run(folder)
    assert code == 1
    assert "Problems: 37 (18 missing, 18 unexpected, 1 bytes)" in output
    assert "missing: language_model.model.layers.1.block_sparse_moe.experts.5.w1.weight: the config asks" in output
    assert "... and 17 more; --json lists them all" in output
    code, output = run(folder / INDEX_NAME, "--json")
    report = json.loads(output)
    assert (code, report["is_good"], len(report["problems"])) == (1, False, 37)
    assert report["problems"][0]["kind"] == "missing"


def test_a_config_can_be_given(folder: Path) -> None:
    (folder / "config.json").rename(folder / "other.json")
    code, output = run(folder, "--config", folder / "other.json", "--json")
    report = json.loads(output)
    assert code == 0 and report["is_good"] and report["problems"] == []
    assert report["total"]["num_bytes"] == report["index_bytes"]
    assert report["groups"]["projector"] == {"num_tensors": 3, "num_bytes": (80 * 80 + 40 * 80 + 40) * 4}


@pytest.mark.slow
def test_the_published_index_takes_under_a_minute_and_4_gib(k3_data: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))

    command = [sys.executable, "-m", "baltoro", "inspect", str(k3_data)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    assert "497,220" in done.stdout and "1,560,860,324,864" in done.stdout
    assert time.monotonic() - start < 60
