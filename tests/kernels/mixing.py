"""Random problems of what stands around KDA's chunk form, for the interpreter and a GPU: checked against float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baltoro.kernels.kda import enter, fast_enter
from baltoro.kernels.kda.fused_reference import MixerWeights
from baltoro.kernels.norm import fast as fast_norm
from baltoro.kernels.norm import reference as norm
from baltoro.kernels.spans import Borders, Spans
from tests.kernels.tolerances import TOLERANCES

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """Lengths and starts of spans, points inside them, heads, width of a head, taps."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...] | None
    borders: Borders
    heads: int
    width: int
    taps: int = 4
    bound: float | None = -5.0


RAGGED = (1, 2, 3, 4, 5, 1, 3)
CASES = {
    "one long": Case((100,), None, ((0, 32), (0, 64)), 2, 16),
    "ragged": Case(RAGGED, None, ((1, 1), (3, 2), (4, 4)), 2, 64),
    "ragged with a past": Case(RAGGED, (7,) * 7, ((2, 1), (2, 2), (4, 3)), 2, 16),
    "some with a past": Case((70, 1, 64, 2, 65), (64, 1, 0, 128, 0), ((0, 63), (0, 64), (0, 66), (4, 1)), 2, 16),
    "twelve heads": Case((3, 1), (0, 2), ((0, 1),), 12, 16),
    "K3's width": Case((5, 66), (0, 3), ((1, 61),), 2, 128),
    "softplus": Case((9, 3), (4, 0), (), 2, 64, bound=None),
    "odd": Case((65, 2), (1, 1), ((0, 1),), 3, 20, taps=3),
    "one tap": Case((3, 66), (1, 0), ((1, 5),), 1, 16, taps=1),
    "two taps": Case((1, 1, 1), (0, 1, 2), (), 2, 16, taps=2),
}


def gap(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def bound_of(op: str, got: Tensor) -> float:
    return TOLERANCES[op][str(got.dtype).removeprefix("torch.")]


def strided(tokens: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """[tokens, width] between columns that nobody may read."""
    wide = torch.full((tokens, width + 24), float("nan"), device=device, dtype=dtype)
    wide[:, 8 : 8 + width] = torch.randn(tokens, width, device=device).to(dtype)
    return wide[:, 8 : 8 + width]


def weights_of(case: Case, device: str) -> MixerWeights:
    heads, width = case.heads, case.width
    conv = torch.randn(3 * heads * width, case.taps, device=device) * 0.7
    a_log, bias = torch.randn(heads, device=device), torch.randn(heads, width, device=device)
    gain = torch.rand(width, device=device) + 0.5
    return MixerWeights(conv, a_log, bias, gain, EPS, case.bound, width**-0.5)


def in_double(weights: MixerWeights) -> MixerWeights:
    wide = {name: getattr(weights, name).double() for name in ("conv", "A_log", "dt_bias", "norm")}
    return replace(weights, **wide)


@contextmanager
def fills_with_nan() -> Iterator[None]:
    """New memory holds NaN, so that what nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_enter(case: Case, dtype: torch.dtype, device: str) -> None:
    """Every output, against float64 and, where roundings must agree, against the reference in the same dtype."""
    heads, width, tokens = case.heads, case.width, sum(case.lengths)
    spans = Spans.build(case.lengths, case.starts, device=device)
    x, raw = strided(tokens, 3 * heads * width, dtype, device), strided(tokens, heads * width, dtype, device)
    raw, b = raw.unflatten(-1, (heads, width)), strided(tokens, heads, dtype, device)
    history = None
    if case.starts is not None:
        history = torch.randn(len(spans), case.taps - 1, 3 * heads * width, device=device).to(dtype)
    weights, layout = weights_of(case, device), {"spans": spans, "borders": case.borders}
    before = None if history is None else history.clone()
    with fills_with_nan():
        mixed, after = fast_enter.enter(x, raw, b, weights, history=history, **layout)
    wide = None if history is None else history.double()
    exact, _ = enter.enter(x.double(), raw.double(), b.double(), in_double(weights), history=wide, **layout)
    plain, kept = enter.enter(x, raw, b, weights, history=history, **layout)
    for name, got, expected, same in zip(mixed._fields, mixed, exact, plain, strict=True):
        assert got.shape == same.shape and got.dtype == same.dtype, name
        assert gap(got, expected) < bound_of("kda_enter", got), (name, gap(got, expected))
    assert torch.equal(after, kept) and after.dtype == x.dtype
    assert history is None or (before is not None and torch.equal(history, before))


def check_gated(tokens: int, heads: int, width: int, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """Of o, the gate and the result."""
    o_type, gate_type, out_type = dtypes
    o = strided(tokens, heads * width, o_type, device).unflatten(-1, (heads, width))
    gate = strided(tokens, heads * width, gate_type, device).unflatten(-1, (heads, width))
    weight = torch.rand(width, device=device) + 0.5
    with fills_with_nan():
        got = fast_norm.gated_rms_norm(o, gate, weight, EPS, out_type)
    exact = norm.gated_rms_norm(o.double(), gate.double(), weight.double(), EPS, torch.float64)
    assert got.dtype == out_type and got.shape == o.shape
    assert gap(got, exact) < bound_of("gated_rms_norm", got), gap(got, exact)
