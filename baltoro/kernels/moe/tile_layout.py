"""The tiled order of MXFP4 bytes: what a thread of a matrix instruction needs lies together, ready for masks.

    matrix of an expert   columns padded to 128, rows to 256 (gate and up: 128 each), with zero codes; in tiles of
                          8 rows x 128 columns, those of the same rows one after the other:
                          bytes [rows/8, columns/128, 512], scales [rows/8, columns/128, 32]
    tile                  512 bytes: 8 rows of 4 blocks of 32 columns, 16 bytes a block
    block                 4 words of 32 bits, each in little-endian bytes; word i holds columns 4i .. 4i + 3 and
                          16 + 4i .. 16 + 4i + 3 of the block, but for bits that it shares with its neighbour
    two words             eight pairs of neighbouring columns, one in each half of 16 bits of what comes out: a number
                          of bf16, 2^-126 times the value, has a code's sign at 15, its other bits at 8 7 6. A pair is
                          a word turned right by so many bits, and a mask: three of each word's own, and its fourth of
                          bits that either word has left over (SHARED: the first one's). So sixteen numbers take nine
                          logical operations and seven shifts; a word alone, with bits as they fit, six and five for
                          eight. (Four such patterns do not tile 16 bits, whatever the turns; eight tile 32.)
    gate and up           one matrix: 8 rows of the gate, 8 rows up, in turn; its activation needs no exchange

Files hold the published order (two neighbouring columns a byte, the even one low); `products.Tiled` is what holds this
one. What is padded stands for zeros and comes back from nowhere.
Source: spec/kernels.md E.5 (packed conversion, offline order).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from baltoro.kernels.quant.mxfp4 import BLOCK, pack, scale_values, unpack

UNIT, ROW_UNIT = 128, 256  # columns and rows are padded to multiples of them
ROWS = 8  # of a tile
# By how many bits to the right two words turn for their pairs; those above 16 are shifts to the left.
TURNS = ((0, 4, 26, 6), (2, 8, 30, 28))
SHARED = 0x60306030  # bits of the fourth pairs that the first word holds
SPOTS = (6, 7, 8, 15)  # of a code's bits in a number
MASK = -0x7E3F7E40  # 0x81C081C0, as int32


def padded(size: int, unit: int = UNIT) -> int:
    """The next multiple of `unit`."""
    return -(-size // unit) * unit


def weave(codes: Tensor) -> Tensor:
    """Codes uint8 [..., 32 n] in the order of the columns -> bytes uint8 [..., 16 n]."""
    # [..., block, half of the block, two words, word, pair of that half, lane]
    parts = torch.unflatten(codes.int(), -1, (-1, 2, 2, 2, 2, 2))
    words = torch.zeros(*parts.shape[:-5], 2, 2, dtype=torch.int32, device=codes.device)
    for word, pair, lane, spot, bit in _bits():
        into, at = _place(word, pair, lane, spot)
        code = parts[..., pair // 2, :, word, pair % 2, lane]
        words[..., into] |= (code >> bit & 1) << at
    return words.view(torch.uint8).flatten(-3)


def unweave(woven: Tensor) -> Tensor:
    """The codes that `weave` took."""
    words = torch.unflatten(woven.contiguous().view(torch.int32), -1, (-1, 2, 2))
    out = torch.zeros(*words.shape[:-2], 2, 2, 2, 2, 2, dtype=torch.uint8, device=woven.device)
    for word, pair, lane, spot, bit in _bits():
        source, at = _place(word, pair, lane, spot)
        out[..., pair // 2, :, word, pair % 2, lane] |= ((words[..., source] >> at & 1) << bit).to(torch.uint8)
    return out.flatten(-6)


def _bits() -> Iterator[tuple[int, int, int, int, int]]:
    """Word of two, pair, lane, place in a number and bit of the code, of all bits of two words."""
    for word, pair, lane in product(range(2), range(4), range(2)):
        for bit, spot in enumerate(SPOTS):
            yield word, pair, lane, spot, bit


def _place(word: int, pair: int, lane: int, spot: int) -> tuple[int, int]:
    """Which of two words holds a bit, and where."""
    at = (16 * lane + spot + TURNS[word][pair]) % 32
    return (word if pair < 3 else 1 - (SHARED >> at & 1)), at


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
    words = torch.unflatten(packed.contiguous().view(torch.int32), -1, (-1, 2))
    shared = words[..., 0] & SHARED | words[..., 1] & ~SHARED
    pairs = torch.stack(
        [_turned(shared if pair == 3 else words[..., word], TURNS[word][pair]) & MASK
         for word, pair in product(range(2), range(4))], -1,
    ).view(torch.bfloat16)  # fmt: skip
    # [..., rows/8, columns/128, row, block, two words, word, half of the block, pair of that half, lane]
    pairs = torch.unflatten(torch.unflatten(pairs, -2, (ROWS, UNIT // BLOCK, 2)), -1, (2, 2, 2, 2))
    numbers = pairs.movedim(-3, -5).to(dtype).flatten(-5) * 2.0**126
    numbers = numbers * torch.unflatten(scale_values(scale.contiguous(), dtype), -1, (ROWS, -1)).unsqueeze(-1)
    return numbers.transpose(-4, -3).flatten(-3).flatten(-3, -2)[..., :rows, :columns]


def _turned(words: Tensor, right: int) -> Tensor:
    return words if right == 0 else words << 32 - right | words >> right & (1 << 32 - right) - 1
