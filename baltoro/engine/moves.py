"""Makes the copies of a plan, in order; runs of one kind go in one batch.

In: moves with physical ids. Writes the arena and the host tier's store. A batch is right as a sequence: it ends where
a move reads what an earlier one of it wrote, or writes what an earlier one reads (the pool sees to that).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from baltoro.cache.host_store import HostStore
from baltoro.cache.pool import Pool
from baltoro.engine.batch import Move


class Mover:
    """Moves bytes between the slots and pages of one arena, and the slabs of a host tier if there is one."""

    def __init__(self, pool: Pool, host: HostStore | None = None) -> None:
        self._pool, self._host = pool, host

    def move(self, moves: Sequence[Move]) -> None:
        """Every byte of each slot or page."""
        for kind, group in groupby(moves, key=lambda move: move.kind):
            batch = list(group)
            targets = [move.target for move in batch]
            if kind == "copy_slot":
                self._pool.copy_slots([move.source for move in batch], targets)
            elif kind == "copy_page":
                self._pool.copy_pages([move.source for move in batch], targets)
            elif kind == "zero_page":
                self._pool.zero_pages(targets)
            elif kind == "poison_page":
                self._pool.poison_ids(targets, ())
            elif kind == "poison_slot":
                self._pool.poison_ids((), targets)
            else:
                for move in batch:
                    self._between(move)

    def _between(self, move: Move) -> None:
        """To or from the host."""
        pool, host = self._pool, self._host
        assert host is not None
        if move.kind == "save_block":
            host.save_block(pool, move.target, move.pages, move.row, move.num_rows)
        elif move.kind == "load_block":
            host.load_block(pool, move.source, move.pages, move.row, move.num_rows)
        elif move.kind == "save_state":
            host.save_state(pool, move.target, move.source)
        else:
            host.load_state(pool, move.source, move.target)
