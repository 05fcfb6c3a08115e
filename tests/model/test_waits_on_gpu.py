"""A step's host does not wait for the device: decodes, prefills with and without a past, snapshots, adapters' rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from baltoro.kernels.lora.rows import AdapterRows
from baltoro.kernels.spans import Spans
from baltoro.model.build import new_model
from baltoro.model.cache_map import CacheMap, Snapshot
from baltoro.model.context import ForwardContext
from baltoro.model.decoder import K3Model
from baltoro.model.state import CacheViews
from tests.tiny import tiny_k3

pytestmark = pytest.mark.gpu
PAGE = 64


@contextmanager
def no_waiting() -> Iterator[None]:
    """An operation that waits raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def model() -> K3Model:
    config = tiny_k3(vision=None, are_experts_packed=True)
    made = new_model(config, dtype=torch.bfloat16, std=0.1, decay="slow", device="cuda").merge()
    made.tile_experts()
    return made


def views_of(made: K3Model, slots: int, pages: int) -> CacheViews:
    config, options = made.config, {"device": "cuda"}
    kda, mla = config.num_layers - len(config.mla_layers), len(config.mla_layers)
    heads, size, width = config.kda_num_heads, config.kda_head_dim, 3 * config.kda_width
    return CacheViews(
        tuple(torch.zeros(slots, heads, size, size, **options) for _ in range(kda)),  # type: ignore[arg-type]
        tuple(torch.zeros(slots, config.conv_size - 1, width, dtype=torch.bfloat16, **options) for _ in range(kda)),  # type: ignore[arg-type]
        tuple(torch.zeros(pages, PAGE, config.kv_row_width, dtype=torch.bfloat16, **options) for _ in range(mla)),  # type: ignore[arg-type]
    )


def context(made: K3Model, lengths: tuple[int, ...], starts: tuple[int, ...], num_decodes: int) -> ForwardContext:
    """Requests 1, 2, ... on slots and pages of their own; the last prefill is snapshotted inside and at its end."""
    num, most = len(lengths), -(-max(s + n for s, n in zip(starts, lengths, strict=True)) // PAGE)
    table = torch.arange(1, num * most + 1, device="cuda").view(num, most)
    views = views_of(made, num + 3, num * most + 1)
    places = [torch.arange(s, s + n, device="cuda") for s, n in zip(starts, lengths, strict=True)]
    rows = torch.cat([table[n, place // PAGE] * PAGE + place % PAGE for n, place in enumerate(places)])
    taken: list[Snapshot] = []
    if num > num_decodes:
        taken.append(Snapshot(num - 1, lengths[-1], num + 1))
        taken += [Snapshot(num - 1, PAGE, num + 2)] if lengths[-1] > PAGE else []
    slots = torch.arange(1, num + 1, device="cuda")
    cache = CacheMap(slots, rows, table, PAGE, views, snapshots=tuple(taken))
    tokens = torch.arange(sum(lengths), device="cuda") % made.config.vocab_size
    last = torch.tensor(lengths, device="cuda").cumsum(0) - 1
    spans = Spans.build(lengths, starts, device="cuda")
    return ForwardContext(tokens, spans, cache, num_decodes=num_decodes, logit_rows=last)


@torch.no_grad()
@pytest.mark.parametrize(
    ("lengths", "starts", "num_decodes"),
    [((1, 1), (5, 70), 2), ((200,), (0,), 0), ((130, 3), (0, 64), 0), ((1, 1, 40, 90), (7, 65, 0, 128), 2)],
)
def test_a_step_is_queued(lengths: tuple[int, ...], starts: tuple[int, ...], num_decodes: int) -> None:
    made = model()
    made(context(made, lengths, starts, num_decodes))  # compiles
    ctx = context(made, lengths, starts, num_decodes)
    with no_waiting():
        out: Tensor = made(ctx)
    assert out.isfinite().all()


def test_rows_of_adapters_are_queued() -> None:
    device = torch.device("cuda")
    with no_waiting():
        rows = AdapterRows.build((0, 2, 1), (4, 3, 5), device)
    assert rows is not None and rows.slots.tolist() == [0] * 4 + [2] * 3 + [1] * 5
