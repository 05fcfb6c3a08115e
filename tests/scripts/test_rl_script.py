"""scripts/gpu/rl_tiny.sh: seeds beside each other, each with its time and device, and what is left of them all."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.contract.tree import ROOT
from tests.scripts.test_rl_report import lines

# In the place of `baltoro rl`: notes how it was called and writes the log of a run, the better the higher the seed.
STUB = """#!{python}
import json, os, subprocess, sys
from pathlib import Path
given = sys.argv[1:]
if given[:2] != ["-m", "baltoro"]:
    sys.exit(subprocess.run([sys.executable, *given]).returncode)
out, seed = Path(given[given.index("--out") + 1]), int(given[given.index("--set") + 1].partition("=")[2])
(out / "called.json").write_text(json.dumps([given, os.environ.get("CUDA_VISIBLE_DEVICES")]))
if seed == 9:
    sys.exit("died")
lines = json.loads(Path({lines!r}).read_text())
for line in lines:
    if "eval" in line and line["step"]:
        line["eval"]["sampled"] += seed / 100
(out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
(out / "adapter").mkdir(exist_ok=True)
(out / "adapter" / "adapter_config.json").write_text(str(seed))
"""


def test_seeds_go_round_the_devices_and_the_best_adapter_comes_home(tmp_path: Path) -> None:
    (tmp_path / "lines.json").write_text(json.dumps(lines(0.2)))
    stub = tmp_path / "python"
    stub.write_text(STUB.format(python=sys.executable, lines=str(tmp_path / "lines.json")))
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    environment = {
        **os.environ, "OUT": str(tmp_path / "out"), "RUN": str(tmp_path / "rl"), "PYTHON": str(stub), "NO_WHEELS": "1",
        "GPUS": "2", "RL_ARGS": "--set optim.lr=1e-3", "MARGIN": "10", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = ["bash", "scripts/gpu/rl_tiny.sh", "100", "3", "7", "9", "7:optim.lr=1e-4,rollout.groups=32"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, "one of the seeds died, and that is told"
    calls = {seed: json.loads((tmp_path / f"rl-{seed}" / "called.json").read_text()) for seed in (3, 7, 9)}
    assert [device for _, device in calls.values()] == ["0", "1", "0"]
    other, device = json.loads((tmp_path / "rl-7-optim.lr-1e-4-rollout.groups-32" / "called.json").read_text())
    assert device == "1" and other[6:10] == ["--set", "optim.lr=1e-4", "--set", "rollout.groups=32"]
    arguments = calls[7][0]
    assert 80 <= int(arguments[arguments.index("--stop-after") + 1]) <= 90
    assert "--resume" in arguments and arguments[-1] == "optim.lr=1e-3"
    found = json.loads((tmp_path / "out" / "rl-tiny.json").read_text())
    assert (
        sorted(found["runs"]) == ["rl-3", "rl-7", "rl-7-optim.lr-1e-4-rollout.groups-32"] and "| rl-7 |" in done.stdout
    )
    with tarfile.open(tmp_path / "out" / "adapter.tar.gz") as best:
        member = best.extractfile("adapter/adapter_config.json")
        assert member is not None and member.read() == b"7"
    assert len(list((tmp_path / "out").iterdir())) <= 7 and "died" in (tmp_path / "out" / "rl-logs.txt").read_text()
