"""The prefix cache as a request sees it: enter, leave state checkpoints on the way, keep what was computed.

Three state moves, all on the forward stream and in the order of the plan, so that program order is the only
synchronisation: restore (a checkpoint is copied into the working slot before the first forward), snapshot (the working
state goes into an extra slot at a boundary, taken only then), donate (that slot changes hands to the tree, no bytes).

In: requests, what was found of them (`lookup.py`), drafts of spans, commits. Out: snapshots due, copies in the ledger.
Invariants: what a step writes can be found only after its commit; without a slot a state is left out, never waited for.
Single writer: the scheduler, through `memory.py`. Source: spec/serving.md A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baltoro.cache.answers import Pin
from baltoro.cache.audit import Holding
from baltoro.cache.evict import Evicted
from baltoro.cache.prefix import PrefixTree
from baltoro.cache.retention import CheckpointKind, Retention
from baltoro.engine.ledger import Ledger
from baltoro.engine.lookup import Found, PrefixLookup
from baltoro.engine.plan_builder import Draft
from baltoro.engine.prefix_key import spell_known
from baltoro.engine.request import CacheHold, DueSnapshot, Request
from baltoro.engine.tiers import HostTier
from baltoro.errors import LeakError


@dataclass(slots=True)
class CacheCounts:
    """Totals since the start, for stats."""

    lookup_tokens: int = 0
    hit_tokens: int = 0
    snapshots: int = 0
    skipped_snapshots: int = 0
    backups: int = 0


class PrefixCache:
    """Joins requests and the tree. Single writer: the scheduler."""

    def __init__(
        self,
        tree: PrefixTree,
        ledger: Ledger,
        retention: Retention,
        *,
        tier: HostTier | None = None,
        is_backing_up: bool = False,
    ) -> None:
        self.tree, self.grid, self.retention, self.tier = tree, tree.grid, retention, tier
        self.lookup = PrefixLookup(tree, tier)
        self.counts = CacheCounts()
        self._ledger, self._has_states, self._is_backing_up = ledger, tree.has_states, is_backing_up

    # ---- coming ----------------------------------------------------------------------------------------------------
    def enter(self, request: Request, found: Found, own: list[int]) -> None:
        """`request` goes on from `found`: restore its state, copy the page of which it found only the first rows."""
        hold = request.hold
        assert request.slot is not None
        if hold.backup is not None:
            assert self.tier is not None
            self.tier.restore(request, hold.backup)
            hold.backup = None
            return
        assert found.match is not None
        if found.pages and found.device_depth % self._ledger.page_size:
            self._ledger.copy_page(found.pages[-1], own[0])
        hold.pin, hold.depth = found.pin, found.device_depth
        hold.branch = found.match.branch if found.match.branch > found.depth else 0
        if found.host is not None:
            assert self.tier is not None
            self.tier.load(request, found.host, found.device_depth)
            self._bring_back(request, found.depth)
        elif found.match.state is not None:
            self._ledger.copy_slot(found.match.state, request.slot)
        if hold.num_cached is None:
            hold.num_cached = found.depth
            self.counts.lookup_tokens += request.num_prompt
            self.counts.hit_tokens += found.depth

    def _bring_back(self, request: Request, depth: int) -> None:
        """A state that came from the host is given to the tree again, if there is a slot for it."""
        slot = self._slot() if self._has_states else None
        if slot is not None:
            assert request.slot is not None
            self._ledger.copy_slot(request.slot, slot)
            request.hold.due.insert(0, DueSnapshot(depth, slot, "turn_end"))

    def back_up(self, request: Request) -> None:
        """`request` is about to lose its memory: a copy on the host, if that is wanted and there is room."""
        if self._is_backing_up and self.tier is not None and request.num_computed:
            request.hold.backup = self.tier.back_up(request)
            self.counts.backups += request.hold.backup is not None

    def forget(self, request: Request) -> None:
        """`request` ends while it waits."""
        if request.hold.backup is not None and self.tier is not None:
            self.tier.forget(request.hold.backup)
            request.hold.backup = None

    # ---- on the way ------------------------------------------------------------------------------------------------
    def snapshots(self, draft: Draft) -> tuple[DueSnapshot, ...]:
        """States to be kept on the way through a span: at its deepest grid point, the end of the prompt, the fork; of
        a decode at every interval. Without a slot for one, it is left out."""
        if not self._has_states or (draft.is_decode and self._is_plain(draft)):
            return ()
        taken = []
        for depth, kind in self._points(draft):
            slot = self._slot()
            if slot is None:
                self.counts.skipped_snapshots += 1
                continue
            taken.append(DueSnapshot(depth, slot, kind))
        self.counts.snapshots += len(taken)
        draft.request.hold.due += taken
        return tuple(taken)

    def settle(self, request: Request) -> None:
        """Donate the snapshots that have landed; one that is worth keeping only if the request ends here is kept
        back until the next one lands."""
        hold = request.hold
        if not hold.due and (hold.pin is None or not hold.pin.has_state):  # as in most steps of a decode
            return
        if hold.pin is not None and hold.pin.has_state:  # restored: the state may go, the path is still of use
            pin = self.tree.pin_at(request.namespace, hold.ids, hold.depth, start=hold.pin)
            self.tree.unpin(hold.pin)
            hold.pin = pin
        while hold.due and hold.due[0].depth <= request.num_computed:
            due = hold.due.pop(0)
            spare: DueSnapshot | None = due
            if not self._wants(request, due.kind, due.depth):
                spare, hold.tracked = hold.tracked, due
            elif self._insert(request, due.depth, due.slot, due.kind):
                spare, hold.state_depth = None, due.depth
            if spare is not None:
                self._ledger.release((), [spare.slot])

    # ---- going -----------------------------------------------------------------------------------------------------
    def keep(self, request: Request) -> None:
        """`request` gives its memory back: what it computed stays findable. Its last state becomes the end of a turn;
        that is the working slot itself where it stands on the grid (request.slot is then None: the tree has it)."""
        hold = request.hold
        self.settle(request)
        unwanted = [due.slot for due in hold.due]  # never landed
        hold.due = []
        depth = self.grid.floor_endpoint(request.num_computed)
        # a row that ran over the end has changed the working slot, though nobody will see what it computed
        is_whole = self._has_states and request.num_planned == request.num_computed
        is_on_grid = is_whole and 0 < depth == request.num_computed == self.grid.floor(depth)
        if hold.tracked is not None:
            is_last = not is_on_grid and hold.tracked.depth > hold.state_depth
            if not (is_last and self._insert(request, hold.tracked.depth, hold.tracked.slot, "turn_end")):
                unwanted.append(hold.tracked.slot)
            hold.tracked = None
        elif hold.state_depth and not is_on_grid:
            self._insert(request, hold.state_depth, None, "turn_end")
        if is_on_grid and self._insert(request, depth, request.slot, "turn_end"):
            request.slot = None
        elif depth > hold.depth:
            self._insert(request, depth, None, "turn_end")
        self._ledger.release((), unwanted)
        if hold.pin is not None:
            self.tree.unpin(hold.pin)
            hold.pin = None
        hold.branch = hold.depth = hold.state_depth = 0

    def shed(self, request: Request) -> bool:
        """What `request` holds only for the sake of others: its pin and a kept-back state. Whether there was any."""
        hold = request.hold
        had_any = hold.pin is not None or hold.tracked is not None
        if hold.tracked is not None:
            self._ledger.release((), [hold.tracked.slot])
            hold.tracked = None
        if hold.pin is not None:
            self.tree.unpin(hold.pin)
            hold.pin = None
        return had_any

    def move(self, request: Request, namespace: bytes) -> None:
        """What `request` leaves behind from now on is found under `namespace` alone, and nothing of the old is held."""
        self.shed(request)
        hold = request.hold
        hold.branch = hold.depth = hold.state_depth = hold.num_asks = 0
        hold.loading = set()
        request.namespace = namespace

    def give_up(self, num_pages: int, num_slots: int) -> None:
        """Evict, oldest first, until so much can be taken, or nothing is left that may go."""
        self._put_aside(self.tree.evict_for(num_pages, num_slots))

    def _put_aside(self, evicted: Sequence[Evicted]) -> None:
        if self.tier is not None:
            self.tier.put_aside(evicted)

    def leave_device(self) -> None:
        """Forget what is on the device; slower tiers keep what they have."""
        self.tree.flush()

    def flush(self) -> None:
        self.leave_device()
        if self.tier is not None:
            self.tier.flush()

    def holdings(self) -> list[Holding]:
        return self.tree.holdings()

    def audit(self, holds: Sequence[CacheHold]) -> None:
        """Tree and host tier add up, and every receipt that is out is in one of `holds`. Errors: LeakError."""
        self.tree.audit()
        held, out = sum(hold.pin is not None for hold in holds), self.tree.stats().num_pins
        if held != out:
            raise LeakError(f"{out} receipts of the prefix tree are out, requests hold {held}")
        if self.tier is not None:
            self.tier.audit(hold.backup for hold in holds)

    # ---- helpers ---------------------------------------------------------------------------------------------------
    def _is_plain(self, draft: Draft) -> bool:
        """Whether a decode passes no boundary; most do."""
        return draft.end > draft.request.num_prompt and draft.end % self.grid.interval != 0

    def _points(self, draft: Draft) -> list[tuple[int, CheckpointKind]]:
        request, start, end = draft.request, draft.start, draft.end
        prompt_end = self.grid.floor(request.num_prompt - 1)
        if draft.is_decode and end > request.num_prompt:
            points: dict[int, CheckpointKind] = {end: "decode"} if end % self.grid.interval == 0 else {}
        else:
            points = {depth: "prefill"} if (depth := self.grid.deepest_in(start, end)) else {}
            if start < prompt_end <= end:
                points[prompt_end] = "prompt_end"
            if start < request.hold.branch <= end:
                points[request.hold.branch] = "branch"
        return [
            (depth, kind)
            for depth, kind in sorted(points.items())
            if self._wants(request, kind, depth) or self._wants(request, "turn_end", depth)
        ]

    def _wants(self, request: Request, kind: CheckpointKind, depth: int) -> bool:
        is_second = 0 < depth <= request.hold.branch
        return self.retention.wants(kind, depth, prompt_len=request.num_prompt, is_second_hit=is_second)

    def _slot(self) -> int | None:
        books = self._ledger.books
        if not books.has_room(0, 1):
            self.give_up(0, 1)
        return self._ledger.take_slot() if books.has_room(0, 1) else None

    def _insert(self, request: Request, depth: int, slot: int | None, kind: CheckpointKind) -> bool:
        """Register the first `depth` tokens; True if the tree took the slot. The request then stands on that path."""
        hold = request.hold
        spell_known(request)
        done = self.tree.insert(
            request.namespace, hold.ids, depth, request.pages, state=slot, kind=kind, start=self._start(hold, depth)
        )
        if depth > hold.depth:
            pin = self.tree.pin_at(request.namespace, hold.ids, depth, start=self._start(hold, depth))
            if hold.pin is not None:
                self.tree.unpin(hold.pin)
            hold.pin, hold.depth = pin, depth
        return done.is_state_taken

    @staticmethod
    def _start(hold: CacheHold, depth: int) -> Pin | None:
        """A place on the way to `depth`, to save the walk."""
        return hold.pin if hold.pin is not None and hold.depth <= depth else None
