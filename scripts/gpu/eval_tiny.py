"""The fixed questions answered by a served model on the GPU, beside the CPU's record: a table by family.

    python -m scripts.gpu.eval_tiny --model models/tiny [--device cuda --dtype bfloat16 --graphs 64] [--cpu]

Greedy, over HTTP, 64 requests in flight. --cpu asks a server in float32 on this machine's CPU too, at the same time;
otherwise bench/results/tiny-eval.json stands beside it, which is of the model named there. "within" is the bound of the
issue: one point in the share of all questions.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baltoro.bench.evaluate import Row, Verdict, ask_all, report
from baltoro.bench.processes import our_server
from baltoro.bench.questions import Question, read_questions, select

BOUND = 0.01


def asked(model: Path, questions: list[Question], options: list[str], concurrency: int) -> tuple[list[Verdict], float]:
    """Verdicts of a server with `options`, and tokens per second."""
    with our_server(model, options) as server:
        print(f"{' '.join(options)}: answers after {server.start_s:.1f} s", flush=True)
        began = time.perf_counter()
        found = ask_all(questions, server.url, concurrency=concurrency)
        return found, sum(one.completion_tokens for one in found) / (time.perf_counter() - began)


def show(rows: list[Row], beside: dict[str, dict[str, Any]]) -> None:
    print(f"{'family':<24}{'right':>8}{'asked':>8}{'share':>9}{'CPU':>9}{'points':>9}")
    for row in rows:
        other = beside.get(row.family)
        cpu = "" if other is None else f"{other['share']:9.1%}{100 * (row.share - other['share']):+9.2f}"
        print(f"{row.family:<24}{row.right:>8}{row.asked:>8}{row.share:>9.1%}{cpu}", flush=True)


def share_of(rows: dict[str, dict[str, Any]] | list[Row]) -> tuple[int, int]:
    """Right and asked over the families without a dot: each question once."""
    plain = [asdict(row) for row in rows] if isinstance(rows, list) else list(rows.values())
    heads = [row for row in plain if "." not in row["family"] and row["family"] not in ("all", "total")]
    return sum(row["right"] for row in heads), sum(row["asked"] for row in heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--graphs", type=int, default=64)
    parser.add_argument("--questions", type=Path, default=Path("bench/eval/tiny.jsonl"))
    parser.add_argument("--beside", type=Path, default=Path("bench/results/tiny-eval.json"))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    questions = select(read_questions(args.questions), (), args.limit)
    graphs = ["--graphs", str(args.graphs)] if args.device != "cpu" else []
    options = ["--device", args.device, "--dtype", args.dtype, "--memory", "2GiB", *graphs]
    with ThreadPoolExecutor(1) as pool:
        cpu = pool.submit(asked, args.model, questions, ["--dtype", "float32"], 32) if args.cpu else None
        verdicts, speed = asked(args.model, questions, options, 64)
        rows = report(verdicts)
        if cpu is not None:
            others, cpu_speed = cpu.result()
            beside = {row.family: asdict(row) | {"share": row.share} for row in report(others)}
            same = sum(a.content == b.content and a.calls == b.calls for a, b in zip(verdicts, others, strict=True))
            print(f"CPU {cpu_speed:.0f} tokens/s; {same} of {len(others)} answers are the same, letter by letter")
        else:
            record = json.loads(args.beside.read_text())
            print(f"beside: {record['settings']['model']}, {record['when']}")
            beside = {row["family"]: row for row in record["families"]}
    show(rows, beside)
    (right, total), (cpu_right, cpu_total) = share_of(rows), share_of(beside)
    gap = right / max(1, total) - cpu_right / max(1, cpu_total)
    failed = [one for one in verdicts if one.error]
    print(
        f"all: {right} of {total}, CPU {cpu_right} of {cpu_total}: {100 * gap:+.2f} points, within: {abs(gap) <= BOUND}"
    )
    print(
        f"{speed:.0f} tokens/s over HTTP; {len(failed)} questions without an answer"
        + "".join(f"; {one.id}: {one.error[:200]}" for one in failed[:1])
    )
    if args.json:
        found = {
            "settings": vars(args) | {"tokens_per_s": speed},
            "families": [asdict(r) | {"share": r.share} for r in rows],
        }
        args.json.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
