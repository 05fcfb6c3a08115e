"""Copies inside the arena in plain torch: whole blocks (slots, pages), and new rows into the pages of the latent cache.

Blocks are rows of integer words, so that no byte changes on the way. Writes its first argument.
"""

from __future__ import annotations

import torch
from torch import Tensor


def copy_blocks(blocks: Tensor, sources: Tensor, targets: Tensor) -> None:
    """blocks [count, words], sources and targets int64 [M]: every read before any write. Targets differ."""
    blocks.index_copy_(0, targets, blocks.index_select(0, sources))


def scatter_rows(kv: Tensor, places: tuple[Tensor, Tensor], latent: Tensor, shared: Tensor) -> None:
    """kv [P, page, R+Dr]; places (page, offset), int64 [T] each; latent [T, R], shared [T, Dr] side by side.

    Only the sink may be named twice.
    """
    kv[places] = torch.cat([latent, shared], dim=-1)
