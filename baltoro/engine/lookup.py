"""What of a prompt need not be computed: found in the tree, on the host or, given time, in the third tier; and pinned.

In: requests that are about to be admitted. Out: Found, to be entered (`prefix.py`) or left; whether to wait.
Invariants: what is found is pinned before anything is allocated; the state and the KV of a hit are of the same depth;
the last prompt token is always computed. Nothing is taken or copied here.
Single writer: the scheduler, through `memory.py`. Source: spec/serving.md A.
"""

from __future__ import annotations

from dataclasses import dataclass

from baltoro.cache.answers import Match, Pin
from baltoro.cache.prefix import PrefixTree
from baltoro.engine.prefix_key import spell_known
from baltoro.engine.request import Request
from baltoro.engine.tiers import Find, HostTier
from baltoro.errors import InvariantError

MAX_ASKS = 4
"""Times that a request asks the third tier for its prefix before it goes on with what there is."""


@dataclass(frozen=True, slots=True)
class Found:
    """What can be restored of a prompt, pinned.

    depth         tokens that need not be computed
    device_depth  of these, those whose KV is on the device; `pages` cover them (the last one may be shared only up to
                  there). The rest, and then the state too, come from the host: `host`
    """

    depth: int = 0
    device_depth: int = 0
    pages: tuple[int, ...] = ()
    match: Match | None = None
    pin: Pin | None = None
    host: Find | None = None


class PrefixLookup:
    """Looks in the tree and below it. Single writer: the scheduler."""

    def __init__(self, tree: PrefixTree, tier: HostTier | None) -> None:
        self.tree, self.tier = tree, tier

    def must_load(self, request: Request) -> bool:
        """`request` is next to be admitted: whether it waits for what only the third tier has of its prompt. Asked only
        of the next one: prefixes of the whole line would push each other out of the host again. It never waits for
        ever."""
        if self.tier is None or self.tier.third is None:
            return False
        if not self.is_loading(request) and request.hold.num_asks < MAX_ASKS:
            spell_known(request)
            limit = len(request.tokens) - 1
            match = self.tree.match(request.namespace, request.hold.ids, limit)
            digests, num_known = self._behind(match, request, limit)
            loading = self.tier.prefetch(digests, num_known, has_states=self.tree.has_states)
            is_landing = any(map(self.tier.third.is_landing, loading))
            request.hold.num_asks += not is_landing  # what is being written lands: that wait ends by itself
            request.hold.loading = loading
        return self.is_loading(request)

    def is_loading(self, request: Request) -> bool:
        """Whether `request` waits for a prefix from the third tier."""
        return self.tier is not None and self.tier.is_asked(request.hold.loading)

    def find(self, request: Request) -> Found:
        """The longest prefix that can be restored, pinned. A scored prompt is found only as far as it was scored."""
        if request.hold.backup is not None:
            return Found(request.hold.backup.num_tokens)
        spell_known(request)
        limit = len(request.tokens) - 1
        if request.params.prompt_logprobs is not None and request.num_scored < request.num_prompt - 1:
            limit = min(limit, request.num_scored)
        match = self.tree.match(request.namespace, request.hold.ids, limit)
        found = Found(match.depth, match.depth, match.pages, match, self.tree.pin(match))
        return found if self.tier is None else self._look_below(self.tier, request, found, match, limit)

    def _look_below(self, tier: HostTier, request: Request, found: Found, match: Match, limit: int) -> Found:
        """Whether the host carries on where the device ends: with a deeper state, with more KV, or with both."""
        if self.tree.grid.floor_endpoint(limit) <= match.depth:
            return found
        digests, num_known = self._behind(match, request, limit)
        host = tier.find(digests, num_known, has_states=self.tree.has_states)
        if host is None:
            return found
        depth = host.entries[-1].depth
        device_depth, pages, pin = min(depth, match.kv_depth), found.pages, found.pin
        assert pin is not None
        if device_depth > match.depth:
            deeper = self.tree.pin_at(request.namespace, request.hold.ids, device_depth, start=pin)
            if deeper is None:
                raise InvariantError("a prefix that was just matched is gone")
            self.tree.unpin(pin)
            pages, pin = self.tree.pages_to(deeper), deeper
        return Found(depth, device_depth, pages, match, pin, host)

    def _behind(self, match: Match, request: Request, limit: int) -> tuple[list[bytes], int]:
        """Digests of what comes behind `match` up to `limit`, and of how many of them the device has the KV."""
        last = self.tree.grid.floor_endpoint(limit)
        digests = self.tree.digests(request.namespace, request.hold.ids, match.depth, last, parent=match.digest)
        return digests, (match.kv_depth - match.depth) // self.tree.grid.endpoint

    def nothing(self, request: Request) -> Found:
        """A find that found nothing."""
        match = self.tree.match(request.namespace, request.hold.ids, 0)
        return Found(match=match, pin=self.tree.pin(match))

    def leave(self, found: Found) -> None:
        """What was found is not wanted after all."""
        if found.pin is not None:
            self.tree.unpin(found.pin)
        if found.host is not None and self.tier is not None:
            self.tier.leave(found.host)
