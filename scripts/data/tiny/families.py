"""All families of the tiny model's data by corpus: how many dialogues, and the stream they come from.

In: Context (WordNet, pools, facts, labels), a split, a seed. Out: an endless stream of dialogues for each corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from scripts.data.tiny import (
    arithmetic,
    gym,
    letters,
    packages,
    pictures,
    pools,
    problems,
    questions,
    reading,
    schemas,
    talk,
    tools,
    wordnet,
)
from scripts.data.tiny.exchange import HARD_MODES, PICTURE_MODES, Dialogue, Exchange, Split, grouped
from scripts.data.tiny.ink import load_ink
from scripts.data.tiny.questions import Fact


@dataclass(frozen=True)
class Context:
    """What the families draw from; made once in each process."""

    net: wordnet.WordNet
    pools: pools.Pools
    facts: Sequence[Fact]
    labels: Sequence[int]


def load_context(wordnet_folder: Path) -> Context:
    """Errors: ConfigError says what to install."""
    net = wordnet.load(wordnet_folder)
    docs, _ = packages.python_docs()
    manual, _ = packages.postgres_docs()
    facts = questions.facts(net, list(packages.synopses(docs)), list(packages.commands(manual)))
    _, labels, _ = load_ink()
    return Context(net, pools.load(net), facts, labels.tolist())


Stream = Callable[[Context, Random, Split], Iterator[Dialogue]]


@dataclass(frozen=True)
class Family:
    """`count`: dialogues of the full corpus."""

    count: int
    stream: Stream


def fillers(context: Context, rng: Random, split: Split) -> Iterator[Exchange]:
    """Questions that need no tool."""
    streams = [
        questions.exchanges(context.facts, Random(rng.random()), split),
        letters.exchanges(context.pools, Random(rng.random()), split),
        reading.exchanges(context.pools, Random(rng.random()), split),
        questions.exchanges(context.facts, Random(rng.random()), split),
    ]
    while True:
        yield next(rng.choice(streams))


def mixed(context: Context, rng: Random, split: Split) -> Iterator[Exchange]:
    """Small talk among questions of all sorts."""
    streams = [
        talk.exchanges(context.pools, Random(rng.random()), split),
        talk.exchanges(context.pools, Random(rng.random()), split),
        questions.exchanges(context.facts, Random(rng.random()), split),
        arithmetic.exchanges(Random(rng.random()), split),
        letters.exchanges(context.pools, Random(rng.random()), split),
        problems.exchanges(context.pools, Random(rng.random()), split),
    ]
    while True:
        yield next(rng.choice(streams))


def _alone(exchanges: Callable[[Context, Random, Split], Iterator[Exchange]], *turns: int) -> Stream:
    def stream(context: Context, rng: Random, split: Split) -> Iterator[Dialogue]:
        return grouped(exchanges(context, rng, split), rng, turns or (1,))

    return stream


def _pictures(exchanges: Callable[[Context, Random, Split], Iterator[Exchange]]) -> Stream:
    """Several pictures in most dialogues: the part of a prompt that is always the same is long beside a picture."""

    def stream(context: Context, rng: Random, split: Split) -> Iterator[Dialogue]:
        return grouped(exchanges(context, rng, split), rng, (1, 1, 2, 3, 4), PICTURE_MODES)

    return stream


FAMILIES: Mapping[str, Family] = {
    "arithmetic": Family(60_000, _alone(lambda c, r, s: arithmetic.exchanges(r, s), 1, 1, 1, 2, 3)),
    "problems": Family(25_000, _alone(lambda c, r, s: problems.exchanges(c.pools, r, s), 1, 1, 2)),
    "gym": Family(80_000, lambda c, r, s: grouped(gym.exchanges(r, s), r, (1,), HARD_MODES)),
    "letters": Family(25_000, _alone(lambda c, r, s: letters.exchanges(c.pools, r, s), 1, 2, 3)),
    "tools": Family(40_000, lambda c, r, s: tools.dialogues(c.pools, fillers(c, r, s), r, s)),
    "schemas": Family(18_000, lambda c, r, s: schemas.dialogues(c.pools, r, s)),
    "questions": Family(20_000, _alone(lambda c, r, s: questions.exchanges(c.facts, r, s), 1, 2, 3)),
    "reading": Family(18_000, _alone(lambda c, r, s: reading.exchanges(c.pools, r, s))),
    "talk": Family(10_000, _alone(mixed, 1, 2, 3, 4)),
    "digits": Family(24_000, _pictures(lambda c, r, s: pictures.digits(c.labels, r, s))),
    "printed": Family(14_000, _pictures(lambda c, r, s: pictures.texts(c.pools.lists["noun"], r, s))),
}
