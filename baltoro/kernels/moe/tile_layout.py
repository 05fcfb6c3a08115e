"""The tiled order of MXFP4 bytes: what a thread of a matrix instruction needs lies together, ready for masks.

    matrix of an expert   columns padded to 128, rows to 256 (gate and up: 128 each), with zero codes; in tiles of
                          8 rows x 128 columns, those of the same rows one after the other:
                          bytes [rows/8, columns/128, 512], scales [rows/8, columns/128, 32]
    tile                  512 bytes: 8 rows of 4 blocks of 32 columns, 16 bytes a block
    block                 4 words of 32 bits, each in little-endian bytes; word i holds columns 4i .. 4i + 3 and
                          16 + 4i .. 16 + 4i + 3 of the block
    word                  pair p of its eight codes is two neighbouring columns, one in each half of 16 bits. Code bits
                          (sign, three others) of pair 0, 1, 2, 3 at the places 15 8 7 6, 12 5 4 3, 9 2 1 0, 14 11 10 13
                          of a half: a shift (0, 3, 6) and a mask make two numbers of bf16, 2^-126 times the values.
    gate and up           one matrix: 8 rows of the gate, 8 rows up, in turn; its activation needs no exchange

Files hold the published order (two neighbouring columns a byte, the even one low); `products.Tiled` is what holds this
one. What is padded stands for zeros and comes back from nowhere.
Source: spec/kernels.md E.5 (packed conversion, offline order).
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.quant.mxfp4 import BLOCK, pack, scale_values, unpack

UNIT, ROW_UNIT = 128, 256  # columns and rows are padded to multiples of them
ROWS = 8  # of a tile
# Of each pair, for a code 0..15: the sign's place, and the left shifts of its bits 2 and 1, and of bit 0.
PLACES = ((15, 6, 6), (12, 3, 3), (9, 0, 0), (14, 9, 13))
MASK, SIGNS = -0x7E3F7E40, -0x7FFF8000  # 0x81C081C0 and 0x80008000, as int32


def padded(size: int, unit: int = UNIT) -> int:
    """The next multiple of `unit`."""
    return -(-size // unit) * unit


def weave(codes: Tensor) -> Tensor:
    """Codes uint8 [..., 32 n] in the order of the columns -> bytes uint8 [..., 16 n]."""
    # [..., block, half of the block, word, pair of that half, lane]
    parts = torch.unflatten(codes.int(), -1, (-1, 2, 4, 2, 2))
    words = torch.zeros(parts[..., 0, :, 0, 0].shape, dtype=torch.int32, device=codes.device)
    for pair, (sign, upper, last) in enumerate(PLACES):
        for lane in range(2):
            code = parts[..., pair // 2, :, pair % 2, lane]
            words |= ((code >> 3) << sign | ((code & 6) << upper) | ((code & 1) << last)) << 16 * lane
    return words.view(torch.uint8).flatten(-2)


def unweave(woven: Tensor) -> Tensor:
    """The codes that `weave` took."""
    words = torch.unflatten(woven.contiguous().view(torch.int32), -1, (-1, 4))
    out = torch.zeros(*words.shape[:-1], 2, 4, 2, 2, dtype=torch.uint8, device=woven.device)
    for pair, (sign, upper, last) in enumerate(PLACES):
        for lane in range(2):
            bits = words >> (16 * lane)
            code = ((bits >> sign) & 1) << 3 | (bits >> upper & 6) | (bits >> last & 1)
            out[..., pair // 2, :, pair % 2, lane] = code.to(torch.uint8)
    return out.flatten(-5)


def tiled(matrix: Tensor, width: int) -> Tensor:
    """[rows, columns], both multiples of a tile's -> [rows/8, columns/width, 8 width]."""
    rows, columns = matrix.shape
    return matrix.view(rows // ROWS, ROWS, columns // width, width).transpose(1, 2).flatten(2)


def permute_matrix(packed: Tensor, scale: Tensor, row_unit: int) -> tuple[Tensor, Tensor]:
    """Published bytes [rows, C/2] and scales [rows, C/32] -> tiles of both, padded."""
    rows, blocks = scale.shape
    short_rows, short_blocks = padded(rows, row_unit) - rows, (padded(blocks * BLOCK) // BLOCK) - blocks
    codes = torch.nn.functional.pad(unpack(packed), (0, short_blocks * BLOCK, 0, short_rows))
    scale = torch.nn.functional.pad(scale, (0, short_blocks, 0, short_rows), value=127)
    return tiled(weave(codes), UNIT // 2), tiled(scale, UNIT // BLOCK)


def unpermute_matrix(packed: Tensor, scale: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The published bytes and scales of `permute_matrix`'s result."""
    woven, scales = (
        torch.unflatten(t, 2, (ROWS, -1)).transpose(1, 2).flatten(2).flatten(0, 1) for t in (packed, scale)
    )
    return pack(unweave(woven)[:rows, :columns]), scales[:rows, : columns // BLOCK].contiguous()


def values(packed: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Tiles [..., rows/8, columns/128, 512] and their scales -> the numbers they stand for, [..., rows, columns]."""
    words = packed.contiguous().view(torch.int32)
    late = (words << 1) & SIGNS | (words >> 3) & 0x01800180 | (words >> 7) & 0x00400040
    pairs = torch.stack([words & MASK, (words << 3) & MASK, (words << 6) & MASK, late], -1).view(torch.bfloat16)
    # [..., rows/8, columns/128, row, block, word, half of the block, pair of that half, lane]
    pairs = torch.unflatten(torch.unflatten(pairs, -2, (ROWS, UNIT // BLOCK, 4)), -1, (2, 2, 2))
    numbers = pairs.movedim(-3, -4).to(dtype).flatten(-4) * 2.0**126
    numbers = numbers * torch.unflatten(scale_values(scale.contiguous(), dtype), -1, (ROWS, -1)).unsqueeze(-1)
    return numbers.transpose(-4, -3).flatten(-3).flatten(-3, -2)[..., :rows, :columns]
