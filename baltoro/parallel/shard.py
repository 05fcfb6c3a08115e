"""Ownership rules: which part of a tensor, which positions and which layers a rank holds. No torch, only arithmetic.

In: a rule word, a shape, the size of the axis and a coordinate on it. Out: slices.
Invariants: over all ranks of the axis the owned parts cover everything; they are disjoint unless the rule is
"replicated". Heads and experts are never cut.
Source: spec/serving.md (TP by head, experts whole, DCP by position mod n).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from baltoro.errors import ConfigError

# replicated  every rank holds all of it
# rows        dimension 0 (outputs of a weight, rows of a table), as even as it goes
# cols        dimension 1 (inputs of a weight), as even as it goes
# heads       dimension 0 in whole heads, the same number on every rank
# head_cols   dimension 1 in whole heads, the same number on every rank
# expert      dimension 0 in whole experts, as even as it goes
Rule = Literal["replicated", "rows", "cols", "heads", "head_cols", "expert"]
SPLIT_DIMENSION: dict[Rule, int] = {"rows": 0, "cols": 1, "heads": 0, "head_cols": 1, "expert": 0}


def owned_range(count: int, *, size: int, rank: int) -> range:
    """The contiguous part of `count` things that `rank` holds; the first `count % size` ranks hold one more."""
    base, rest = divmod(count, size)
    begin = rank * base + min(rank, rest)
    return range(begin, begin + base + (rank < rest))


def owned_heads(num_heads: int, *, size: int, rank: int) -> range:
    """The heads of `rank`. Errors: ConfigError if the ranks cannot hold equally many."""
    if num_heads % size:
        possible = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ConfigError(f"{num_heads} heads do not divide over {size} ranks; possible sizes: {possible}")
    return owned_range(num_heads, size=size, rank=rank)


def owned_slices(
    shape: Sequence[int], rule: Rule, *, num_heads: int | None = None, size: int, rank: int
) -> tuple[slice, ...]:
    """One slice per dimension: what `rank` holds of a tensor of `shape`. `num_heads` is needed by the head rules."""
    slices = [slice(0, length) for length in shape]
    if rule == "replicated":
        return tuple(slices)
    dimension = SPLIT_DIMENSION[rule]
    length = shape[dimension]
    if rule in ("heads", "head_cols"):
        if not num_heads or length % num_heads:
            raise ConfigError(f"dimension {dimension} of shape {list(shape)} is not made of {num_heads} equal heads")
        heads = owned_heads(num_heads, size=size, rank=rank)
        channels = length // num_heads
        slices[dimension] = slice(heads.start * channels, heads.stop * channels)
    else:
        part = owned_range(length, size=size, rank=rank)
        slices[dimension] = slice(part.start, part.stop)
    return tuple(slices)


def owned_shape(
    shape: Sequence[int], rule: Rule, *, num_heads: int | None = None, size: int, rank: int = 0
) -> tuple[int, ...]:
    """Shape of what `rank` holds; rank 0 holds the most."""
    return tuple(s.stop - s.start for s in owned_slices(shape, rule, num_heads=num_heads, size=size, rank=rank))


def expert_owner(expert: int, num_experts: int, *, size: int) -> int:
    """The rank that holds `expert`: the inverse of `owned_range`."""
    base, rest = divmod(num_experts, size)
    wide = rest * (base + 1)
    return expert // (base + 1) if expert < wide else rest + (expert - wide) // base


def position_owner(position: int, *, size: int) -> int:
    """The rank that holds the KV row of `position` under decode context parallelism."""
    return position % size


def num_owned_positions(length: int, *, size: int, rank: int) -> int:
    """How many of the positions 0..length-1 `rank` holds."""
    return (length - rank + size - 1) // size if length > rank else 0


def owned_layers(num_layers: int, *, size: int, rank: int) -> range:
    """The consecutive layers of one pipeline stage."""
    if size > num_layers:
        raise ConfigError(f"{num_layers} layers cannot fill {size} pipeline stages")
    return owned_range(num_layers, size=size, rank=rank)
