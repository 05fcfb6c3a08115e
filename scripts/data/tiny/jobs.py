"""The work of building, cut into jobs that processes can share: so many dialogues of a family, or a run of texts.

In: jobs. Out: parts: ids and weights of documents, recipes of their pictures. A job's result depends on the job alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baltoro.chat.tokenizer import Tokenizer
from baltoro.trainer.corpus import Document
from scripts.data.tiny import render
from scripts.data.tiny.draw import RECIPE, pack_recipes
from scripts.data.tiny.exchange import Split
from scripts.data.tiny.families import FAMILIES, Context

SHARD = 5000  # dialogues in one job
TEXTS = 400  # texts in one job


@dataclass(frozen=True, slots=True)
class Job:
    """Shard `shard` of a corpus: `count` dialogues, or texts from `count * shard` on."""

    name: str
    split: Split
    shard: int
    count: int


@dataclass(frozen=True, slots=True)
class Part:
    """Documents end to end. `weights` is empty for texts; `pictures` rows of RECIPE, `shown` pictures per document."""

    job: Job
    ids: NDArray[np.uint16]
    lengths: NDArray[np.int64]
    weights: NDArray[np.uint8]
    pictures: NDArray[np.void]
    shown: tuple[int, ...]

    def documents(self) -> Iterator[Document]:
        ends = np.cumsum(self.lengths)
        for end, length in zip(ends.tolist(), self.lengths.tolist(), strict=True):
            weights = self.weights[end - length : end].tolist() if len(self.weights) else None
            yield Document(self.ids[end - length : end].tolist(), weights)


@dataclass(frozen=True)
class Workshop:
    """What every job needs; handed to the processes by fork. `texts`: corpus and split -> texts."""

    context: Context
    tokenizer: Tokenizer
    texts: Mapping[tuple[str, Split], Sequence[str]]

    def jobs(self, counts: Mapping[tuple[str, Split], int]) -> list[Job]:
        """Jobs of all corpora, corpus by corpus, in order."""
        found = []
        for (name, split), count in counts.items():
            size = TEXTS if (name, split) in self.texts else SHARD
            for shard, start in enumerate(range(0, count, size)):
                found.append(Job(name, split, shard, min(size, count - start)))
        return found

    def do(self, job: Job) -> Part:
        documents: list[Document] = []
        pictures: list[Any] = []
        shown = []
        if (texts := self.texts.get((job.name, job.split))) is not None:
            mine = texts[job.shard * TEXTS :][: job.count]
            documents = [render.text_document(text, self.tokenizer) for text in mine]
        else:
            rng = Random(f"{job.name}/{job.split}/{job.shard}")
            for dialogue in islice(FAMILIES[job.name].stream(self.context, rng, job.split), job.count):
                documents.append(render.document(dialogue, self.tokenizer))
                pictures += dialogue.pictures
                shown.append(len(dialogue.pictures))
        return _part(job, documents, pack_recipes(pictures) if pictures else np.zeros(0, RECIPE), tuple(shown))


def run(workshop: Workshop, jobs: Sequence[Job], processes: int) -> Iterator[Part]:
    """Parts in the order of the jobs. Processes are forked, so that what is loaded is shared."""
    if processes <= 1:
        yield from map(workshop.do, jobs)
        return
    with get_context("fork").Pool(processes, _enter, (workshop,)) as pool:
        yield from pool.imap(_work, jobs)


_ENTERED: list[Workshop] = []


def _enter(workshop: Workshop) -> None:
    _ENTERED.append(workshop)


def _work(job: Job) -> Part:
    return _ENTERED[0].do(job)


def _part(job: Job, documents: Sequence[Document], pictures: NDArray[np.void], shown: tuple[int, ...]) -> Part:
    ids = [i for d in documents for i in d.ids]
    weights = [w for d in documents for w in d.weights or ()]
    lengths = np.array([len(d.ids) for d in documents], np.int64)
    return Part(job, np.array(ids, np.uint16), lengths, np.array(weights, np.uint8), pictures, shown)
