"""Bytes of the host tier: two tables of slabs in CPU memory, and the copies between them and the pool.

    blocks [num_blocks, E, *row]         rows of E positions, every layer of a position together, as in a page
    states [num_states, slot_bytes]      a slot as it is, all layers

A page is token-major, so consecutive positions are consecutive bytes: a block is several whole pages (P < E), or one
stretch inside a page (P >= E); nothing here needs one to divide the other.
In: slabs from `host.py`, PHYSICAL pages and slots. Out: bytes moved, bit for bit.
Invariants: pinned memory when the pool is on a GPU. There, copies are enqueued on the current stream and not waited
for: a slab that is written to is ready, and one that is read from is free, when the step that listed the copy is done.
Source: spec/serving.md A.8.
Not here: who owns which slab (`host.py`), files (`disk.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.cache.pool import Pool
from baltoro.cache.shape import ArenaLayout
from baltoro.errors import ConfigError, ShapeError

BLOCKS_PER_STATE = 64  # entries of a model without KV cost no bytes; this bounds how many there can be


@dataclass(frozen=True, slots=True)
class HostShape:
    """How many slabs of each kind there are, and how large one is."""

    block_bytes: int
    state_bytes: int
    num_blocks: int
    num_states: int

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.num_blocks + self.state_bytes * self.num_states


def plan_host(budget_bytes: int, layout: ArenaLayout, endpoint: int, *, state_share: float = 0.5) -> HostShape:
    """Slabs for a budget. `state_share` of it goes to states if the model has both kinds; a kind that the model does
    not have has size 0. Errors: ConfigError if not even one entry fits."""
    block_bytes = 0 if layout.row is None else endpoint * layout.row.num_bytes
    state_bytes = layout.slot_bytes
    if not block_bytes:
        num_states = budget_bytes // max(1, state_bytes)
        num_blocks = num_states * BLOCKS_PER_STATE
    else:
        # at least one state: a share that rounds to nothing would cache nothing
        num_states = max(1, int(budget_bytes * state_share) // state_bytes) if state_bytes else 0
        num_blocks = (budget_bytes - num_states * state_bytes) // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"a host tier of {budget_bytes} bytes cannot hold one block ({block_bytes} bytes) and one state "
            f"({state_bytes} bytes): give it at least {block_bytes + state_bytes} bytes, or 0 to switch it off"
        )
    return HostShape(block_bytes, state_bytes, num_blocks, num_states)


class HostStore:
    """The slabs. Written by the runner through the copies of a plan, and by whoever brings an entry from a file."""

    def __init__(self, shape: HostShape, layout: ArenaLayout, endpoint: int, *, is_pinned: bool = False) -> None:
        self.shape, self.layout, self.endpoint = shape, layout, endpoint
        row = layout.row
        row_shape, dtype = ((0,), torch.uint8) if row is None else (row.shape, row.dtype)
        self.blocks = torch.empty((shape.num_blocks, endpoint, *row_shape), dtype=dtype, pin_memory=is_pinned)
        self.states = torch.empty((shape.num_states, shape.state_bytes), dtype=torch.uint8, pin_memory=is_pinned)

    @staticmethod
    def for_pool(pool: Pool, budget_bytes: int, endpoint: int, *, state_share: float = 0.5) -> HostStore:
        """A store that fits `pool`, pinned if the pool is on a GPU. Errors: ConfigError."""
        shape = plan_host(budget_bytes, pool.layout, endpoint, state_share=state_share)
        return HostStore(shape, pool.layout, endpoint, is_pinned=pool.arena.device.type == "cuda")

    def fingerprint(self, weights: str) -> bytes:
        """What gives the bytes their meaning: which weights made them (a name that changes with them), and the layout
        of rows and slots. The size of a page plays no part in it."""
        return repr((weights, self.endpoint, self.layout.row, self.layout.slot_parts)).encode()

    def save_block(self, pool: Pool, block: int, pages: Sequence[int], first_row: int, num_rows: int) -> None:
        """Pool to host: `num_rows` rows from row `first_row` of pages[0] on, to the start of `block`."""
        rows = _rows(pool)
        if rows is None:
            return
        slab, ids = self.blocks[block, :num_rows], self._row_ids(pages, first_row, num_rows)
        if isinstance(ids, slice):
            slab.copy_(rows[ids], non_blocking=True)
        else:
            slab.copy_(rows.index_select(0, ids.to(rows.device, non_blocking=True)), non_blocking=True)

    def load_block(self, pool: Pool, block: int, pages: Sequence[int], first_row: int, num_rows: int) -> None:
        """Host to pool: the first `num_rows` rows of `block`, to row `first_row` of pages[0] and on. No other row of
        these pages is written."""
        rows = _rows(pool)
        if rows is None:
            return
        slab, ids = self.blocks[block, :num_rows], self._row_ids(pages, first_row, num_rows)
        if isinstance(ids, slice):
            rows[ids].copy_(slab, non_blocking=True)
        else:
            moved = slab.to(rows.device, non_blocking=True)
            rows.index_copy_(0, ids.to(rows.device, non_blocking=True), moved)

    def save_state(self, pool: Pool, state: int, slot: int) -> None:
        """Pool to host, every byte of a slot."""
        self.states[state].copy_(_slot(pool, slot), non_blocking=True)

    def load_state(self, pool: Pool, state: int, slot: int) -> None:
        """Host to pool, every byte of a slot."""
        _slot(pool, slot).copy_(self.states[state], non_blocking=True)

    def block_bytes(self, block: int) -> memoryview:
        """The bytes of a block, in place and writable. Nobody may be copying to or from it."""
        return self.blocks[block].reshape(-1).view(torch.uint8).numpy().data

    def state_bytes(self, state: int) -> memoryview:
        """The bytes of a state, in place and writable. Nobody may be copying to or from it."""
        return self.states[state].numpy().data

    def _row_ids(self, pages: Sequence[int], first_row: int, num_rows: int) -> slice | Tensor:
        """Rows of the arena: pages tile it from its first byte, so row r of page p is row p * P + r of all."""
        size = self.layout.page_size
        if not 0 <= first_row < size or not 0 < num_rows <= self.endpoint:
            raise ShapeError(f"{num_rows} rows from row {first_row} on are no block of {self.endpoint} rows")
        if first_row + num_rows > len(pages) * size:
            raise ShapeError(f"{num_rows} rows from row {first_row} on are more than {len(pages)} pages of {size} hold")
        if len(pages) == 1:
            start = pages[0] * size + first_row
            return slice(start, start + num_rows)
        bases = torch.tensor(pages, dtype=torch.int64)[:, None] * size
        ids = (bases + torch.arange(size)).flatten()
        return ids[first_row : first_row + num_rows]


def _rows(pool: Pool) -> Tensor | None:
    """[P * page_size, *row.shape]: every row of the arena; None for a model without KV."""
    view = pool.row_view()
    return None if view is None else view.flatten(0, 1)


def _slot(pool: Pool, slot: int) -> Tensor:
    """[slot_bytes] of one slot."""
    start = pool.shape.slots_base + slot * pool.layout.slot_bytes
    return pool.arena[start : start + pool.layout.slot_bytes]
