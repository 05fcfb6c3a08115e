"""The engine in this process: first token, one stream, sixteen; and against `transformers` on Kimi-Linear weights.

In: a model folder, or the shape of a Kimi-Linear model with random weights. Out: samples and medians.
The peer gets what it is given in practice: prompts padded to one length, and every request generating as long as the
longest of its batch. The case of equal lengths, which wastes nothing, is measured beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from baltoro.bench.record import median
from baltoro.llm import LLM
from baltoro.model.config import K3Config
from baltoro.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRound:
    """Seconds to the first token of a warm prompt; tokens/s of one stream and of all streams."""

    first_s: float
    one_tokens_per_s: float
    all_tokens_per_s: float


def engine_rounds(
    llm: LLM, *, prompt_tokens: int = 128, max_tokens: int = 128, streams: int = 16, rounds: int = 5
) -> list[EngineRound]:
    """Rounds after one that is thrown away."""
    vocab = llm.engine.model_config.vocab_size
    found = []
    for number in range(rounds + 1):
        draw = Random(number)
        prompts = [[draw.randrange(vocab // 2) for _ in range(prompt_tokens)] for _ in range(streams + 2)]
        first = _seconds(llm, prompts[:1], [1])
        one = _seconds(llm, prompts[1:2], [max_tokens]) - first
        crowd = _seconds(llm, prompts[2:], [max_tokens] * streams)
        if number:
            found.append(EngineRound(first, (max_tokens - 1) / one, streams * max_tokens / crowd))
    return found


def engine_summary(found: Sequence[EngineRound]) -> dict[str, Any]:
    """Medians and samples."""
    rows = [asdict(r) for r in found]
    medians = {key: median([row[key] for row in rows]) for key in rows[0]}
    return {
        "medians": medians,
        "all_over_one": medians["all_tokens_per_s"] / medians["one_tokens_per_s"],
        "samples": rows,
    }


def overlap_pairs(folder: Path, *, rounds: int = 10) -> dict[str, Any]:
    """Tokens/s of one stream and of sixteen, plain and overlapped, in interleaved rounds, each first as often as the
    other; medians of the ratios."""
    engines = {name: LLM(folder, dtype="float32", overlap=name == "overlapped") for name in ("plain", "overlapped")}
    samples: dict[str, list[EngineRound]] = {name: [] for name in engines}
    for number in range(rounds):
        for name in list(engines)[:: -1 if number % 2 else 1]:
            samples[name] += engine_rounds(engines[name], rounds=1)
    pairs = list(zip(samples["plain"], samples["overlapped"], strict=True))
    ratios = {
        "one_tokens_per_s": median([b.one_tokens_per_s / a.one_tokens_per_s for a, b in pairs]),
        "all_tokens_per_s": median([b.all_tokens_per_s / a.all_tokens_per_s for a, b in pairs]),
    }
    return {"ratios": ratios} | {name: engine_summary(found) for name, found in samples.items()}


def kimi_linear_shape(vocab_size: int) -> K3Config:
    """A Kimi-Linear model of some 20M parameters, for the tokenizer of `vocab_size` ids."""
    return K3Config(
        vocab_size=vocab_size, hidden_size=256, num_layers=8, mla_layers=(3, 7), kda_num_heads=4, kda_head_dim=64,
        num_heads=4, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, intermediate_size=768,
        num_experts=16, num_active_experts=4, num_shared_experts=1, expert_intermediate_size=192, first_dense_layers=1,
        rms_norm_eps=1e-5, max_position_embeddings=4096, dtype="float32",
    )  # fmt: skip


def against_transformers(
    folder: Path, *, requests: int = 32, rounds: int = 3, low: int = 16, high: int = 256
) -> dict[str, Any]:
    """Tokens/s of both on the same folder: ragged lengths in [low, high] in and out, and equal lengths."""
    ours, theirs = LLM(folder, dtype="float32"), _their_model(folder)
    vocab = ours.engine.model_config.vocab_size
    results: dict[str, Any] = {}
    for case in ("ragged", "equal"):
        samples: dict[str, list[float]] = {"baltoro": [], "transformers": []}
        for number in range(rounds):
            draw = Random(number)
            middle = (low + high) // 2
            lengths = [(draw.randint(low, high), draw.randint(low, high)) for _ in range(requests)]
            if case == "equal":
                lengths = [(middle, middle)] * requests
            prompts = [[draw.randrange(3, vocab // 2) for _ in range(n)] for n, _ in lengths]
            outputs = [n for _, n in lengths]
            samples["baltoro"].append(sum(outputs) / _seconds(ours, prompts, outputs))
            samples["transformers"].append(sum(outputs) / _their_seconds(theirs, prompts, outputs))
        medians = {name: median(found) for name, found in samples.items()}
        ratio = medians["baltoro"] / medians["transformers"]
        results[case] = {"medians": medians, "ratio": ratio, "samples": samples}
    return results


def _seconds(llm: LLM, prompts: list[list[int]], outputs: list[int]) -> float:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in outputs]
    began = time.perf_counter()
    done = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    assert [len(c.token_ids) for c in done] == outputs, "a request ended early; its tokens would be counted for nothing"
    return seconds


def _their_model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _their_seconds(model: Any, prompts: list[list[int]], outputs: list[int]) -> float:
    """One padded batch; the longest output decides for all, which is what `generate` does with a batch."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    longest = max(outputs)
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0
        )
    return time.perf_counter() - began
