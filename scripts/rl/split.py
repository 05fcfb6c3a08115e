"""Where the KL between engine and trainer comes from: weights, activations, kernel order, one at a time.

    python -m scripts.rl.split [--model models/tiny] [--device cuda] [--dtypes bfloat16,float32]

An engine samples; then the same ids are scored again with one thing changed at a time. Both ends have a model of their
own, and an adapter whose B is not zero.

    as run              sampled by decode steps of the engine | the trainer's forward, packed
    routes replayed     the same, with the experts that the engine took
    decode, prefill     the engine's decode steps | the engine's one prefill of the same ids        kernel order
    prefill, forward    the engine's prefill | the trainer's forward of one trajectory              kernel order
    alone, packed       the trainer's forward of one trajectory | of all, packed                    kernel order
    activations         the trainer's forward in bf16 | in fp32, on weights of equal values
    weights             tensors of the two models that differ in a bit
    weights in FP8      what another base would cost: matrices that are not packed rounded to e4m3, one scale a matrix

Written to bench/results/rl-cpu.json (on a GPU: printed), section split.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from baltoro.config import load_config
from baltoro.envs.base import Family
from baltoro.model.adapter import Adapter, SiteFactors
from baltoro.rl.drift import perturbed
from baltoro.rl.inline import InlinePolicy
from baltoro.rl.parts import Parts, open_parts
from baltoro.rl.recipe import RLConfig
from baltoro.rl.types import Trajectory
from baltoro.trainer.policy_sample import PolicySample, pack_policy
from baltoro.trainer.policy_step import PolicyTrainer
from baltoro.trainer.ratio import Drift, drift
from scripts.rl.result import ROOT, record, rounded

FP8_MOST = 448.0
STD = 0.004  # of the adapter's B: a norm of 3, which is what some twenty steps make of it
Scores = list[float]


def settings(options: argparse.Namespace, dtype: str) -> RLConfig:
    """The recipe of the tiny model with one round of some tasks."""
    return load_config(
        RLConfig,
        ROOT / "recipes" / "rl-tiny-cpu.toml",
        [
            f"model={options.model}",
            "engine.place=inline",
            f"engine.options.device={options.device}",
            f"engine.options.dtype={dtype}",
            f"rollout.groups={options.groups}",
            "rollout.group_size=4",
            "rollout.replays_routes=true",
            "threads=1",
        ],
    )


def split(config: RLConfig, families: Sequence[Family] | None = None) -> dict[str, Drift | int]:
    """All rows of one dtype. Activations and FP8 are there where the dtype is bfloat16 and float32 in turn."""
    parts = open_parts(config, families=families)
    try:
        adapter = perturbed(parts.trainer.adapter(), STD)
        parts.trainer.install(adapter)
        parts.sync.publish(parts.version, adapter)
        groups = parts.collector.collect(parts.version, parts.fresh(), config.rollout.group_size)
        said = [t for group in groups for t in group.members if t.num_sampled and all(t.mask)]
        sampled = [x for t in said for x in t.logprobs]
        prefill = [x for t in said for x in parts.policy.score(t.prompt, t.tokens)]
        alone, packed = _alone(parts.trainer, said), _packed(parts.trainer, said)
        rows: dict[str, Drift | int] = {
            "as run": compared(packed, sampled),
            "routes replayed": compared(_packed(parts.trainer, said, replays_routes=True), sampled),
            "decode, prefill": compared(prefill, sampled),
            "prefill, forward": compared(alone, prefill),
            "alone, packed": compared(packed, alone),
            "weights": differing(parts),
        }
        if parts.trainer.model.dtype == torch.bfloat16:
            rows["activations"] = compared(alone, _in_float32(config, adapter, said, families))
        else:
            with in_fp8(parts.trainer):
                rows["weights in FP8"] = compared(_alone(parts.trainer, said), alone)
        return rows
    finally:
        parts.close()


def compared(now: Scores, old: Scores) -> Drift:
    """Both of the same ids, in float64."""
    a, b = (torch.tensor(one, dtype=torch.float64) for one in (now, old))
    return drift(a, b, torch.ones(len(a), dtype=torch.bool))


def _alone(trainer: PolicyTrainer, said: Sequence[Trajectory]) -> Scores:
    return [x for t in said for x in trainer.score(t.prompt, t.tokens)]


@torch.no_grad()
def _packed(trainer: PolicyTrainer, said: Sequence[Trajectory], *, replays_routes: bool = False) -> Scores:
    samples = [PolicySample(t.prompt + t.tokens, len(t.prompt), t.mask, t.logprobs, 0.0, routes=t.routes) for t in said]
    batches = pack_policy(samples, sum(map(len, samples)), trainer.model.config if replays_routes else None)
    assert len(batches) == 1
    found: Scores = trainer.logprobs(batches[0].to(trainer.model.device)).tolist()
    return found


def _in_float32(
    config: RLConfig, adapter: Adapter, said: Sequence[Trajectory], families: Sequence[Family] | None
) -> Scores:
    """By a trainer whose weights and factors have the same values, and whose activations are float32."""
    options = {**config.engine.options, "dtype": "float32"}
    wide = replace(config, engine=replace(config.engine, options=options))
    parts = open_parts(wide, families=families)
    try:
        factors = {m: SiteFactors(f.a.float(), f.b.float(), f.scale) for m, f in adapter.factors.items()}
        parts.trainer.install(Adapter(adapter.settings, factors))
        return _alone(parts.trainer, said)
    finally:
        parts.close()


def differing(parts: Parts) -> int:
    """Tensors of the base that are not the same bits in both models."""
    assert isinstance(parts.policy, InlinePolicy)
    theirs, own = parts.policy.engine.runner.model.state_dict(), parts.trainer.model.state_dict()
    names = [name for name in own if "lora" not in name and "bank" not in name]
    assert names
    return sum(name in theirs and not _is_equal(theirs[name], own[name]) for name in names)


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())


@contextmanager
def in_fp8(trainer: PolicyTrainer) -> Iterator[None]:
    """Matrices of the base rounded to e4m3 while the body runs; factors, norms and packed experts stay."""
    own = {id(p) for p in trainer.factors}
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for p in trainer.model.parameters():
            if p.dim() == 2 and p.is_floating_point() and id(p) not in own:
                scale = p.abs().max().clamp_min(1e-12) / FP8_MOST
                kept.append((p, p.clone()))
                p.copy_((p / scale).to(torch.float8_e4m3fn).to(p.dtype) * scale)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, old in kept:
                p.copy_(old)


def figures(found: Drift | int) -> dict[str, float] | int:
    """k3, mean and largest |dlogp|, tokens; or the count."""
    if isinstance(found, int):
        return found
    return {"k3": found.k3, "mean_dlogp": found.mean_abs, "max_dlogp": found.abs_max, "tokens": found.tokens}


def main() -> None:
    """Each dtype on its own rollouts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--groups", type=int, default=4)
    options = parser.parse_args()
    found = {}
    for dtype in options.dtypes.split(","):
        rows = split(settings(options, dtype))
        found[dtype] = {name: rounded(figures(one)) for name, one in rows.items()}
    print(json.dumps(found, indent=1))
    if options.device == "cpu":
        record("split", {"model": options.model.name, "rows": found})


if __name__ == "__main__":
    main()
