"""How the Triton chunk form of KDA is launched: matrices of sums, blocks that fit every size."""

from __future__ import annotations

import pytest
import torch

from baltoro.kernels.kda.launch import bounded_matrices, choose, sum_matrices


@pytest.mark.parametrize(("chunk", "group"), [(64, 16), (64, 1), (16, 16), (32, 1)])
def test_matrices_sum_up_to_after_and_around_the_middle(chunk: int, group: int) -> None:
    matrices = sum_matrices(chunk, group, "ieee", torch.device("cpu")).double()
    g = -torch.rand(chunk, 3).double()
    total, found = g.cumsum(0), matrices @ g
    assert torch.allclose(found[0], total) and torch.allclose(found[1], total[-1] - total)
    inner = g.view(-1, group, 3)
    centred = inner.cumsum(1) - inner.sum(1, keepdim=True) / 2
    assert torch.allclose(found[2], centred.view(chunk, 3), atol=1e-12)
    half = group
    for sums in found[3:]:
        for i in range(chunk):
            middle = i // (2 * half) * 2 * half + half
            wanted = g[middle : i + 1].sum(0) if i >= middle else g[i + 1 : middle].sum(0)
            assert torch.allclose(sums[i], wanted)
        half *= 2
    assert half == chunk or chunk == group


@pytest.mark.parametrize("chunk", [32, 64])
def test_factors_of_bounded_pairs_multiply_to_their_decay(chunk: int) -> None:
    matrices = bounded_matrices(chunk, "ieee", torch.device("cpu")).double()
    g, half = -5 * torch.rand(chunk, 3).double(), chunk // 2
    after, total, row, column, across = (matrices @ g).view(5, chunk, 3)
    assert torch.allclose(total, g.cumsum(0)) and torch.allclose(after, total[-1] - total)
    for i in range(chunk):
        for j in range(i + 1):
            found = row[i] + (across if j < half <= i else column)[j]
            assert torch.allclose(found, total[i] - total[j], atol=1e-9)
    assert max(float(row.abs().max()), float(column.abs().max())) <= 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [16, 32, 64, 128])
@pytest.mark.parametrize("values", [16, 32, 64, 128])
def test_blocks_divide_what_they_run_over(dtype: torch.dtype, keys: int, values: int) -> None:
    config = choose(dtype, keys=keys, values=values)
    if config.bounded is not None:
        assert keys % config.bounded.block == values % config.bounded.block == 0
    assert keys % config.prepare.block == values % config.prepare.block == values % config.scan.block == 0
    assert (keys + values) % config.fragment.block == 0 and values % config.fragment.block == 0
