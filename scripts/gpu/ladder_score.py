"""The tiny model's score on each rung of the rank slice's ladder: a faster step must not be a worse one.

    python -m scripts.gpu.ladder_score [--every 6] [--json FILE] [--device cpu --dtype float32]

Every few plain questions of bench/eval/tiny.jsonl, greedy, each rung in a process of its own, all beside each other.
A rung's references are forced by the environment, as in `baltoro bench slice`; merged projections, tiles of experts and
graphs are left out where it is without them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from baltoro.bench.questions import Question, read_questions
from baltoro.bench.scoring import is_right
from baltoro.bench.slice import LADDER, Rung
from baltoro.kernels.dispatch import SWITCH
from baltoro.llm import LLM
from baltoro.model.decoder import K3Model
from baltoro.protocol.sampling import SamplingParams

PLAIN = {"messages"}


def plain(file: Path, every: int) -> list[Question]:
    """Every `every`-th question that is text alone."""
    found = [one for one in read_questions(file) if set(one.request) <= PLAIN]
    return [one for one in found if all(isinstance(m["content"], str) for m in one.request["messages"])][::every]


def score(rung: Rung, args: argparse.Namespace) -> dict[str, Any]:
    """In this process, which is the rung's own."""
    if not rung.is_merged:
        K3Model.merge = lambda self: self  # type: ignore[method-assign]
    if not rung.is_permuted:
        K3Model.tile_experts = lambda self: {}  # type: ignore[method-assign]
    asked = plain(args.questions, args.every)
    options: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "memory_bytes": 1 << 30, "max_running": 64}
    if rung.is_captured and args.device != "cpu":
        options["graph_batch"] = 64
    with LLM(args.model, **options) as llm:
        began = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=400)
        found = llm.chat([one.request["messages"] for one in asked], params, progress=False)
        took = time.perf_counter() - began
    right = sum(is_right({"content": a.text}, q.check) for q, a in zip(asked, found, strict=True))
    tokens = sum(len(one.token_ids) for one in found)
    return {"name": rung.name, "right": right, "asked": len(asked), "tokens_per_s": round(tokens / took)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--questions", type=Path, default=Path("bench/eval/tiny.jsonl"))
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rungs", default=",".join(map(str, range(len(LADDER)))))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help="(used by itself) the rung of this process")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(score(LADDER[args.one], args)))
        return
    command = [sys.executable, "-m", "scripts.gpu.ladder_score", *sys.argv[1:], "--one"]
    running = []
    for number in map(int, args.rungs.split(",")):
        environment = os.environ | {SWITCH: ",".join(LADDER[number].forced)}
        pipe = subprocess.PIPE
        running.append(subprocess.Popen([*command, str(number)], stdout=pipe, stderr=pipe, text=True, env=environment))
    rows = []
    for process in running:
        out, error = process.communicate()
        lines = out.strip().splitlines()
        rows.append(json.loads(lines[-1]) if lines and not process.returncode else {"failed": error[-600:]})
        print(rows[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps({"every": args.every, "dtype": args.dtype, "rows": rows}))


if __name__ == "__main__":
    main()
