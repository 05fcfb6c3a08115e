"""The plain forms of the fused depth mix against the mix itself, in FP64."""

from __future__ import annotations

import torch

from baltoro.kernels.attnres import fused
from baltoro.kernels.attnres.reference import mix
from baltoro.kernels.norm.reference import rms_norm

DOUBLE = torch.float64


@torch.no_grad()
def test_read_is_add_mix_norm_and_so_are_bank_pass_and_fold() -> None:
    bank, queries = torch.randn(5, 4, 24, dtype=DOUBLE), torch.randn(3, 24, dtype=DOUBLE)
    prefix, update = torch.randn(2, 4, 24, dtype=DOUBLE)
    gain = torch.rand(24, dtype=DOUBLE)
    part, lse = fused.scan_bank(bank, queries, 1e-3)
    torch.testing.assert_close(part[0], mix(bank, queries[0], 1e-3))
    for n, rows in enumerate([(prefix, update), (prefix, None), (None, update)]):
        total = sum(row for row in rows if row is not None)
        mixed = mix(torch.cat([bank, total.unsqueeze(0)]), queries[n], 1e-3)
        expected = (total, rms_norm(mixed, gain, 1e-2))
        torch.testing.assert_close(fused.read(bank, *rows, queries[n], gain, 1e-3, 1e-2), expected)
        torch.testing.assert_close(fused.fold(part[n], lse[n], *rows, queries[n], gain, 1e-3, 1e-2), expected)
