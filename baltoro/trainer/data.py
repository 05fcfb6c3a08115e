"""The order in which corpora are read: deterministic, and resumable from a cursor that a checkpoint can hold.

In: opened corpora, a seed. Out: TrainSample after TrainSample.
How: a divisible document is cut into units of `unit_tokens` (the longest piece of any stage), an indivisible one is a
unit by itself; units are visited in a permutation drawn anew for each epoch from (seed, corpus, epoch). A stage with
shorter pieces takes several from a unit, so a length curriculum neither repeats nor skips text.
The mixture gives the next turn to the corpus that lags most behind its share of tokens; no random number is involved.
Invariants: same seed, stages and cursor: same samples. Only `take` moves the cursor.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baltoro.errors import ConfigError
from baltoro.trainer.config import StageConfig
from baltoro.trainer.corpus import Corpus, Split, open_corpus, read_manifest
from baltoro.trainer.pictures import Pictures, open_pictures
from baltoro.trainer.sample import TrainSample

# A shorter rest of a batch is left empty rather than filled with a piece of prose that has almost no context.
SHORTEST_PIECE = 16


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a reader stands: epoch, unit within the epoch's order, tokens of that unit already taken."""

    epoch: int = 0
    unit: int = 0
    taken: int = 0


class Reader:
    """One corpus in its order. Single writer of `cursor`: `take` and `Mixture.load_state`."""

    def __init__(self, corpus: Corpus, *, unit_tokens: int, seed: int, pictures: Pictures | None = None) -> None:
        if pictures is not None and corpus.entry.is_divisible:
            raise ConfigError(f"corpus {corpus.entry.name} has pictures, so its documents may not be cut")
        self.corpus = corpus
        self.pictures = pictures
        self.cursor = Cursor()
        self._seed = seed
        self._documents, self._starts, self._lengths = _units(corpus, unit_tokens)
        self._order_epoch = -1
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)

    def take(self, max_length: int, room: int) -> TrainSample | None:
        """The next piece, of at most `max_length` (prose) and `room` tokens; None if it does not fit into `room`."""
        cursor = self.cursor
        unit = int(self._epoch_order()[cursor.unit])
        rest = int(self._lengths[unit]) - cursor.taken
        if self.corpus.entry.is_divisible:
            length = min(rest, max_length, room)
            if length < min(rest, max_length, SHORTEST_PIECE):
                return None
        else:
            length = rest
            if length > room:
                return None
        start = int(self._starts[unit]) + cursor.taken
        document = int(self._documents[unit])
        sample = _cut(self.corpus, document, start, length)
        if self.pictures is not None:
            sample = replace(sample, pictures=self.pictures.of(document))
        self.cursor = self._after(length, rest)
        return sample

    def _after(self, length: int, rest: int) -> Cursor:
        cursor = self.cursor
        if length < rest:
            return Cursor(cursor.epoch, cursor.unit, cursor.taken + length)
        if cursor.unit + 1 < len(self._lengths):
            return Cursor(cursor.epoch, cursor.unit + 1, 0)
        return Cursor(cursor.epoch + 1, 0, 0)

    def _epoch_order(self) -> NDArray[np.int64]:
        if self._order_epoch != self.cursor.epoch:
            key = [self._seed, zlib.crc32(self.corpus.entry.name.encode()), self.cursor.epoch]
            self._order = np.random.default_rng(key).permutation(len(self._lengths))
            self._order_epoch = self.cursor.epoch
        return self._order


class Mixture:
    """Several readers, each given its share of tokens. Single writer of `credits`: `take` and `load_state`."""

    def __init__(self, readers: dict[str, Reader]) -> None:
        self.readers = readers
        self.credits = dict.fromkeys(readers, 0.0)

    @staticmethod
    def open(folder: Path, split: Split, names: set[str], *, unit_tokens: int, seed: int) -> Mixture:
        """Readers for the corpora `names` of a data folder."""
        manifest = read_manifest(folder)
        readers = {}
        for name in sorted(names):
            corpus = open_corpus(folder, manifest.entry(name, split))
            pictures = open_pictures(folder, name, split)
            readers[name] = Reader(corpus, unit_tokens=unit_tokens, seed=seed, pictures=pictures)
        return Mixture(readers)

    def take(self, stage: StageConfig, room: int) -> TrainSample | None:
        """The next sample of the corpus that lags most; None if it does not fit into `room`."""
        total = sum(stage.mix.values())
        due = max(sorted(stage.mix), key=lambda name: (self.credits[name], stage.mix[name]))
        sample = self.readers[due].take(stage.max_length, room)
        if sample is None:
            return None
        for name, share in stage.mix.items():
            self.credits[name] += share / total * len(sample)
        self.credits[due] -= len(sample)
        return sample

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        cursors = {n: [r.cursor.epoch, r.cursor.unit, r.cursor.taken] for n, r in self.readers.items()}
        return {"cursors": cursors, "credits": dict(self.credits)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state()`. Errors: ConfigError where the corpora are others."""
        if set(state["cursors"]) != set(self.readers):
            raise ConfigError(f"checkpoint read the corpora {sorted(state['cursors'])}, not {sorted(self.readers)}")
        for name, (epoch, unit, taken) in state["cursors"].items():
            self.readers[name].cursor = Cursor(epoch, unit, taken)
        self.credits = dict(state["credits"])


def _units(corpus: Corpus, unit_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(document, start, length) of every unit; a document of n tokens has n - 1 inputs, its last token is a target."""
    inputs = corpus.lengths - 1
    if not corpus.entry.is_divisible:
        return np.arange(len(inputs)), np.zeros_like(inputs), inputs
    counts = -(-inputs // unit_tokens)
    documents = np.repeat(np.arange(len(inputs)), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(documents)) - firsts) * unit_tokens
    return documents, starts, np.minimum(inputs[documents] - starts, unit_tokens)


def _cut(corpus: Corpus, document: int, start: int, length: int) -> TrainSample:
    first = int(corpus.offsets[document]) + start
    ids = torch.from_numpy(corpus.tokens[first : first + length + 1].astype(np.int64))
    weights = torch.ones(length)
    if corpus.weights is not None:
        weights = torch.from_numpy(corpus.weights[first + 1 : first + length + 1].astype(np.float32))
    return TrainSample(ids[:-1], ids[1:], weights, corpus.entry.name)
