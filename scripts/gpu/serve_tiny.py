"""The engine on a GPU with the model in the box: tokens beside the CPU's, graphs beside eager steps, tokens per second.

    python -m scripts.gpu.serve_tiny --model models/tiny --json /tmp/serve.json

Greedy tokens in FP32 must be the CPU's, and those of graphs must be those of eager steps; in bf16 differences are
counted. Speed: 64 streams and one, of 128 tokens, bf16 with graphs, beside the CPU's FP32 with two threads.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine, load_engine
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit


def prompts(count: int, vocab: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab - 300, (8 + n % 40,), generator=draw).tolist() for n in range(count)]


def make(model: str, device: str, dtype: str, **options: Any) -> Engine:
    fields = {"device": device, "dtype": dtype, "memory_bytes": 1 << 30, "max_context": 512, "prefix_cache": False}
    return load_engine(model, EngineConfig(**(fields | options)))  # type: ignore[arg-type]


def answers(engine: Engine, count: int, tokens: int) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    for n, prompt in enumerate(prompts(count, 7900)):
        engine.add(Submit(request_id=f"r{n}", token_ids=tuple(prompt), params=sampling, n=1, priority=0))
    found: dict[str, list[int]] = {f"r{n}": [] for n in range(count)}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
    engine.audit()
    return list(found.values())


def same(a: list[list[int]], b: list[list[int]]) -> str:
    right = sum(x == y for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))
    return f"{sum(one == other for one, other in zip(a, b, strict=True))} of {len(a)} streams, {right} tokens"


def speed(engine: Engine, count: int, tokens: int) -> float:
    answers(engine, count, 8)
    began = time.perf_counter()
    answers(engine, count, tokens)
    return count * tokens / (time.perf_counter() - began)


def replay_ms(engine: Engine, size: int) -> float:
    """Of a captured step of `size` decodes alone, on the device: what a step of the engine takes beyond is the host."""
    graphs = engine.runner.graphs
    assert graphs is not None
    step = graphs.steps[size, False]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        for _ in range(3):
            step()
        start.record()
        for _ in range(50):
            step()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) / 50


def host_ms(engine: Engine, count: int, tokens: int) -> dict[str, float]:
    """Milliseconds of the host in a step of `count` streams, part by part."""
    spent: dict[str, float] = {}

    def timed(function: Any, name: str) -> Any:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

        return call

    scheduler, runner = engine.scheduler, engine.runner
    scheduler.plan = timed(scheduler.plan, "plan")  # type: ignore[method-assign]
    scheduler.commit = timed(scheduler.commit, "commit")  # type: ignore[method-assign]
    runner._issue = timed(runner._issue, "issue")  # type: ignore[method-assign]
    steps, began = scheduler.counts.steps, time.perf_counter()
    answers(engine, count, tokens)
    whole, steps = time.perf_counter() - began, scheduler.counts.steps - steps
    del scheduler.plan, scheduler.commit, runner._issue
    spent["wait and the rest"] = whole - sum(spent.values())
    return {name: round(1e3 * seconds / max(1, steps), 3) for name, seconds in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(2)
    graphs = {"graph_batch": 64} if args.device == "cuda" else {}
    found: dict[str, Any] = {}

    def say(name: str, value: Any) -> None:
        found[name] = value
        print(f"{name}: {value}", flush=True)

    cpu = make(args.model, "cpu", "float32")
    expected = answers(cpu, 16, 48)
    eager = make(args.model, args.device, "float32")
    got = answers(eager, 16, 48)
    say("fp32 eager and CPU", same(got, expected))
    say("fp32 graphs and eager", same(answers(make(args.model, args.device, "float32", **graphs), 16, 48), got))
    half = make(args.model, args.device, "bfloat16", **graphs)
    say("bf16 graphs and CPU", same(answers(half, 16, 48), expected))
    for count in (1, 64):
        say(f"bf16 graphs, {count} streams, tokens/s", round(speed(half, count, args.tokens)))
        if args.device == "cuda":
            say(f"the captured step of {count} alone, ms", round(replay_ms(half, count), 3))
    say("host of 64 streams, ms a step", host_ms(half, 64, args.tokens))
    say("fp32 CPU, two threads, 64 streams, tokens/s", round(speed(cpu, 64, args.tokens // 4)))
    fast, slow = (found[f"{name} streams, tokens/s"] for name in ("bf16 graphs, 64", "fp32 CPU, two threads, 64"))
    say("GPU over CPU, 64 streams", round(fast / slow, 1))
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
