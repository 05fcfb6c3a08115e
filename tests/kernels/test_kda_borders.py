"""States at borders inside spans: bit for bit those of a run that ends there, for the chunk form and for segments."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.kda import fla
from baltoro.kernels.kda.chunk import chunked
from baltoro.kernels.kda.reference import recurrent
from baltoro.kernels.kda.segments import run_in_segments
from baltoro.kernels.spans import Borders, Spans
from tests.kernels.test_kda import SCALE, Inputs, close, inputs

# packed spans on and off the grid, one of them without a border, one with three in no order
SPANS = Spans.build([70, 130, 5, 200], [0, 64, 62, 30])
BORDERS: Borders = ((3, 98), (0, 64), (3, 34), (1, 64), (3, 162), (2, 2))


def run(x: Inputs, spans: Spans, borders: Borders = ()) -> tuple[Tensor, Tensor]:
    return chunked(*x[:5], spans=spans, state=x.state, scale=SCALE, borders=borders)


def until(x: Inputs, spans: Spans, n: int, length: int) -> Tensor:
    """The state of span n run alone, ending after `length` tokens."""
    first = spans.offsets[n]
    part = x.rows(first, first + length, x.state[n : n + 1])
    return run(part, Spans.build([length], [spans.starts[n]]))[1][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_inside_is_the_state_of_a_run_that_ends_there_bitwise(dtype: torch.dtype) -> None:
    """Also serving.md G-05 (65 of 129 tokens at 64) and G-08 (70, 130, 200 tokens in one pass)."""
    x = inputs(405, 4, dtype=dtype)
    _, after = run(x, SPANS, BORDERS)
    assert after.shape[0] == 4 + len(BORDERS)
    for found, (n, length) in zip(after[4:], BORDERS, strict=True):
        assert torch.equal(found, until(x, SPANS, n, length)), (n, length)


def test_asking_for_states_inside_changes_nothing_else_bitwise() -> None:
    x = inputs(405, 4)
    o, final = run(x, SPANS)
    o_asked, after = run(x, SPANS, BORDERS)
    assert torch.equal(o_asked, o) and torch.equal(after[:4], final)


@pytest.mark.parametrize("group", [1, 2 * 9, 1000])
def test_heads_worked_on_in_groups_keep_their_states(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    x = inputs(405, 4)
    expected = recurrent(*x[:5], spans=SPANS, state=x.state, scale=SCALE, borders=BORDERS)
    monkeypatch.setattr("baltoro.kernels.kda.chunk.CPU_GROUP", group)
    close(run(x, SPANS, BORDERS), expected)


def test_a_run_continued_from_a_state_inside_is_the_unbroken_run() -> None:
    x = inputs(405, 4)
    o, after = run(x, SPANS, BORDERS)
    for state, (n, length) in zip(after[4:], BORDERS, strict=True):
        first, last, start = SPANS.offsets[n] + length, SPANS.offsets[n + 1], SPANS.starts[n] + length
        rest = run(x.rows(first, last, state.unsqueeze(0)), Spans.build([last - first], [start]))
        close(rest, (o[first:last], after[n : n + 1]))


def test_gradients_through_states_inside_equal_those_of_the_recurrence() -> None:
    spans, borders = Spans.build([70, 130], [5, 0]), ((1, 64), (0, 59), (1, 128), (1, 64))
    x = Inputs(*(t.requires_grad_() for t in inputs(200, 2)))
    expected = recurrent(*x[:5], spans=spans, state=x.state, scale=SCALE, borders=borders)
    seeds = [torch.randn_like(t) for t in expected]
    wanted = torch.autograd.grad(expected, x, seeds)
    close(torch.autograd.grad(run(x, spans, borders), x, seeds), wanted)


@pytest.mark.parametrize("border", [(0, 0), (0, 70), (1, 64), (-1, 64), (0, 63), (0, 65)])
def test_points_without_a_state_are_errors(border: tuple[int, int]) -> None:
    """Ends of spans, points outside, and points off the grid: no state is made up for them."""
    with pytest.raises(ShapeError):
        run(inputs(70), Spans.build([70]), (border,))


def test_a_border_is_absolute() -> None:
    x, spans = inputs(70), Spans.build([70], [70])
    assert torch.equal(run(x, spans, ((0, 58),))[1][1], until(x, spans, 0, 58))
    with pytest.raises(ShapeError, match="position 134"):
        run(x, spans, ((0, 64),))


def test_segments_equal_the_chunk_form_and_make_as_few_calls_as_they_can() -> None:
    x, calls = inputs(405, 4), []

    def call(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, spans: Spans, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        calls.append(spans)
        return chunked(q, k, v, g, beta, spans=spans, state=state, scale=SCALE)

    close(run_in_segments(call, x[:5], spans=SPANS, state=x.state, borders=BORDERS), run(x, SPANS, BORDERS))
    assert [(s.lengths, s.starts) for s in calls] == [
        ((64, 64, 2, 34), (0, 64, 62, 30)),
        ((6, 66, 3, 64), (64, 128, 64, 64)),
        ((64,), (128,)),
        ((38,), (192,)),
    ]


def test_the_library_row_makes_two_calls_for_one_border(monkeypatch: pytest.MonkeyPatch) -> None:
    x, offsets = inputs(200, dtype=torch.float32), []

    def chunk_kda(*, cu_seqlens: Tensor, initial_state: Tensor | None, scale: float, **rest: object) -> object:
        names = ("q", "k", "v", "g", "beta")
        offsets.append(cu_seqlens.tolist())
        spans = Spans.build(cu_seqlens.diff().tolist())
        packed = [rest[name].squeeze(0).float() for name in names]  # type: ignore[attr-defined]
        o, after = chunked(*packed, spans=spans, state=initial_state, scale=scale)
        return o.unsqueeze(0), after

    monkeypatch.setitem(sys.modules, "fla.ops.kda", SimpleNamespace(chunk_kda=chunk_kda))
    monkeypatch.setattr(fla, "WIDTHS", range(1, 257))
    rows = (x.q, x.k, x.v.bfloat16(), x.g, x.beta)
    ask = partial(fla.chunked, *rows, spans=Spans.build([70, 130]), scale=SCALE)
    o, after = ask(state=None, borders=((0, 64),))
    assert offsets == [[0, 64, 194], [0, 6]]
    plain_o, plain_after = ask(state=None)
    assert after.shape[0] == 3 and after.dtype == torch.float32
    close((o, after[:2]), (plain_o, plain_after), 1e-5)
    assert torch.equal(after[2], ask(state=None, borders=((0, 64),))[1][2])


def test_the_library_row_hands_other_dtypes_on_with_their_borders() -> None:
    x = inputs(405, 4)
    found = fla.chunked(*x[:5], spans=SPANS, state=x.state, scale=SCALE, borders=BORDERS)
    for got, expected in zip(found, run(x, SPANS, BORDERS), strict=True):
        assert torch.equal(got, expected)


def test_heads_that_the_library_has_no_kernels_for_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of a product has 16 rows at least: of narrower heads the library's compiler made an error."""
    monkeypatch.setattr(fla, "_call", lambda *_, **__: pytest.fail("the library was called"))
    spans = Spans.build([5])
    for keys, values in ((8, 16), (16, 8), (8, 8)):
        q, k, v, g = (torch.rand(5, 2, n) for n in (keys, keys, values, keys))
        rows = [q, k, v.bfloat16(), -g, torch.rand(5, 2)]
        out, _ = fla.chunked(*rows, spans=spans, state=None, scale=1.0)
        assert out.shape == v.shape
