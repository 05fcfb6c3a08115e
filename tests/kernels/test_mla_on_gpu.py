"""Triton forms of latent attention, depth mix, copies and sampling on a CUDA device at K3's widths; logic: interp/."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.kernels.attnres import fast as attnres
from baltoro.kernels.attnres import fused
from baltoro.kernels.mla import expanded, fast_absorb, packed, reference, split_decode
from baltoro.kernels.paged import fast as paged
from baltoro.kernels.paged import reference as plain
from baltoro.kernels.sample import fast as sampling
from baltoro.kernels.sample.reference import sample
from baltoro.kernels.spans import Spans
from tests.kernels.tolerances import TOLERANCES

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def gap(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def bound(op: str, dtype: torch.dtype) -> float:
    return max(1e-5, TOLERANCES[op][str(dtype).removeprefix("torch.")])


@DTYPES
@pytest.mark.parametrize(("heads", "window"), [(12, 1), (12, 8), (24, 1), (96, 1), (96, 8)])
def test_latent_attention(heads: int, window: int, dtype: torch.dtype) -> None:
    lengths = torch.tensor([window, 64, 65, 1000, 4097], device="cuda")
    arena = torch.randn(400, 64, 2, 576, device="cuda").to(dtype)
    kv = arena[:, :, 1]
    table = torch.stack([torch.randperm(399, device="cuda")[:66] + 1 for _ in range(5)])
    table[1:3] = table[0]  # requests may share pages
    q = torch.randn(5, window, heads, 576, device="cuda").to(dtype)
    for splits in (None, 1, 5):
        out, lse = split_decode.attend_absorbed(q, kv, table, lengths, latent=512, scale=192**-0.5, splits=splits)
        exact, exact_lse = reference.attend_absorbed(
            q.double(), kv.double(), table, lengths, latent=512, scale=192**-0.5
        )
        assert gap(out, exact) < bound("mla_attend_absorbed", dtype)
        assert gap(lse, exact_lse) < 1e-2 if dtype == torch.bfloat16 else gap(lse, exact_lse) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(("heads", "own", "common", "value"), [(12, 128, 64, 128), (96, 128, 64, 128), (4, 32, 16, 32)])
@pytest.mark.parametrize(
    ("lengths", "starts"),
    [((700,), (0,)), ((1, 130, 64, 65), (0, 0, 0, 0)), ((128, 1, 33), (1000, 127, 64)), ((257, 5), (0, 4000))],
)
def test_expanded_attention_of_packed_spans(
    heads: int, own: int, common: int, value: int, lengths: tuple[int, ...], starts: tuple[int, ...]
) -> None:
    """Keys, values and the shared part as slices of wider rows; what lies beside them is NaN."""
    spans = Spans.build(lengths, starts, device="cuda")
    num = sum(spans.ends)
    q = torch.randn(spans.num_tokens, heads, own + common, device="cuda").bfloat16()
    both = torch.randn(num, heads, own + value, device="cuda").bfloat16()
    row = torch.full((num, common + 16), float("nan"), device="cuda").bfloat16()
    row[:, 8 : 8 + common] = torch.randn(num, common, device="cuda").bfloat16()
    shared, scale = row[:, 8 : 8 + common], (own + common) ** -0.5
    torch.full((1 << 26,), float("nan"), device="cuda")  # what the result's memory held
    got = packed.attend(q, both, shared, spans=spans, scale=scale, out_dtype=torch.bfloat16)
    wide = (x.double() for x in (q, both, shared))
    exact = expanded.by_reference(*wide, spans=spans, scale=scale, out_dtype=torch.float64)
    assert gap(got, exact) < bound("mla_attend_expanded", torch.bfloat16)
    worst = (got.double() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    assert float(worst.max()) < 3 * bound("mla_attend_expanded", torch.bfloat16)


def test_calls_that_overlap_give_what_they_give_alone() -> None:
    """In a graph, where each may start before the one in front has ended, and takes its memory."""
    kv, table = torch.randn(301, 64, 576, device="cuda").bfloat16(), torch.randperm(300, device="cuda").view(1, 300) + 1
    queries = torch.randn(12, 1, 12, 576, device="cuda").bfloat16()
    lengths = [torch.tensor([19200 - 700 * n], device="cuda") for n in range(12)]

    def attend(n: int) -> Tensor:
        return split_decode.attend_absorbed(queries[n], kv, table, lengths[n], latent=512, scale=192**-0.5)[0]

    alone = []
    for n in range(12):
        alone.append(attend(n))
        torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), torch.empty(12, 1, 12, 512, device="cuda")
    with torch.cuda.graph(graph):
        results = [attend(n) for n in range(12)]
        torch.stack(results, out=kept)
    for _ in range(20):
        kept.zero_()
        graph.replay()
        assert torch.equal(kept, torch.stack(alone))


@torch.no_grad()
def test_a_step_whose_launches_overlap() -> None:
    """The token's row is NaN until the kernel in front of attention writes it."""
    q, row, gate = (torch.randn(1, *n, device="cuda").bfloat16() for n in ((12, 192), (576,), (1536,)))
    kv, kv_b = (torch.randn(*n, device="cuda").mul_(0.1).bfloat16() for n in ((301, 64, 576), (12, 256, 512)))
    table, gain = torch.arange(1, 301, device="cuda").view(1, 300), torch.ones(512, device="cuda").bfloat16()
    places, lengths = (torch.tensor([300], device="cuda"), torch.tensor([63], device="cuda")), table[:, -1] * 64

    def step() -> Tensor:
        kv[300, 63].fill_(torch.nan)
        query = fast_absorb.enter(q, row, gain, 1e-5, kv_b, kv, places)
        out = split_decode.attend_absorbed(query, kv, table, lengths, latent=512, scale=192**-0.5)[0]
        return fast_absorb.leave(out, kv_b, 128, gate, torch.bfloat16)

    plain = step()
    torch.cuda.synchronize()
    assert plain.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [step() for _ in range(8)]
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(one, plain) for one in results)


@DTYPES
def test_a_window_wider_than_its_keys_gets_zeros(dtype: torch.dtype) -> None:
    """NaN lies behind the keys: what fills up a draft window has to stay finite."""
    arena = torch.full((4, 64, 576), torch.nan, device="cuda", dtype=dtype)
    lengths, table = torch.tensor([1, 5, 8], device="cuda"), torch.tensor([[1], [2], [3]], device="cuda")
    for page, length in enumerate(lengths.tolist(), start=1):
        arena[page, :length] = torch.randn(length, 576, device="cuda").to(dtype)
    q = torch.randn(3, 8, 12, 576, device="cuda").to(dtype)
    out, lse = split_decode.attend_absorbed(q, arena, table, lengths, latent=512, scale=192**-0.5)
    exact, exact_lse = reference.attend_absorbed(
        q.double(), arena.double(), table, lengths, latent=512, scale=192**-0.5
    )
    assert gap(out, exact) < bound("mla_attend_absorbed", dtype)
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf) and not out[0, :7].any()


@DTYPES
@pytest.mark.parametrize("tokens", [1, 33, 100])
@torch.no_grad()
def test_depth_mix(tokens: int, dtype: torch.dtype) -> None:
    bank = torch.randn(8, tokens, 7168, device="cuda").to(dtype)
    prefix, update = (torch.randn(tokens, 7168, device="cuda").to(dtype) for _ in range(2))
    queries, gain = torch.randn(24, 7168, device="cuda") * 0.02, torch.rand(7168, device="cuda") + 0.5
    wide = [one.double() for one in (bank, prefix, update, queries[3], gain)]
    exact = fused.read(*wide, 1e-5, 1e-5)
    total, out = attnres.read(bank, prefix, update, queries[3], gain, 1e-5, 1e-5)
    assert torch.equal(total, prefix + update)
    assert gap(out, exact[1]) < bound("attnres_read", dtype)
    part, lse = attnres.scan_bank(bank, queries, 1e-5)
    out = attnres.fold(part[3], lse[3], prefix, update, queries[3], gain, 1e-5, 1e-5)[1]
    assert gap(out, exact[1]) < bound("attnres_fold", dtype)
    sources = torch.cat([bank, total.unsqueeze(0)])
    assert gap(attnres.mix(sources, queries[3], 1e-5), fused._mix(sources.double(), wide[3], 1e-5)) < bound(
        "attnres_mix", dtype
    )


def test_copies_are_bit_equal() -> None:
    blocks = torch.randint(-(2**62), 2**62, (20, 100_003), device="cuda")
    expected = blocks.clone()
    sources, targets = torch.tensor([1, 1, 7], device="cuda"), torch.tensor([3, 4, 19], device="cuda")
    paged.copy_blocks(blocks, sources, targets)
    plain.copy_blocks(expected, sources, targets)
    assert torch.equal(blocks, expected)
    kv = torch.randn(9, 64, 3, 576, device="cuda").bfloat16()
    other = kv.clone()
    places = (torch.tensor([1, 8, 2], device="cuda"), torch.tensor([0, 63, 5], device="cuda"))
    rows = torch.randn(3, 576, device="cuda").bfloat16()
    paged.scatter_rows(kv[:, :, 2], places, rows[:, :512], rows[:, 512:])
    plain.scatter_rows(other[:, :, 2], places, rows[:, :512], rows[:, 512:])
    assert torch.equal(kv, other)


def test_sampled_ids() -> None:
    logits = torch.randn(64, 163840, device="cuda") * 3
    logits[3, ::2] = float("-inf")
    top_k = torch.tensor([0, 40, 1, 0] * 16, device="cuda")
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.95] * 16, device="cuda")
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.02] * 16, device="cuda")
    uniform = torch.rand(64, device="cuda", dtype=torch.float64)
    got = sampling.sample(logits, top_k, top_p, min_p, uniform)
    # a number within rounding of a border may fall to either side
    assert (got == sample(logits, top_k, top_p, min_p, uniform)).float().mean() > 0.98
