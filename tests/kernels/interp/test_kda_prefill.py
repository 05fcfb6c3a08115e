"""The Triton chunk form of KDA against the float64 recurrence: ragged spans, segments, borders, hard gates."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.kda import launch, prefill
from baltoro.kernels.kda.reference import l2_norm, recurrent
from baltoro.kernels.spans import Borders, Spans
from tests.kernels.tolerances import TOLERANCES

SCALE = 0.3


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor


def draw(num_tokens: int, num_spans: int, *, heads: int = 1, keys: int = 16, values: int = 16, decay: float) -> Inputs:
    """Float64; log-decays uniform in (-decay, 0)."""
    q, k = (l2_norm(torch.randn(num_tokens, heads, keys).double()) for _ in range(2))
    g = -decay * torch.rand(num_tokens, heads, keys).double()
    v, beta = torch.randn(num_tokens, heads, values).double(), torch.rand(num_tokens, heads).double()
    return Inputs(q, k, v, g, beta, torch.randn(num_spans, heads, values, keys).double())


def oracle(x: Inputs, lengths: list[int], starts: list[int], borders: Borders = ()) -> tuple[Tensor, Tensor]:
    """`recurrent`; spans without tokens keep their state."""
    full = [n for n, length in enumerate(lengths) if length]
    spans = Spans.build([lengths[n] for n in full], [starts[n] for n in full])
    inner = tuple((full.index(n), length) for n, length in borders)
    o, found = recurrent(*x[:5], spans=spans, state=x.state[full], scale=SCALE, borders=inner)
    after = x.state.clone()
    after[full] = found[: len(full)]
    return o, torch.cat([after, found[len(full) :]])


def close(
    x: Inputs, lengths: list[int], starts: list[int], *, borders: Borders = (), dtype: torch.dtype = torch.float32,
    chunk: int = 16, is_bounded: bool = True, segment_chunks: int | None = None,
) -> None:  # fmt: skip
    """Outputs and states within the table's bound of the oracle, relative in the 2-norm; entering state not written."""
    fast = Inputs(*(t.float() for t in x))._replace(v=x.v.to(dtype))
    before = fast.state.clone()
    layout = (tuple(lengths), tuple(starts), borders)
    options = {"scale": SCALE, "chunk": chunk, "is_bounded": is_bounded, "segment_chunks": segment_chunks}
    o, after = prefill.run(*fast, layout, **options)
    expected, wanted = oracle(x._replace(v=fast.v.double()), lengths, starts, borders)
    name = str(dtype).removeprefix("torch.")
    assert torch.equal(fast.state, before) and o.dtype == dtype and after.dtype == torch.float32
    for op, got, exact in (("kda_chunk", o, expected), ("kda_chunk_state", after, wanted)):
        assert got.shape == exact.shape
        gap = float((got.double() - exact).norm() / exact.norm())
        assert gap < TOLERANCES[op][name], (op, gap)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("is_bounded", [True, False])
def test_every_length_around_a_chunk(length: int, is_bounded: bool) -> None:
    close(draw(length, 1, decay=1.0), [length], [3], is_bounded=is_bounded)


@pytest.mark.parametrize("seed", range(4))
def test_random_ragged_and_empty_spans(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 30, (3,), generator=random).tolist()
    lengths[seed % 3] = 0
    starts = torch.randint(0, 40, (3,), generator=random).tolist()
    x = draw(sum(lengths), 3, heads=2, keys=32, values=16, decay=2.0)
    close(x, lengths, starts, segment_chunks=[None, 1][seed % 2], is_bounded=seed < 2)


def test_values_wider_than_keys_and_channels_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "EXACT", replace(launch.EXACT, prepare=launch.Launch(16, 4, 1)))
    close(draw(20, 1, keys=16, values=64, decay=1.0), [20], [0])
    close(draw(20, 1, keys=64, values=16, decay=1.0), [20], [0], segment_chunks=1)


@pytest.mark.parametrize("segment_chunks", [None, 1, 2])
def test_segments_and_borders_are_exact(segment_chunks: int | None) -> None:
    borders = ((0, 11), (1, 16), (0, 43), (0, 11))
    close(draw(77, 2, decay=0.2), [55, 22], [5, 0], borders=borders, segment_chunks=segment_chunks)


def test_the_published_chunk_of_64_crosses_borders_that_are_absolute() -> None:
    close(draw(90, 1, decay=0.3), [90], [60], chunk=64, borders=((0, 4), (0, 68)))


@pytest.mark.parametrize(("decay", "is_bounded"), [("bound", True), ("bound", False), ("beyond", False)])
def test_gates_at_the_bound_and_far_beyond_are_finite_and_right(decay: str, is_bounded: bool) -> None:
    x = draw(70, 1, decay=0.1)
    x.g[10:45] = -5.0 if decay == "bound" else -60.0
    x.g[50:60, :, :4] = -5.0 if decay == "bound" else -200.0
    close(x, [70], [0], chunk=32, is_bounded=is_bounded)


def test_a_long_window_of_slow_decay_remembers_its_beginning() -> None:
    x = draw(192, 1, decay=1e-3)
    close(x._replace(beta=x.beta * 0.05), [192], [0], chunk=32, segment_chunks=2)


BOUNDED = [(64, 16, False), (64, 32, True), (32, 32, False)]


@pytest.mark.parametrize(("chunk", "block", "is_direct"), BOUNDED)
@pytest.mark.parametrize("decay", [0.3, 5.0])
def test_the_kernel_of_bounded_gates(
    monkeypatch: pytest.MonkeyPatch, chunk: int, block: int, is_direct: bool, decay: float
) -> None:
    bounded = replace(launch.EXACT, bounded=launch.Launch(block, 4, 1), is_direct=is_direct)
    monkeypatch.setattr(launch, "EXACT", bounded)
    x = draw(150, 2, keys=32, values=32, decay=decay)
    if decay == 5.0:
        x.g[10:110] = -5.0
    close(x, [93, 57], [7, 0], chunk=chunk, borders=((0, 57),), segment_chunks=1)


def test_equal_keys_do_not_blow_up_the_inverse_of_bounded_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "EXACT", replace(launch.EXACT, bounded=launch.Launch(16, 4, 1)))
    test_equal_keys_do_not_blow_up_the_inverse()


def test_equal_keys_do_not_blow_up_the_inverse() -> None:
    x = draw(64, 1, decay=1e-6)
    x.k[:] = x.k[:1]
    close(x._replace(beta=torch.ones_like(x.beta)), [64], [0], chunk=64)


def test_bfloat16_stays_within_its_rounding() -> None:
    close(draw(50, 1, decay=0.5), [50], [3], dtype=torch.bfloat16, segment_chunks=2)


def test_heads_in_groups_of_a_bounded_workspace_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(40, 2, heads=2, decay=1.0)
    fast = tuple(t.float() for t in x)
    layout = ((25, 15), (0, 7), ((0, 16),))
    whole = prefill.run(*fast, layout, scale=SCALE, chunk=16, segment_chunks=1)
    monkeypatch.setattr(prefill, "WORKSPACE_BYTES", 80 * (4 * (16 + 4 * 16) + 4))
    parts = prefill.run(*fast, layout, scale=SCALE, chunk=16, segment_chunks=1)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_the_entry_of_the_table_plans_by_itself_and_starts_from_zeros() -> None:
    x = draw(30, 2, decay=1.0)
    spans, fast = Spans.build([18, 12], [0, 9]), tuple(t.float() for t in x[:5])
    o, after = prefill.chunked(*fast, spans=spans, state=None, scale=SCALE, chunk=16, borders=((1, 7),))
    expected = oracle(x._replace(state=torch.zeros_like(x.state)), [18, 12], [0, 9], ((1, 7),))
    for got, exact in zip((o, after), expected, strict=True):
        torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=0)
    with pytest.raises(ShapeError):
        prefill.chunked(*fast, spans=Spans.build([29]), state=None, scale=SCALE)


def test_gradients_and_float64_take_another_form() -> None:
    x = draw(20, 1, decay=1.0)
    wanted, spans = oracle(x, [20], [0]), Spans.build([20])
    exact = prefill.chunked(*x[:5], spans=spans, state=x.state, scale=SCALE)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(exact, wanted, strict=True))
    q = x.q.float().requires_grad_()
    o, _ = prefill.chunked(q, *(t.float() for t in x[1:5]), spans=spans, state=x.state.float(), scale=SCALE)
    o.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
