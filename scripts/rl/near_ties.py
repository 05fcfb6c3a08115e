"""Near ties of routers: where engine and trainer take different experts, what it costs, and what replay leaves of it.

    python -m scripts.rl.near_ties [--model models/tiny] [--device cuda] [--dtype float32] [--tokens 400000]

An engine prefills pages of this repository, piece by piece, and tells logprobs and routes; the trainer's packed forward
replays these and counts where its own routers would have chosen another set. Where there is one, the same forward is
done without replay. Besides: the margin by which the last expert taken led the next one, over all picks; and at the
smallest margins, what the other choice costs, forced by routes in which it is made.

Written to bench/results/rl-cpu.json (on a GPU: printed), section near_ties.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baltoro.chat.tokenizer import Tokenizer
from baltoro.config import load_config
from baltoro.model.moe import MoE, Router
from baltoro.model.routes import Routes
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from baltoro.rl.drift import perturbed
from baltoro.rl.inline import InlinePolicy
from baltoro.rl.parts import Parts, open_parts
from baltoro.rl.recipe import RLConfig
from baltoro.trainer.policy_sample import PolicyBatch, PolicySample, pack_policy
from baltoro.trainer.ratio import Drift, drift
from scripts.rl.result import ROOT, record, rounded
from scripts.rl.split import STD, figures

PIECE, BATCH = 256, 16
SMALL = 1e-6
NUM_FORCED = 8
Pieces = list[tuple[int, ...]]


@dataclass(slots=True)
class Found:
    """Sums over batches. Single writer: `main`."""

    picks: int = 0
    small: int = 0  # margins below SMALL
    smallest: float = 1.0
    changed: int = 0
    replayed: Drift = field(default_factory=Drift)
    parted: list[dict[str, Any]] = field(default_factory=list)  # batches in which routers chose otherwise
    forced: list[dict[str, float]] = field(default_factory=list)


def settings(options: argparse.Namespace) -> RLConfig:
    """The recipe of the tiny model with an engine that keeps routes, in this process."""
    return load_config(
        RLConfig,
        ROOT / "recipes" / "rl-tiny-cpu.toml",
        [
            f"model={options.model}",
            "engine.place=inline",
            f"engine.options.device={options.device}",
            f"engine.options.dtype={options.dtype}",
            f"engine.options.max_batch_tokens={PIECE * BATCH // 4}",
            f"engine.options.max_logit_rows={PIECE * BATCH}",
            "rollout.replays_routes=true",
        ],
    )


def pages(model: Path, num_tokens: int) -> Iterator[Pieces]:
    """Batches of pieces of this repository's pages and sources."""
    tokenizer, ids = Tokenizer.load(model), list[int]()
    for file in sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "baltoro").rglob("*.py")]):
        ids += tokenizer.encode(file.read_text(encoding="utf-8"))
        if len(ids) >= num_tokens:
            break
    cut = [tuple(ids[at : at + PIECE]) for at in range(0, min(len(ids), num_tokens) - PIECE + 1, PIECE)]
    yield from (cut[at : at + BATCH] for at in range(0, len(cut), BATCH))


def by_engine(parts: Parts, pieces: Pieces, number: int) -> list[PolicySample]:
    """Samples with the engine's logprobs of every token but the first, and its routes."""
    assert isinstance(parts.policy, InlinePolicy)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    names = [f"p{number}.{n}" for n in range(len(pieces))]
    for name, piece in zip(names, pieces, strict=True):
        request = Submit(request_id=name, token_ids=piece, params=params, cache_salt=name, return_routed_experts=True)
        parts.policy.submit(request)
    last: dict[str, TokenDelta] = {}
    while len(last) < len(names):
        last |= {delta.request_id: delta for delta in parts.policy.poll(0.0) if delta.finish_reason}
    samples = []
    for name, piece in zip(names, pieces, strict=True):
        assert last[name].error is None and last[name].prompt_logprobs is not None
        scores = tuple(score or 0.0 for score in (last[name].prompt_logprobs or ())[1:])
        flags = (True,) * len(scores)
        samples.append(PolicySample(piece, 1, flags, scores, 0.0, routes=last[name].routed_experts))
    return samples


class Margins:
    """Listens to the routers of a forward: score and bias of the last expert taken minus those of the next one, float64
    [T] a layer, and the next one's id."""

    def __init__(self, parts: Parts) -> None:
        moes = [module for module in parts.trainer.model.modules() if isinstance(module, MoE)]
        self.routers: list[Router] = [moe.gate for moe in moes if moe.gate.index is not None]
        self.margins: list[Tensor] = []
        self.runner_ups: list[Tensor] = []
        for router in self.routers:
            router.observer = lambda scores, ids, router=router: self._hear(router, scores)

    def _hear(self, router: Router, scores: Tensor) -> None:
        choice = (scores + router.e_score_correction_bias).double()
        best = choice.topk(router.config.num_active_experts + 1, -1)
        self.margins.append(best.values[:, -2] - best.values[:, -1])
        self.runner_ups.append(best.indices[:, -1])

    def close(self) -> None:
        for router in self.routers:
            router.observer = None


@torch.no_grad()
def look(parts: Parts, samples: Sequence[PolicySample], found: Found) -> None:
    """One batch."""
    trainer = parts.trainer
    (batch,) = pack_policy(samples, sum(map(len, samples)), trainer.model.config)
    batch = batch.to(trainer.model.device)
    assert batch.routes is not None
    margins = Margins(parts)
    now = trainer.logprobs(batch)
    margins.close()
    margin = torch.stack(margins.margins, 1)
    changed = int(batch.routes.changed.sum())
    found.picks += margin.numel()
    found.small += int((margin < SMALL).sum())
    found.smallest = min(found.smallest, float(margin.min()))
    found.changed += changed
    joined = drift(now, batch.old, batch.mask)
    found.replayed = found.replayed + joined
    if changed:
        apart = drift(trainer.logprobs(without(batch)), batch.old, batch.mask)
        found.parted.append({"changed": changed, "without": figures(apart), "with": figures(joined)})
    for place in margin.flatten().argsort()[: NUM_FORCED if not found.forced else 0].tolist():
        token, layer = divmod(place, margin.shape[1])
        ids = batch.routes.ids.clone()
        ids[token, layer, -1] = margins.runner_ups[layer][token]
        other = drift(trainer.logprobs(replacing(batch, ids)), batch.old, batch.mask)
        found.forced.append({"margin": float(margin[token, layer]), "max_dlogp": other.abs_max, "k3": other.k3})


def without(batch: PolicyBatch) -> PolicyBatch:
    """With routers that choose for themselves."""
    return PolicyBatch(
        batch.tokens, batch.lengths, batch.rows, batch.targets, batch.old, batch.advantages, batch.trajectory,
        batch.is_fresh,
    )  # fmt: skip


def replacing(batch: PolicyBatch, ids: Tensor) -> PolicyBatch:
    """With other routes."""
    made = without(batch)
    object.__setattr__(made, "routes", Routes.of(ids))
    return made


def main() -> None:
    """All batches under one adapter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=400_000)
    options = parser.parse_args()
    parts, found, num_tokens = open_parts(settings(options)), Found(), 0
    try:
        adapter = perturbed(parts.trainer.adapter(), STD)
        parts.trainer.install(adapter)
        parts.sync.publish(parts.version, adapter)
        for number, pieces in enumerate(pages(options.model, options.tokens)):
            look(parts, by_engine(parts, pieces, number), found)
            num_tokens += sum(map(len, pieces))
            print(num_tokens, found.changed, f"{found.smallest:.3g}", f"{found.replayed.abs_max:.3g}", flush=True)
    finally:
        parts.close()
    result = {
        "tokens": num_tokens,
        "picks": found.picks,
        "share_below_1e-6": found.small / found.picks,
        "smallest_margin": found.smallest,
        "changed": found.changed,
        "replayed": rounded(figures(found.replayed)),
        "batches_parted": rounded(found.parted),
        "forced": rounded(found.forced),
    }
    print(json.dumps(result, indent=1))
    if options.device == "cpu":
        record("near_ties", {"model": options.model.name, "dtype": options.dtype, **result})


if __name__ == "__main__":
    main()
