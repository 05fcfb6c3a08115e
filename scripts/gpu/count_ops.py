"""Operations and waits of one training step, by phase, counted on a CPU in the recipe's real shape.

    python scripts/gpu/count_ops.py --tokens 4096 16384

The kernels are those of a GPU where they run on a CPU too: grouped expert products, padded attention. The KDA
recurrence stands in as one operation (the library's own launches, about 12 forward and 15 backward, come on top).
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also without an installed baltoro

from baltoro.bench.ops import FROM_HOST, OpCounter
from baltoro.config import load_config
from baltoro.kernels.dispatch import Kernels, kernels_for
from baltoro.kernels.moe import device_grouped
from baltoro.model import decoder, layer
from baltoro.trainer import step as step_module
from baltoro.trainer.config import TrainConfig
from baltoro.trainer.prepare import Prepared
from baltoro.trainer.run import Run

FORWARD = {"KDA": "KDA", "MLA": "MLA", "MoE": "MoE", "MLP": "MLP", "VisionTower": "vision", "Projector": "vision"}


class _StandIn(torch.autograd.Function):
    """One operation forward and one a gradient backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, g, beta)
        return v.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors)


def stand_in(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """In the place of the chunk kernels."""
    return _StandIn.apply(q, k, v, g, beta), v.new_zeros(1)  # type: ignore[no-untyped-call]


def gpu_kernels(device: torch.device) -> Kernels:
    """The table's choices for a GPU, as far as a CPU can run them."""
    return replace(kernels_for(device), kda_chunk=stand_in, expert_product=device_grouped.expert_product)


def count_step(run: Run) -> tuple[OpCounter, float]:
    """Counts of one step, and the seconds of another one without counting."""
    counter = OpCounter()
    hooks = _label_modules(run.worker, counter)
    whole = mock.patch("baltoro.kernels.moe.reference.CPU_TILE", 1 << 60)  # as elsewhere: no tiles
    with whole, mock.patch("baltoro.model.context.kernels_for", gpu_kernels):
        step_module.train_step(run)  # tables and optimizer state are made in the first step
        with _phases(run, counter), counter.counting():
            step_module.train_step(run)
        for hook in hooks:
            hook.remove()
        began = time.perf_counter()
        step_module.train_step(run)
    return counter, time.perf_counter() - began


def _label_modules(model: nn.Module, counter: OpCounter) -> list[Any]:
    hooks = []
    for module in model.modules():
        label = FORWARD.get(type(module).__name__)
        if label is not None:
            opened: list[Any] = []

            def enter(*_: Any, label: str = label, opened: list[Any] = opened) -> None:
                opened.append(counter.counting_for(f"forward {label}"))
                opened[-1].__enter__()

            def leave(*_: Any, opened: list[Any] = opened) -> None:
                opened.pop().__exit__(None, None, None)

            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    return hooks


def _phases(run: Run, counter: OpCounter) -> ExitStack:
    """Patches that name the phases of `train_step`."""
    stack = ExitStack()
    wanted = [
        (run.feed, "take", "data"), (Prepared, "to", "data"), (step_module, "objective", "forward rest"),
        (Tensor, "backward", "backward"), (run.muon, "step", "Muon"), (run.adam, "step", "AdamW"),
        (run.balancer, "update", "balance"), (run.balancer, "_see", "balance"), (run.qk_clip, "apply", "QK-clip"),
        (Run, "collect_gradients", "copies"), (Run, "publish", "copies"),
        (step_module, "_clip_gradients", "gradient norm"), (step_module, "source_sums", "metrics"),
        (step_module, "read_records", "metrics"),
        (decoder, "mix", "forward AttnRes"), (layer, "mix", "forward AttnRes"),
    ]  # fmt: skip
    for owner, name, phase in wanted:
        stack.enter_context(mock.patch.object(owner, name, counter.wrap(getattr(owner, name), phase)))
    return stack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/tiny.toml")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--stage", type=int, default=1, help="which stage of the recipe, from 0")
    parser.add_argument("--names", type=int, default=0, help="also the N most frequent operations of each phase")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    found = []
    for tokens in args.tokens:
        sizes = [f"batch.tokens={tokens}", f"batch.micro_tokens={tokens}", 'device="cpu"', *args.changes]
        sizes.append("data.prefetch=false")  # in this thread, where it is counted
        config = load_config(TrainConfig, args.recipe, sizes)
        stage = replace(config.stages[args.stage], until=1.0)
        run = Run.create(replace(config, stages=(stage,)))
        found.append(count_step(run))
    _show(args.tokens, found, args.names)


def _show(sizes: list[int], found: list[tuple[OpCounter, float]], names: int) -> None:
    phases = sorted({phase for counter, _ in found for phase in counter.ops})
    print(
        f"{'phase':<18}" + "".join(f"{f'ops, {n} tokens':>20}{'launches':>10}{'waits':>7}{'copies':>8}" for n in sizes)
    )
    for phase in [*phases, "all"]:
        row = f"{phase:<18}"
        for counter, _ in found:
            mine = [p for p in counter.ops if phase in ("all", p)]
            waits = {k: n for k, n in counter.waits.items() if k[0] in mine}
            copies = sum(n for (_, kind), n in waits.items() if kind == FROM_HOST)
            row += f"{sum(counter.ops[p] for p in mine):>20}{sum(counter.kernels[p] for p in mine):>10}"
            row += f"{sum(waits.values()) - copies:>7}{copies:>8}"
        print(row)
    print("waits:", dict(sorted(found[-1][0].waits_in().items())))
    print("seconds a step on this CPU:", [round(seconds, 3) for _, seconds in found])
    for phase in phases if names else ():
        mine = {name: n for (p, name), n in found[-1][0].names.items() if p == phase}
        print(phase, sorted(mine.items(), key=lambda item: -item[1])[:names])


if __name__ == "__main__":
    main()
