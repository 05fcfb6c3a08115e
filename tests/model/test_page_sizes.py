"""Pages of any size: longer than a prompt, no power of two, as long as several hash endpoints.

A page of 192 rows holds three endpoints of 64, so a prefix may end in the middle of one: who goes on from there reads
the rows before that point and none after it.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from baltoro.kernels.mla.reference import attend_absorbed
from baltoro.kernels.spans import Spans
from baltoro.model.build import new_model
from baltoro.model.cache_map import CacheMap
from baltoro.model.context import ForwardContext, train_context
from baltoro.model.decoder import K3Model
from tests.model.harness import Harness, random_tokens
from tests.tiny import tiny_k3, tiny_kimi_linear

CONFIGS = {"k3": tiny_k3(), "kimi-linear": tiny_kimi_linear()}
LONG = 420  # three pages of 192, the last one partly filled


@pytest.fixture(params=CONFIGS, scope="module")
def model(request: pytest.FixtureRequest) -> K3Model:
    return new_model(CONFIGS[request.param], dtype=torch.float64, std=0.2, decay="slow", seed=1)


def whole(model: K3Model, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(train_context(torch.tensor(tokens), (len(tokens),)))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("page_size", [3, 100, 192])
def test_cuts_at_and_beside_page_borders_give_the_logits_of_one_pass(model: K3Model, page_size: int) -> None:
    tokens = random_tokens(LONG, model.config.vocab_size)
    edges = [0, 1, 191, 192, 193, 256, 257, 300, 384, 385, LONG]
    cuts = [b - a for a, b in pairwise(edges)]
    got = Harness(model, 1, page_size=page_size, max_tokens=LONG).run(0, tokens, cuts)
    close(got, whole(model, tokens))


def test_requests_of_one_two_and_three_pages_share_their_steps(model: K3Model) -> None:
    prompts = [random_tokens(n, model.config.vocab_size, seed=n) for n in (70, 200, 400)]
    harness = Harness(model, 3, page_size=192, max_tokens=LONG)
    got: list[list[Tensor]] = [[] for _ in prompts]
    schedule = [[(0, 69), (1, 191), (2, 384)], [(0, 1), (1, 1), (2, 15)], [(1, 1), (2, 1)], [(1, 7)]]
    for step in schedule:
        work = [(r, prompts[r][harness.done[r] :][:n]) for r, n in step]
        for (r, _), logits in zip(step, harness.step(work), strict=True):
            got[r].append(logits)
    for prompt, parts in zip(prompts, got, strict=True):
        close(torch.cat(parts), whole(model, prompt))


@pytest.mark.parametrize("depth", [64, 128, 192, 256, 320, 384])
@pytest.mark.parametrize("has_decode", [False, True])
def test_a_prefix_that_ends_inside_a_page_is_reusable(model: K3Model, depth: int, has_decode: bool) -> None:
    """The second request has its own copy of the page where the prefix ends, with the first one's rows behind it."""
    first = random_tokens(LONG, model.config.vocab_size, seed=1)
    second = [*first[:depth], *random_tokens(LONG - depth, model.config.vocab_size, seed=2)]
    harness = Harness(model, 2, page_size=192, max_tokens=LONG, num_spare=1)
    harness.step([(0, first)], snapshots=[(0, depth, 3)])
    num_shared = depth // 192
    harness.tables[1, :num_shared] = harness.tables[0, :num_shared]
    for view in harness.views.kv:
        if depth % 192:
            view[harness.tables[1, num_shared]] = view[harness.tables[0, num_shared]]
    harness.restore(1, 3, depth)
    expected = whole(model, second)
    if has_decode:
        close(harness.step([(1, second[depth : depth + 1])])[0], expected[depth : depth + 1])
    done = harness.done[1]
    close(harness.step([(1, second[done:])])[0], expected[done:])
    close(harness.step([(0, second[:1])])[0], whole(model, [*first, second[0]])[-1:])


def test_rows_behind_the_end_of_a_page_may_be_nan(model: K3Model) -> None:
    """G-40 of docs/spec/serving.md: the tail of a half-filled page, and pages the table names but nobody wrote."""
    tokens = random_tokens(200, model.config.vocab_size)
    harness = Harness(model, 1, page_size=192, max_tokens=960)
    got = torch.cat([harness.step([(0, part)])[0] for part in (tokens[:190], *([t] for t in tokens[190:]))])
    close(got, whole(model, tokens))
    assert all(view[harness.tables[0, 1], 8:].isnan().all() for view in harness.views.kv)


def test_places_count_in_rows_of_the_page_size() -> None:
    size, table = 192, torch.tensor([[5, 2, 0], [7, 1, 4]])
    spans = Spans.build([2, 3], [191, 383])
    rows = torch.tensor([5 * size + 191, 2 * size, 1 * size + 191, 4 * size, 4 * size + 1])
    views = Harness(new_model(tiny_kimi_linear()), 1).views
    ctx = ForwardContext(
        torch.zeros(5, dtype=torch.int64), spans, CacheMap(torch.tensor([1, 2]), rows, table, size, views)
    )
    pages, offsets = ctx.kv_places
    assert pages.tolist() == [5, 2, 1, 4, 4] and offsets.tolist() == [191, 0, 191, 0, 1]
    pages, offsets = ctx.prefill_key_places
    assert pages.tolist() == [5] * 192 + [2] + [7] * 192 + [1] * 192 + [4] * 2
    assert offsets.tolist() == [*range(192), 0, *range(192), *range(192), 0, 1]


@pytest.mark.parametrize("page", [1, 64, 192, 250])
def test_absorbed_attention_is_the_same_for_every_page_size(page: int) -> None:
    """Strided pages, as in a pool whose pages hold the rows of several layers; what is no row is NaN."""
    lengths, width, latent = [1, 192, 193, 385], 8, 6
    rows = [torch.randn(n, width, dtype=torch.float64) for n in lengths]
    query = torch.randn(len(rows), 3, width, dtype=torch.float64)
    num_pages = [-(-n // page) for n in lengths]
    order = iter((torch.randperm(sum(num_pages)) + 1).tolist())
    kv = torch.full((sum(num_pages) + 1, page, 2, width), torch.nan, dtype=torch.float64)[:, :, 1]
    table = torch.zeros(len(rows), max(num_pages) + 1, dtype=torch.int64)
    for n, x in enumerate(rows):
        for j, piece in enumerate(x.split(page)):
            table[n, j] = next(order)
            kv[table[n, j], : len(piece)] = piece
    out, lse = attend_absorbed(query, kv, table, torch.tensor(lengths), latent=latent, scale=0.4)
    for n, x in enumerate(rows):
        scores = query[n] @ x.T * 0.4
        torch.testing.assert_close(out[n], scores.softmax(-1) @ x[:, :latent], atol=1e-12, rtol=0)
        torch.testing.assert_close(lse[n], scores.logsumexp(-1), atol=1e-12, rtol=0)
