"""The short convolution: packed spans with history against torch's own convolution of whole sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.conv.reference import short_conv, short_conv_step
from baltoro.kernels.spans import Spans

CHANNELS = 5


def whole(x: Tensor, weight: Tensor) -> Tensor:
    """conv1d of one sequence from its start: [T, C]."""
    padded = F.pad(x.T.unsqueeze(0), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=x.shape[1])).squeeze(0).T


def inputs(*lengths: int, taps: int = 4) -> tuple[list[Tensor], Tensor]:
    weight = torch.randn(CHANNELS, taps, dtype=torch.float64)
    return [torch.randn(n, CHANNELS, dtype=torch.float64) for n in lengths], weight


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_packed_spans_equal_conv1d_of_each(taps: int) -> None:
    sequences, weight = inputs(7, 1, 12, 2, taps=taps)
    y, history = short_conv(torch.cat(sequences), weight, spans=Spans.build([7, 1, 12, 2]), history=None)
    torch.testing.assert_close(y, torch.cat([whole(x, weight) for x in sequences]), atol=1e-13, rtol=0)
    assert history.shape == (4, taps - 1, CHANNELS)
    assert torch.equal(history[0], sequences[0][7 - (taps - 1) :])


@pytest.mark.parametrize("cuts", [[5, 6], [1, 1, 1, 1, 7], [2, 9], [10, 1], [1, 2, 8]])
def test_spans_with_history_equal_the_whole_however_it_is_cut(cuts: list[int]) -> None:
    (a, b), weight = inputs(11, 11)
    history = torch.zeros(2, 3, CHANNELS, dtype=torch.float64)
    outputs, done = [], 0
    for length in cuts:
        rows = torch.cat([a[done : done + length], b[done : done + length]])
        y, history = short_conv(rows, weight, spans=Spans.build([length] * 2, [done] * 2), history=history)
        outputs.append(y.view(2, length, CHANNELS))
        done += length
    expected = torch.stack([whole(a, weight), whole(b, weight)])
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, atol=1e-13, rtol=0)
    assert torch.equal(history, torch.stack([a[-3:], b[-3:]]))


def test_span_shorter_than_the_window_keeps_old_history() -> None:
    (x,), weight = inputs(1)
    old = torch.randn(1, 3, CHANNELS, dtype=torch.float64)
    _, history = short_conv(x, weight, spans=Spans.build([1], [9]), history=old)
    assert torch.equal(history[0], torch.cat([old[0, 1:], x]))


def test_history_inside_a_span_is_that_of_a_span_that_ends_there() -> None:
    (x,), weight = inputs(14)
    old = torch.randn(3, 3, CHANNELS, dtype=torch.float64)
    spans, borders = Spans.build([7, 1, 6], [5, 9, 0]), ((2, 1), (0, 2), (0, 6), (2, 4))
    y, plain = short_conv(x, weight, spans=spans, history=old)
    y_asked, history = short_conv(x, weight, spans=spans, history=old, borders=borders)
    assert torch.equal(y_asked, y) and torch.equal(history[:3], plain)
    for found, (n, length) in zip(history[3:], borders, strict=True):
        rows = x[spans.offsets[n] :][:length]
        _, expected = short_conv(rows, weight, spans=Spans.build([length]), history=old[n : n + 1])
        assert torch.equal(found, expected[0]), (n, length)
    with pytest.raises(ShapeError):
        short_conv(x, weight, spans=spans, history=old, borders=((1, 1),))


def test_history_is_not_written() -> None:
    (x,), weight = inputs(6)
    old = torch.randn(1, 3, CHANNELS, dtype=torch.float64)
    before = old.clone()
    short_conv(x, weight, spans=Spans.build([6], [3]), history=old)
    assert torch.equal(old, before)


def test_step_equals_short_conv_and_leaves_other_slots_alone() -> None:
    (x,), weight = inputs(3)
    history = torch.randn(6, 3, CHANNELS, dtype=torch.float64)
    slots = torch.tensor([4, 1, 3])
    expected, after = short_conv(x, weight, spans=Spans.build([1] * 3, [8] * 3), history=history[slots])
    before = history.clone()
    y = short_conv_step(x, weight, history, slots)
    torch.testing.assert_close(y, expected, atol=1e-14, rtol=0)
    assert torch.equal(history[slots], after)
    assert torch.equal(history[[0, 2, 5]], before[[0, 2, 5]])


def test_gradients_of_input_weight_and_history() -> None:
    (x,), weight = inputs(9)
    history = torch.randn(3, 3, CHANNELS, dtype=torch.float64, requires_grad=True)
    spans = Spans.build([4, 1, 4], [5, 2, 3])
    args = (x.requires_grad_(), weight.requires_grad_(), history)
    assert torch.autograd.gradcheck(lambda x, w, h: short_conv(x, w, spans=spans, history=h), args)
    borders = ((2, 1), (0, 3), (2, 1))
    assert torch.autograd.gradcheck(lambda x, w, h: short_conv(x, w, spans=spans, history=h, borders=borders), args)


def test_bfloat16_input_gives_bfloat16_output_summed_in_float32() -> None:
    x, weight = torch.randn(9, CHANNELS).bfloat16(), torch.randn(CHANNELS, 4)
    y, history = short_conv(x, weight, spans=Spans.build([9]), history=None)
    assert y.dtype == history.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), whole(x.float(), weight), rtol=2**-8, atol=1e-5)


def test_wrong_number_of_tokens_is_a_shape_error() -> None:
    (x,), weight = inputs(5)
    with pytest.raises(ShapeError):
        short_conv(x, weight, spans=Spans.build([4]), history=None)
