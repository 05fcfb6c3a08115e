"""Decayed products of all pairs of tokens in a chunk, and the inverse of a unit lower triangle, both by halving.

    products(x, k)[i, j] = sum_d x_i,d k_j,d exp(g_{j+1},d + ... + g_i,d)    for i > j

A chunk is halved, and each half again, down to single tokens. At half size h a pair lies in the second (i) and the
first half (j) of the same 2h tokens, and its decay is that from j to the border times that from the border to i. Both
are products of exp(g) <= 1: nothing overflows for any gate in any dtype, and what underflows is forgotten anyway. All
pairs of one size are one batched product.
Gradients are written out: with rows x_i and columns k_j the gradient of the summed log-decay at i is
x_i dx_i - k_i dk_i, so the exponentials need none of their own. Source: spec/kernels.md A.3, A.4, A.9.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TINY = 2


def pair_products(row: Tensor, q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All [X, C, K], contiguous, C a power of two. `row`: keys times beta, the rows of A_kk.

    Returns A_kk [X, C, C] (strictly lower), A_qk [X, C, C] (lower, diagonal included), and the decays [X, C, K] from
    the chunk's start to each token, inclusive, and from each token, exclusive, to the chunk's end.
    """
    a_kk, a_qk = (k.new_zeros(len(k), k.shape[1], k.shape[1]) for _ in range(2))
    prefix, suffix = g.exp(), torch.ones_like(g)
    for half, to_row, from_column in _levels(prefix, suffix):
        columns = (_halves(k, half)[:, 0] * from_column).mT
        for x, matrix in ((row, a_kk), (q, a_qk)):
            place = _corners(matrix, half)
            place.copy_(torch.bmm(_halves(x, half)[:, 1] * to_row, columns).view(place.shape))
    a_qk.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    return a_kk, a_qk, prefix, suffix


def add_pair_gradients(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    d_kk: Tensor,
    d_qk: Tensor,
    *,
    d_row: Tensor,
    d_q: Tensor,
    d_column: Tensor,
) -> None:
    """`inputs`: those of `pair_products`. Add what the gradients of its matrices (only their lower parts are read) mean
    for `row`, for q and for k as a column; in place."""
    row, q, k, g = inputs
    on_diagonal = d_qk.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    d_q.addcmul_(on_diagonal, k)
    d_column.addcmul_(on_diagonal, q)
    for half, to_row, from_column in _levels(g.exp(), torch.ones_like(g)):
        columns = _halves(k, half)[:, 0] * from_column
        d_columns = torch.zeros_like(columns)
        for x, grad, d_x in ((row, d_kk, d_row), (q, d_qk, d_q)):
            block = _corners(grad, half).reshape(-1, half, half)
            _halves(d_x, half)[:, 1].addcmul_(_product(block, columns), to_row)
            d_columns += _product(block.mT, _halves(x, half)[:, 1] * to_row)
        _halves(d_column, half)[:, 0].addcmul_(d_columns, from_column)


def invert_unit_lower_(matrix: Tensor) -> Tensor:
    """Replace strictly lower triangles L [X, C, C], C a power of two, by (I + L)^-1.

    Of a block [[A, 0], [B, D]] whose A and D are inverses already, B becomes -D B A.
    """
    matrix.diagonal(dim1=1, dim2=2).fill_(1)
    _corners(matrix, 1).neg_()
    half = 2
    while half < matrix.shape[-1]:
        first, second = (x.reshape(-1, half, half) for x in _diagonals(matrix, half))
        below = _corners(matrix, half)
        below.copy_(torch.bmm(second, torch.bmm(below.reshape(-1, half, half), first)).view(below.shape).neg_())
        half *= 2
    return matrix


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [B, h, h] times b [B, h, K]; batched products of tiny matrices cost ten times their arithmetic on a CPU."""
    if a.shape[-1] > TINY:
        return torch.bmm(a, b)
    out = a[:, :, :1] * b[:, :1]
    for j in range(1, a.shape[-1]):
        out.addcmul_(a[:, :, j : j + 1], b[:, j : j + 1])
    return out


def _levels(prefix: Tensor, suffix: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Half sizes 1, 2, .. C/2: (half, decay from the border to each token of a second half, inclusive; decay from each
    token of a first half, exclusive, to the border), views [B, half, K] that are good until the next level.

    On entry prefix [X, C, K] holds exp(g) and suffix ones; after the last level they span the whole chunk.
    """
    half = 1
    while half < prefix.shape[1]:
        before, after = _halves(prefix, half), _halves(suffix, half)
        yield half, before[:, 1], after[:, 0]
        after[:, 0] *= before[:, 1, -1:]
        before[:, 1] *= before[:, 0, -1:]
        half *= 2


def _halves(x: Tensor, half: int) -> Tensor:
    """View contiguous [X, C, K] as [B, 2, half, K]."""
    return x.view(-1, 2, half, x.shape[-1])


def _corners(matrix: Tensor, half: int) -> Tensor:
    """View contiguous [X, C, C] as [X, C / (2 half), half, half]: second half against first half of every block."""
    return _blocks(matrix, half)[:, half:, :half].permute(0, 3, 1, 2)


def _diagonals(matrix: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """As `_corners`: first half against first half, second against second."""
    blocks = _blocks(matrix, half)
    return blocks[:, :half, :half].permute(0, 3, 1, 2), blocks[:, half:, half:].permute(0, 3, 1, 2)


def _blocks(matrix: Tensor, half: int) -> Tensor:
    """View contiguous [X, C, C] as [X, 2 half, 2 half, C / (2 half)]: the blocks on its diagonal."""
    size, chunk = 2 * half, matrix.shape[-1]
    return matrix.view(-1, chunk // size, size, chunk // size, size).diagonal(dim1=1, dim2=3)
