"""Checks of the KDA chunk form on a device, for `lab_prefill`: intermediates against float64, failures as lines."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from baltoro.kernels.kda import launch, prefill
from baltoro.kernels.kda.launch import Config
from baltoro.kernels.kda.reference import l2_norm, recurrent
from baltoro.kernels.spans import Spans

BEGUN = time.monotonic()
NAMES = ("w", "u", "k_out", "q_in", "a", "gamma")
BF16, F32 = torch.bfloat16, torch.float32


def say(*words: object) -> None:
    """With the time since the start."""
    print(f"[{time.monotonic() - BEGUN:5.1f}]", *words, flush=True)


def gap(got: Tensor, exact: Tensor) -> float:
    """Relative distance."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def attempt(name: str, work: Callable[[], object]) -> object:
    """Its result, or None and a line."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - a variant that fails is a line of the report
        say(f"{name}: FAILED {type(error).__name__}: {str(error).strip().splitlines()[-1:] or ''}"[:220])
        if not isinstance(error, (RuntimeError, ValueError)):
            say(traceback.format_exc(limit=-2).replace("\n", " | ")[:400])
        return None


def inputs(num: int, heads: int, keys: int, dtype: torch.dtype, device: str, spread: float = 3.0) -> tuple[Tensor, ...]:
    """q, k, v, g, beta; gates within their bound."""
    q, k = (l2_norm(torch.randn(num, heads, keys, device=device)).to(dtype) for _ in range(2))
    v = torch.randn(num, heads, keys, device=device).to(dtype)
    g = -5 * torch.sigmoid(torch.randn(num, heads, keys, device=device) - spread)
    return q, k, v, g, torch.rand(num, heads, device=device)


def truth(tensors: tuple[Tensor, ...], rows: list[tuple[int, int]], scale: float, chunk: int) -> dict[str, Tensor]:
    """What the preparation makes, in float64 from pairs of sums that are subtracted."""
    found: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    for first, length in rows:
        parts = [t[first : first + length].double().reshape(length, t.shape[1], -1).transpose(0, 1) for t in tensors]
        q, k, v, g, beta = (torch.nn.functional.pad(t, (0, 0, 0, chunk - length)) for t in parts)
        total = g.cumsum(1)
        ratio = (total[:, :, None] - total[:, None]).clamp_max(0).exp()
        lower = torch.einsum("hik,hjk,hijk->hij", k, k, ratio).tril(-1) * beta
        inverse = torch.linalg.inv(torch.eye(chunk, device=q.device, dtype=torch.float64) + lower)
        made = (
            inverse @ (k * beta * total.exp()), inverse @ (v * beta), k * (total[:, -1:] - total).exp(),
            q * total.exp() * scale, torch.einsum("hik,hjk,hijk->hij", q, k, ratio).tril() * scale, total[:, -1].exp(),
        )  # fmt: skip
        for name, tensor in zip(NAMES, made, strict=True):
            found[name].append(tensor)
    return {name: torch.stack(tensors) for name, tensors in found.items()}


class Case:
    """Ragged spans with borders, and everything exact about them, made on the CPU."""

    def __init__(self, keys: int, dtype: torch.dtype, chunk: int = 64) -> None:
        self.chunk, self.scale = chunk, keys**-0.5
        self.layout = (1, 63, 130, 300, 17), (0, 64, 5, 0, 60), ((3, 128), (2, 59))
        lengths, starts, borders = self.layout
        self.tensors = inputs(sum(lengths), 2, keys, dtype, "cpu")
        self.tensors[3][150:230] = -5.0  # some chunks at the bound of the gate
        self.state = torch.randn(len(lengths), 2, keys, keys)
        spans, doubles = Spans.build(lengths, starts), [t.double() for t in self.tensors]
        self.o, self.after = recurrent(
            *doubles, spans=spans, state=self.state.double(), scale=self.scale, borders=borders
        )
        plan, _ = prefill._tables(self.layout, chunk, None, torch.device("cpu"))
        self.made = truth(self.tensors, [c[:2] for c in plan.chunks], self.scale, chunk)

    def to(self, device: str) -> Case:
        """Itself, its inputs on a device."""
        self.tensors, self.state = tuple(t.to(device) for t in self.tensors), self.state.to(device)
        return self

    def check(self, name: str, config: Config, is_bounded: bool, segments: int | None = None) -> bool:
        """One line. Everything the launches allocate is poisoned before."""
        q, k, v, g, beta = self.tensors
        poison = [torch.full((1 << 22,), float("nan"), device=v.device) for _ in range(4)]
        del poison
        call = prefill.plan_call(
            v, self.state, self.layout, fit(config, v, q), chunk=self.chunk, is_bounded=is_bounded,
            segment_chunks=segments,
        )  # fmt: skip
        made = call.prepare((q, k, v, g, beta), 0, 2, self.scale)
        call.scan(made, v, call.enter(made, v, 0, 2) if call.plan.fragments else call.state, 0, 2)
        o, after = gap(call.out.cpu(), self.o), gap(call.after.cpu(), self.after)
        gaps = " ".join(
            f"{n} {gap(t.cpu(), self.made[n]):.1e}"
            for n, t in list(zip(NAMES, made, strict=True))[2 * config.is_direct :]
        )
        is_good = max(o, after) < (6e-3 if v.dtype == BF16 else 1e-5)
        say(f"{'ok   ' if is_good else 'WRONG'} {name}: o {o:.1e} states {after:.1e} | {gaps}")
        return is_good


def fit(config: Config, v: Tensor, q: Tensor) -> Config:
    """To the sizes of a case."""
    return config.fit(keys=q.shape[-1], values=v.shape[-1])


def default(dtype: torch.dtype) -> Config:
    """As `prefill` chooses."""
    return launch.choose(dtype, keys=128, values=128)
