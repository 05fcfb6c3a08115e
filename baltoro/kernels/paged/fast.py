"""Copies inside the arena on a GPU, each batch in one launch and without memory in between.

In and out: as `reference.py`, with one duty more for the caller of `copy_blocks`: programs run in any order, so no
block may be both a source and a target of one call (unless of the same pair).
"""

from __future__ import annotations

from torch import Tensor

BLOCK = 1024
"""Words of one program: 8 KiB of the widest words."""
MAX_PAIRS = 65535
"""What a grid takes in its second direction."""


def copy_blocks(blocks: Tensor, sources: Tensor, targets: Tensor) -> None:
    """blocks [count, words], sources and targets int64 [M]."""
    from baltoro.kernels.paged.triton_kernels import copy_kernel  # triton is absent on machines without a GPU

    words = blocks.shape[1]
    for first in range(0, len(sources), MAX_PAIRS):
        some = slice(first, first + MAX_PAIRS)
        copy_kernel[(-(-words // BLOCK), len(sources[some]))](
            blocks, sources[some], targets[some], blocks.stride(0), words, BLOCK=BLOCK
        )


def scatter_rows(kv: Tensor, places: tuple[Tensor, Tensor], latent: Tensor, shared: Tensor) -> None:
    """kv [P, page, R+Dr]; places (page, offset), int64 [T] each; latent [T, R], shared [T, Dr]. Same dtype as kv."""
    import triton

    from baltoro.kernels.paged.triton_kernels import scatter_kernel

    if not len(latent):
        return
    latent, shared = latent.to(kv.dtype), shared.to(kv.dtype)
    scatter_kernel[(len(latent),)](
        kv, *places, latent, shared, kv.stride(0), kv.stride(1), latent.stride(0), shared.stride(0),
        R=latent.shape[1], D=shared.shape[1], BLOCK=triton.next_power_of_2(latent.shape[1] + shared.shape[1]),
    )  # fmt: skip
