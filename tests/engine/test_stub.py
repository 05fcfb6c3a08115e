"""The scripted model keeps snapshots as the real one does, and refuses those that the real one could not give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.kernels.spans import Spans
from baltoro.model.cache_map import CacheMap, Snapshot
from baltoro.model.context import ForwardContext
from baltoro.model.state import CacheViews
from tests.engine.stub import StubModel, logits_after

TOKENS = [7, 3, 20, 11, 5, 1, 9, 2, 40, 8, 13]


def poisoned(model: StubModel) -> CacheViews:
    """Four slots and four pages of four rows, full of NaN."""
    config = model.config
    return CacheViews(
        recurrent=tuple(torch.full((4, 3, 2, 2), torch.nan) for _ in config.kda_layers),
        conv=tuple(torch.full((4, config.conv_size - 1, 18), torch.nan) for _ in config.kda_layers),
        kv=tuple(torch.full((4, 4, config.kv_row_width), torch.nan) for _ in config.mla_layers),
    )


def run(model: StubModel, views: CacheViews, start: int, end: int, *, slot: int, taken: tuple[Snapshot, ...]) -> Tensor:
    """Logits of TOKENS[start:end] as one span; the request's pages are 1, 2, 3."""
    cache = CacheMap(torch.tensor([slot]), torch.arange(4 + start, 4 + end), torch.tensor([[1, 2, 3]]), 4, views, taken)
    return model(ForwardContext(torch.tensor(TOKENS[start:end]), Spans.build([end - start], [start]), cache))


def test_a_request_goes_on_from_a_snapshot() -> None:
    model = StubModel()
    views = poisoned(model)
    run(model, views, 0, 11, slot=1, taken=(Snapshot(0, 4, 2), Snapshot(0, 8, 3), Snapshot(0, 11, 0)))
    for depth, slot in ((4, 2), (8, 3)):
        (logits,) = run(model, views, depth, depth + 1, slot=slot, taken=())
        torch.testing.assert_close(logits, logits_after(TOKENS[: depth + 1], model.config))
    for view in (*views.recurrent, *views.conv):
        assert torch.equal(view[0], view[1])


def test_states_inside_a_span_are_on_the_grid_only() -> None:
    model = StubModel(state_chunk=8)
    views = poisoned(model)
    run(model, views, 0, 5, slot=1, taken=(Snapshot(0, 5, 2),))
    run(model, views, 5, 9, slot=1, taken=(Snapshot(0, 3, 3),))
    with pytest.raises(AssertionError, match="no state at 4"):
        run(model, views, 0, 5, slot=1, taken=(Snapshot(0, 4, 3),))
