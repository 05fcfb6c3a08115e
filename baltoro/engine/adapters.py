"""Adapters that the engine knows: versions, who uses them, and which lie in the adapter slots of the device.

In: adapters by name, requests that come and go. Out: the version a request gets, the slot it runs with, and the
installs that come due; the runner copies them, in the order of the plans, before the layers run.
Life of a version: loaded -> (retired when a newer one of its name comes, or when it is unloaded) -> gone once its last
user has ended. A request keeps the version it was admitted with from its first token to its last, unless it is carried
over to a newer one (`carry`).
Invariants: every load is a new version, and the namespace of the prefix cache holds its content digest and its number,
so no prefix of another version is ever found, and a namespace that was given before is refused; a running request's
version stays in its slot; a slot changes hands only between plans, and what an earlier plan still reads was queued
before; a version whose host copy is gone is refused although its slot may still hold it; a request that waits for a
slot lets only those pass that need none.
Single writer: the engine's thread. Source: spec/training.md B.2 (8, 9, 10, 12), G.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from baltoro.engine.adapter_version import AdapterVersion, Install
from baltoro.errors import ConfigError, LeakError, RequestError
from baltoro.model.adapter import Adapter

if TYPE_CHECKING:
    from baltoro.engine.request import Request


class AdapterBook:
    """Names, versions and slots. `max_loaded`: host copies at most, 0 is no limit; the longest unused goes first."""

    def __init__(self, num_slots: int = 0, *, max_loaded: int = 0) -> None:
        self.num_slots = num_slots
        self._max_loaded = max_loaded
        self._by_name: dict[str, AdapterVersion] = {}
        self._slots: list[AdapterVersion | None] = [None] * num_slots  # slot s at s - 1
        self._installs: list[Install] = []
        self._num_loads = 0
        self._clock = 0
        self._namespaces: set[str] = set()  # every one that was ever given

    # ---- names ---------------------------------------------------------------------------------------------------
    def load(
        self, name: str, weights: Adapter, source: str, *, number: int | None = None, digest: str | None = None
    ) -> AdapterVersion:
        """A new version of `name`; requests from now on get it, those that run keep theirs. `number`: of the version,
        where its maker counts; `digest` of the weights, where it is known.

        Errors: ConfigError where no slots were asked for, RequestError for a name that cannot be selected, or a number
        that is not above that of the version which serves.
        """
        self.check_open()
        check_name(name)
        serves = self._by_name[name].number if name in self._by_name else 0
        number = max(self._num_loads, serves) + 1 if number is None else number
        if number <= serves:
            raise RequestError(f"version {number} of adapter {name!r} is not newer than {serves}, which serves")
        version = AdapterVersion(
            name, number, digest or weights.digest(), weights.rank, weights.num_bytes, source, weights
        )
        if version.namespace in self._namespaces:
            raise RequestError(f"prefixes of {version.namespace} may be cached: a version needs a namespace of its own")
        self._namespaces.add(version.namespace)
        self._num_loads = max(self._num_loads + 1, number)
        self._touch(version)
        if name in self._by_name:
            self._retire(self._by_name[name])
        self._by_name[name] = version
        self._limit_host()
        return version

    def latest(self, name: str) -> AdapterVersion | None:
        """The version that new requests get, usable or not; None if there is none."""
        return self._by_name.get(name)

    def carry(
        self, old: AdapterVersion | None, new: AdapterVersion, requests: Iterable[Request], running: Sequence[Request]
    ) -> list[Request]:
        """Requests of `old` (None: of the base) go on with `new`, in the slot where `old` lay. Out: those that do; none
        if some of them run and every slot is held by others. Nothing may be in flight."""
        moved = [request for request in requests if request.adapter is old]
        needs_slot = any(request.adapter is old for request in running)
        place = self._slots.index(old) if old is not None and old in self._slots else None
        if needs_slot and place is None:
            held = self._held(running)
            place = next((i for i, one in enumerate(self._slots) if one is None or one not in held), None)
            if place is None:
                return []
        runs = {id(request) for request in running}
        for request in moved:
            request.adapter = new
            request.adapter_slot = place + 1 if place is not None and id(request) in runs else 0
        new.num_users += len(moved)
        if needs_slot and place is not None and new.weights is not None:
            self._slots[place] = new
            self._installs.append(Install(place + 1, new.weights))
        if old is not None:
            old.num_users -= len(moved)
            self._settle(old)
        return moved

    def unload(self, name: str) -> AdapterVersion:
        """No new request gets it; it is gone (`is_gone`) once its users have ended. Errors: RequestError."""
        version = self._by_name.pop(name, None)
        if version is None:
            raise RequestError(f"adapter {name!r} is not loaded; {self._known()}", param="lora_name")
        self._retire(version)
        return version

    def drop_host_copy(self, name: str) -> None:
        """Free the host memory of an adapter that nobody uses; its name stays known and is refused.

        Errors: RequestError if it is unknown or in use.
        """
        version = self._by_name.get(name)
        if version is None or version.num_users:
            why = "is not loaded" if version is None else f"has {version.num_users} running requests"
            raise RequestError(f"adapter {name!r} {why}", param="lora_name")
        version.weights = None

    def select(self, name: str) -> AdapterVersion:
        """The version that a new request of `name` gets. Errors: RequestError."""
        version = self._by_name.get(name)
        if version is None:
            raise RequestError(f"adapter {name!r} is not loaded; {self._known()}", param="model")
        if version.weights is None:
            raise RequestError(
                f"adapter {name!r} is no longer in host memory (max_loaded_loras): load it again", param="model"
            )
        self._touch(version)
        return version

    def check_open(self) -> None:
        """Errors: ConfigError where the engine has no adapter slots."""
        if not self.num_slots:
            raise ConfigError("this engine serves no adapters: start it with --max-loras (max_loras) of 1 or more")

    def facts(self) -> dict[str, object]:
        """Adapters by name, for clients."""
        return {name: version.facts() for name, version in sorted(self._by_name.items())}

    # ---- users ---------------------------------------------------------------------------------------------------
    def join(self, requests: Iterable[Request]) -> None:
        """Requests begin."""
        for request in requests:
            if request.adapter is not None:
                request.adapter.num_users += 1

    def leave(self, request: Request) -> None:
        """A request has ended, in whatever way."""
        if request.adapter is not None:
            request.adapter.num_users -= 1
            self._settle(request.adapter)

    # ---- slots ---------------------------------------------------------------------------------------------------
    def ready(self, waiting: Iterable[Request], running: Sequence[Request]) -> Iterator[Request]:
        """Of requests in line those that could run now; behind the first that waits for a slot, only the base's."""
        is_held_up = False
        held = self._held(running)
        for request in waiting:
            if request.adapter is None:
                yield request
            elif not is_held_up:
                if request.adapter in held or len(held) < self.num_slots:
                    yield request
                else:
                    is_held_up = True

    def enter(self, request: Request, running: Sequence[Request]) -> None:
        """`request` is about to run beside `running`: its slot, and an install if its version is not there yet."""
        version = request.adapter
        if version is None:
            return
        if version not in self._slots:
            assert version.weights is not None, "a version in use keeps its host copy"
            held = self._held(running)
            free = [i for i, one in enumerate(self._slots) if one is None or one not in held]
            # an empty one, or the one whose version was wanted longest ago
            place = min(free, key=lambda i: -1 if (one := self._slots[i]) is None else one.last_used)
            self._slots[place] = version
            self._installs.append(Install(place + 1, version.weights))
        self._touch(version)
        request.adapter_slot = self._slots.index(version) + 1

    def take_installs(self) -> tuple[Install, ...]:
        """Those that came due since the last call, in order: a slot that came due twice holds the later one."""
        taken, self._installs = tuple(self._installs), []
        return taken

    def audit(self, alive: Iterable[Request], running: Sequence[Request]) -> None:
        """Errors: LeakError when users or slots do not add up with the requests."""
        counts: dict[int, int] = {}
        versions = {id(v): v for v in (*self._by_name.values(), *self._slots) if v is not None}
        for request in alive:
            if request.adapter is not None:
                versions[id(request.adapter)] = request.adapter
                counts[id(request.adapter)] = counts.get(id(request.adapter), 0) + 1
        for key, version in versions.items():
            if version.num_users != counts.get(key, 0):
                raise LeakError(
                    f"adapter {version.namespace} counts {version.num_users} users, there are {counts.get(key, 0)}"
                )
        for request in running:
            slot = request.adapter_slot
            if (request.adapter is not None or slot) and self._slots[slot - 1] is not request.adapter:
                raise LeakError(f"request {request.name} runs with adapter slot {slot}, which is not its adapter's")

    # ---- helpers -------------------------------------------------------------------------------------------------
    def _held(self, running: Iterable[Request]) -> set[AdapterVersion]:
        return {request.adapter for request in running if request.adapter is not None}

    def _retire(self, version: AdapterVersion) -> None:
        version.is_retired = True
        self._settle(version)

    def _settle(self, version: AdapterVersion) -> None:
        """A version that is gone leaves slot and host memory."""
        if version.is_gone:
            version.weights = None
            self._slots = [None if one is version else one for one in self._slots]

    def _limit_host(self) -> None:
        here = [v for v in self._by_name.values() if v.weights is not None]
        idle = sorted((v for v in here if not v.num_users), key=lambda v: v.last_used)
        for version in idle[: max(0, len(here) - self._max_loaded)] if self._max_loaded else ():
            version.weights = None

    def _touch(self, version: AdapterVersion) -> None:
        self._clock += 1
        version.last_used = self._clock

    def _known(self) -> str:
        return f"loaded are {', '.join(sorted(self._by_name))}" if self._by_name else "none is loaded"


def check_name(name: str) -> None:
    """Errors: RequestError for a name that `model: base:adapter` could not select."""
    if not name or len(name) > 256 or ":" in name or name != name.strip() or not name.isprintable():
        raise RequestError(
            f"{name[:40]!r} is no name for an adapter: 1 to 256 printable characters without ':'", param="lora_name"
        )


def parse_modules(modules: Sequence[str]) -> list[tuple[str, str]]:
    """NAME=PATH pairs. Errors: ConfigError."""
    pairs = []
    for text in modules:
        name, separator, path = text.partition("=")
        if not separator or not path:
            raise ConfigError(f"--lora-modules {text!r}: write NAME=PATH")
        check_name(name)
        pairs.append((name, path))
    if len({name for name, _ in pairs}) < len(pairs):
        raise ConfigError("--lora-modules gives a name twice")
    return pairs
