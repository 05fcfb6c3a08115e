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
    say("fp32 CPU, two threads, 64 streams, tokens/s", round(speed(cpu, 64, args.tokens // 4)))
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
