"""On a GPU: a run killed with kill -9 and resumed lies within the noise of two unbroken runs; and how two rules of
balancing load the experts. Four short runs side by side, of one recipe.

    python -m scripts.gpu.check_resume --data data/tiny --out runs/resume --json resume.json

Sums on a GPU have no fixed order, so two runs of one seed drift apart. Printed and written: the mean absolute
difference of losses after the kill, of killed and unbroken, beside that of the two unbroken runs; loads by step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUNS = {"one": "quantile", "other": "quantile", "killed": "quantile", "sign": "sign"}


def start(args: argparse.Namespace, name: str, *more: str) -> subprocess.Popen[bytes]:
    """`baltoro train` in the background; its text goes to a file of the run."""
    changes = [
        f"steps={args.steps}", f"batch.tokens={args.tokens}", f"batch.micro_tokens={args.tokens}",
        f'data.folder="{args.data}"', f"balance.method={RUNS[name]}", "checkpoint.every_s=8.0", "log.every_steps=5",
        "eval.every_steps=100000", *args.changes,
    ]  # fmt: skip
    command = [sys.executable, "-m", "baltoro", "train", args.recipe, "--out", str(args.out / name), *more]
    for change in changes:
        command += ["--set", change]
    with (args.out / f"{name}.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    path = out / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_and_resume(args: argparse.Namespace, run: subprocess.Popen[bytes]) -> tuple[int, subprocess.Popen[bytes]]:
    """Kill after 40 % of the steps, when a checkpoint is there. Out: the step it stood at, and the run that goes on."""
    saved = args.out / "killed" / "checkpoints"
    while run.poll() is None:
        done = lines(args.out, "killed")
        if len(done) >= 0.4 * args.steps and saved.exists() and any(saved.iterdir()):
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
            return len(done), start(args, "killed", "--resume")
        time.sleep(0.5)
    raise SystemExit(f"the run to be killed ended by itself: {(args.out / 'killed.txt').read_text()[-2000:]}")


def apart(a: list[dict[str, Any]], b: list[dict[str, Any]], since: int) -> float:
    pairs = [(x["loss"], y["loss"]) for x, y in zip(a, b, strict=False) if x["step"] > since]
    return statistics.mean(abs(x - y) for x, y in pairs) if pairs else float("nan")


def report(args: argparse.Namespace, killed_at: int) -> dict[str, Any]:
    found = {name: lines(args.out, name) for name in RUNS}
    loads = {
        name: [[step["step"], round(statistics.mean(step["loads"].values()), 4)] for step in found[name]]
        for name in ("one", "sign")
    }
    return {
        "steps": args.steps, "tokens": args.tokens, "killed_at": killed_at,
        "done": {name: len(found[name]) for name in RUNS},
        "apart_unbroken": apart(found["one"], found["other"], killed_at),
        "apart_killed": [apart(found[name], found["killed"], killed_at) for name in ("one", "other")],
        "losses": {name: [round(step["loss"], 5) for step in found[name]] for name in RUNS},
        "loads": loads,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/tiny.toml")
    parser.add_argument("--data", default="data/tiny")
    parser.add_argument("--out", type=Path, default=Path("runs/resume"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=150.0, help="stop the runs after so many")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    runs = {name: start(args, name) for name in RUNS}
    killed_at, runs["killed"] = kill_and_resume(args, runs["killed"])
    for run in runs.values():
        try:
            run.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.kill()
    found = report(args, killed_at)
    print({key: value for key, value in found.items() if key not in ("losses", "loads")})
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
