"""Reads of depth in long prefills: the bank once for many reads, then each with the running sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.kernels.attnres import fused
from baltoro.kernels.dispatch import kernels_for
from baltoro.kernels.spans import Spans
from baltoro.model import attnres
from baltoro.model.attnres import until_changes
from baltoro.model.build import new_model
from baltoro.model.context import ForwardContext
from baltoro.model.decoder import K3Model
from baltoro.model.layer import DecoderLayer
from tests.tiny import tiny_k3

TOKENS = 37


def model(device: str = "cpu", dtype: torch.dtype = torch.float64) -> K3Model:
    config = tiny_k3(vision=None, num_layers=9, mla_layers=(3, 7), attn_res_block_size=3)
    return new_model(config, dtype=dtype, seed=4, std=0.2, decay="slow", device=device).merge()


def hidden(made: K3Model, num: int = TOKENS) -> Tensor:
    device = made.lm_head.weight.device
    tokens = torch.arange(num, device=device) * 7 % made.config.vocab_size
    return made.hidden(ForwardContext(tokens, Spans.build((num,), device=device)))


def test_queries_ahead_end_where_the_bank_changes() -> None:
    queries = [torch.full((2,), float(n)) for n in range(7)]
    ahead = until_changes([(query, n in (0, 3)) for n, query in enumerate(queries)])
    assert [rows[:, 0].tolist() for rows in ahead] == [[0], [1, 2, 3], [2, 3], [3], [4, 5, 6], [5, 6], [6]]


@torch.no_grad()
@pytest.mark.parametrize("reads_at_once", [1, 2, 4, 100])
def test_scanned_reads_are_the_reads(monkeypatch: pytest.MonkeyPatch, reads_at_once: int) -> None:
    """Whatever of a block's reads fit at once; the bank is read as often as it has to be, never for one read alone."""
    made = model()
    wanted = hidden(made)
    row_bytes = TOKENS * made.config.hidden_size * 8
    monkeypatch.setattr(DecoderLayer, "_is_fused", lambda *_: True)
    monkeypatch.setattr(attnres, "MIN_SCANNED", TOKENS)
    monkeypatch.setattr(attnres, "SCAN_BYTES", reads_at_once * row_bytes)
    scanned: list[int] = []

    def scan(bank: Tensor, queries: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        scanned.append(len(queries))
        return fused.scan_bank(bank, queries, eps)

    kernels = kernels_for(torch.device("cpu"))
    swapped = type(kernels)(**{name: getattr(kernels, name) for name in kernels.__slots__} | {"attnres_scan": scan})
    monkeypatch.setattr(ForwardContext, "kernels", swapped)
    torch.testing.assert_close(hidden(made), wanted, atol=1e-10, rtol=0)
    # 9 layers in blocks of 3: banks of 1, 2 and 3 rows see 6, 6 and 5 reads; attention's of layer 0 sees none
    expected = {1: [], 2: [2] * 8, 4: [4, 2, 4, 2, 4], 100: [6, 6, 5]}[reads_at_once]
    assert scanned == expected


@torch.no_grad()
def test_short_steps_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    monkeypatch.setattr(DecoderLayer, "_is_fused", lambda *_: True)
    monkeypatch.setattr(attnres, "Scan", None)  # whoever made one would call it
    assert hidden(made).isfinite().all()


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.parametrize("num", [attnres.MIN_SCANNED - 1, attnres.MIN_SCANNED, 1500])
def test_long_prefills_on_a_gpu(num: int) -> None:
    wanted = hidden(model(), num)
    got = hidden(model("cuda", torch.float32), num).cpu().double()
    gaps = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float((gaps > 1e-4).double().mean()) < 0.01  # a near tie of experts may fall the other way
