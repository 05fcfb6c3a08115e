"""Greedy answers of the tiny model in bf16 beside what its float32 form thinks of each token: the top-2 margins.

    python -m scripts.gpu.margins --model models/tiny --device cuda [--graphs 16] [--each 40] [--tokens 48]

Every few questions of bench/eval/tiny.jsonl, answered by one engine; the same model in float32 on the CPU then scores
each answer in one span, without a cache. A token that is not its best is printed with how far it is below (logprobs):
that must be within the margin, 1e-2. The answers of another device or dtype can stand beside: --against cpu:bfloat16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from baltoro.llm import LLM
from baltoro.model.context import train_context
from baltoro.model.weights import load_model
from baltoro.protocol.sampling import SamplingParams

MARGIN = 1e-2


def questions(file: Path, every: int) -> list[Any]:
    """Messages of every `every`-th question without tools or pictures."""
    found = [json.loads(line)["request"] for line in file.read_text().splitlines()[::every]]
    plain = [one["messages"] for one in found if "tools" not in one]
    return [talk for talk in plain if all(isinstance(message["content"], str) for message in talk)]


def answers(
    model: Path, device: str, dtype: str, asked: list[Any], tokens: int, graphs: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of each."""
    options: dict[str, Any] = {"device": device, "dtype": dtype, "memory_bytes": 1 << 30, "max_context": 2048}
    options |= {"graph_batch": graphs} if device != "cpu" else {}
    with LLM(model, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        return [(list(one.prompt_token_ids), list(one.token_ids)) for one in llm.chat(asked, params, progress=False)]


@torch.inference_mode()
def gaps(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """How far each token's logprob is below the best one's."""
    ids = torch.tensor([*prompt, *answer])
    rows = torch.log_softmax(model(train_context(ids, (len(ids),))).double(), -1)[len(prompt) - 1 : -1]
    return rows.amax(-1) - rows.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--graphs", type=int, default=16)
    parser.add_argument("--each", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--against", default="")
    args = parser.parse_args()
    asked = questions(Path("bench/eval/tiny.jsonl"), args.each)
    made = answers(args.model, args.device, args.dtype, asked, args.tokens, args.graphs)
    exact = load_model(args.model, dtype=torch.float32)
    each = [gaps(exact, *one) for one in made]
    for talk, (_, answer), gap in zip(asked, made, each, strict=True):
        if float(gap.max()) > MARGIN:
            at = int(gap.argmax())
            print(f"{talk[-1]['content'][:60]!r}: token {at} of {len(answer)} is {float(gap[at]):.3f} below")
    found = torch.cat(each)
    beyond = found[found > 0].sort(descending=True).values
    print(f"{args.device} {args.dtype}: {len(found)} tokens of {len(made)} answers; {len(beyond)} are not the best of")
    print(
        f"float32, by {[round(float(gap), 4) for gap in beyond[:20]]}; beyond {MARGIN}: {int((found > MARGIN).sum())}"
    )
    if args.against:
        device, dtype = args.against.split(":")
        others = answers(args.model, device, dtype, asked, args.tokens, args.graphs)
        print(
            f"equal to {args.against}: {sum(a == b for a, b in zip(made, others, strict=True))} of {len(made)} answers"
        )


if __name__ == "__main__":
    main()
