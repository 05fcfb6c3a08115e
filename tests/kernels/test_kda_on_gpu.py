"""The KDA kernels on a CUDA device at K3's head size: the float64 forms, the fold in bits, segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baltoro.kernels.kda import fused, launch, prefill
from baltoro.kernels.kda import fused_reference as reference
from baltoro.kernels.kda.fused_reference import MixerWeights, Window
from baltoro.kernels.kda.launch import Columns, Config, Copies
from baltoro.kernels.kda.reference import l2_norm, recurrent
from baltoro.kernels.spans import Spans

pytestmark = pytest.mark.gpu

H, K, U, TAPS, G = 3, 128, 9, 4, 8
SLOTS = (6, 0, 3, 8)
NAMES = ("conv", "A_log", "dt_bias", "norm")


def gap(got: Tensor, expected: Tensor) -> float:
    """Relative distance in the 2-norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def case(dtype: torch.dtype, heads: int = H) -> tuple[list[Tensor], MixerWeights, Tensor, Tensor]:
    """Inputs of G tokens of each request, weights, history and state."""
    lead, width = (len(SLOTS), G), 3 * heads * K
    inputs = [draw(*lead, *rest, dtype=dtype) for rest in ((width,), (heads, K), (heads,), (heads, K))]
    f32 = torch.float32
    weights = MixerWeights(
        draw(width, TAPS, dtype=f32) * 0.5, draw(heads, dtype=f32) * 0.3, draw(heads, K, dtype=f32) - 2,
        draw(K, dtype=f32), 1e-5, -5.0, K**-0.5,
    )  # fmt: skip
    return inputs, weights, draw(U, TAPS - 1, width, dtype=dtype), draw(U, heads, K, K, dtype=f32)


# few heads and many: the kernels' tiles differ
@pytest.mark.parametrize("heads", [H, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_and_verify(dtype: torch.dtype, heads: int) -> None:
    inputs, weights, history, state = case(dtype, heads)
    exact = replace(weights, **{name: getattr(weights, name).double() for name in NAMES})
    past, matrix, slots = history.double(), state.double(), torch.tensor(SLOTS, device="cuda")
    window = Window.empty(len(SLOTS), G, heads=heads, keys=K, values=K, dtype=dtype, device="cuda")
    before = state.clone()
    at_once = fused.verify(*inputs, weights, history, state, slots, window)
    assert torch.equal(state, before)
    live, bound = [0, 2, 3], 1e-5 if dtype == torch.float32 else 8e-3
    for t in range(G):
        token = [x[:, t] for x in inputs]
        expected = reference.decode(*(x.double() for x in token), exact, past, matrix, slots)
        got = fused.decode(*token, weights, history, state, slots)
        assert gap(got[live], expected[live]) < bound and gap(at_once[live, t], expected[live]) < bound
        assert (got[1] == 0).all() and (at_once[1] == 0).all()
    assert gap(state[1:], matrix[1:]) < bound and torch.equal(history[1:].double(), past[1:])


@pytest.mark.parametrize("heads", [H, 48])
def test_fold_equals_decode_in_every_bit_for_every_accepted_length(heads: int) -> None:
    layers, slots = 3, torch.tensor(SLOTS, device="cuda")
    inputs, weights, _, _ = case(torch.bfloat16, heads)
    states = draw(U, layers, heads, K, K, dtype=torch.float32)
    histories = draw(U, layers, TAPS - 1, 3 * heads * K)
    first = states.clone(), histories.clone()
    window = Window.empty(
        len(SLOTS), G, heads=heads, keys=K, values=K, dtype=torch.bfloat16, device="cuda", layers=layers
    )
    after = [first]
    for t in range(G):
        for layer in range(layers):
            kept = window.layer(layer)
            kept.x.copy_(inputs[0])
            one = Window(*(torch.empty_like(getattr(kept, n)[:, :1]) for n in ("x", "k", "v", "decay", "beta")))
            token = [x[:, t] for x in inputs]
            fused.decode(*token, weights, histories[:, layer], states[:, layer], slots, record=one)
            for name in ("k", "v", "decay", "beta"):
                getattr(kept, name)[:, t : t + 1] = getattr(one, name)
        after.append((states.clone(), histories.clone()))
    for count in range(G + 1):
        state, history = first[0].clone(), first[1].clone()
        views = [history[:, i] for i in range(layers)], [state[:, i] for i in range(layers)]
        accepted = torch.full((len(SLOTS),), count, dtype=torch.int32, device="cuda")
        fused.fold(window, *views, slots, accepted)
        assert torch.equal(state, after[count][0]) and torch.equal(history, after[count][1]), count


@pytest.mark.parametrize("is_bounded", [True, False])
@pytest.mark.parametrize("segment_chunks", [None, 1, 2])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 6e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("strength", [3.0, -1.0])
def test_prefill(
    is_bounded: bool, segment_chunks: int | None, dtype: torch.dtype, bound: float, strength: float
) -> None:
    lengths, starts, borders = (1, 63, 130, 300, 17), (0, 64, 5, 0, 60), ((3, 128), (2, 59))
    num = sum(lengths)
    q, k = (l2_norm(torch.randn(num, H, K, device="cuda").double()).to(dtype).double() for _ in range(2))
    v = draw(num, H, K, dtype=dtype)
    g = -5 * torch.sigmoid(torch.randn(num, H, K, device="cuda").double() - strength)
    beta, state = torch.rand(num, H, device="cuda").double(), torch.randn(len(lengths), H, K, K, device="cuda")
    spans = Spans.build(lengths, starts, device="cuda")
    expected, wanted = recurrent(
        q, k, v.double(), g, beta, spans=spans, state=state.double(), scale=K**-0.5, borders=borders
    )
    options = {"scale": K**-0.5, "is_bounded": is_bounded, "segment_chunks": segment_chunks}
    layout = (lengths, starts, borders)
    # FP32 keys and queries, and such that Gluon's kernels take
    for kind in {torch.float32, dtype}:
        o, after = prefill.run(q.to(kind), k.to(kind), v, g.float(), beta.float(), state, layout, **options)
        assert gap(o, expected) < bound and gap(after, wanted) < bound


@pytest.mark.parametrize("segment_chunks", [None, 2])
@pytest.mark.parametrize("columns", [Columns(), Columns(None, heads_first=False)])
@pytest.mark.parametrize("is_early", [True, False])
def test_prefill_in_gluon(
    segment_chunks: int | None, columns: Columns, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(*_: Any, **__: Any) -> Config:
        return replace(launch.choose(torch.bfloat16, keys=K, values=K), columns=columns, copies=Copies(is_early))

    monkeypatch.setattr(prefill, "choose", choose)
    for strength in (3.0, 0.0, -1.0):
        test_prefill(True, segment_chunks, torch.bfloat16, 6e-3, strength)


def test_fold_in_triton_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_is_direct", lambda *_: False)
    test_fold_equals_decode_in_every_bit_for_every_accepted_length(H)
