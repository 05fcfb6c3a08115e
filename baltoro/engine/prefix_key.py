"""What a prefix is found by: a namespace, and ids in which pictures can be told apart.

In: requests, versions of adapters, salts. Out: namespaces (bytes) and ids (`CacheHold.ids`).
Invariants: equal namespace and equal ids mean equal KV and states.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from baltoro.engine.request import MediaRun, Request


def carried_namespace(version: str, request: Request) -> bytes:
    """Of KV and states that several versions made, `version` the last: this request's alone."""
    return repr(("carried", version, request.arrival, request.index)).encode()


def namespace_of(adapter: str | None, salt: str, policy_version: int) -> bytes:
    """Prefixes are shared within an adapter version (`AdapterVersion.namespace`, never a bare name), a salt and a
    policy version only."""
    return repr((adapter, salt, policy_version)).encode()


def spell_known(request: Request) -> None:
    """Bring hold.ids up to the tokens known."""
    ids = request.hold.ids
    fresh = request.tokens[len(ids) :]
    if not ids:
        fresh = _spell(fresh, request.media)
    ids.extend(fresh)


def _spell(tokens: array[int], media: tuple[MediaRun, ...]) -> array[int]:
    """A copy of prompt ids in which every place of a picture has an id of its own, made from the picture's bytes."""
    ids = array("q", tokens)
    for run in media:
        picture = blake2b(run.item.pixels, digest_size=16, key=repr((run.item.grid, run.item.patch_size)).encode())
        for at in range(run.first, run.last):
            place = blake2b(picture.digest(), digest_size=8, key=(at - run.first).to_bytes(4, "little")).digest()
            ids[at] = -1 - (int.from_bytes(place, "little") >> 1)
    return ids
