"""Build the data folder of the tiny model: vocabulary, corpora, pictures, manifest.

In: installed packages and WordNet's files. Out: a folder that `baltoro train` reads. Deterministic for the same
packages, whatever the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import numpy as np

from baltoro.chat.tokenizer import Tokenizer
from baltoro.trainer.corpus import CorpusEntry, Manifest, Source, Split, write_corpus, write_manifest
from baltoro.trainer.pictures import write_pictures
from scripts.data.tiny import families, ink, jobs, packages, vocabulary, wordnet
from scripts.data.tiny.draw import Ink, draw, unpack_recipes
from scripts.data.tiny.exchange import is_held_out
from scripts.data.tiny.jobs import Part, Workshop

BUILDER = "python -m scripts.data.tiny"
HELD_OUT_TEXTS = 0.025
NUM_EVAL = 300  # dialogues of each family
SMALL = 100  # a small build has one in so many
GROUP = 8  # entries of the dictionary in one document

Texts = dict[tuple[str, Split], list[str]]
Tick = Callable[[int, int, str], None]


def build(
    folder: Path, wordnet_folder: Path, *, is_small: bool, processes: int, tick: Tick, vocabulary_of: Path | None = None
) -> Manifest:
    """Everything; `tick(done, total, what)` is called after each job. `vocabulary_of`: a model folder whose vocabulary
    is taken instead of learning one, for data that this model goes on with."""
    folder.mkdir(parents=True, exist_ok=True)
    context = families.load_context(wordnet_folder)
    texts, sources = load_texts(wordnet_folder, SMALL if is_small else 1)
    tick(0, 1, "vocabulary")
    if vocabulary_of is not None:
        tokenizer = Tokenizer.load(vocabulary_of)
        tokenizer.save(folder)
    else:
        tokenizer = vocabulary.learn(context, texts, folder, size=2048 if is_small else vocabulary.SIZE)
    workshop = Workshop(context, tokenizer, texts)
    todo = workshop.jobs(counts(texts, is_small))
    sources |= {name: dialogue_sources(name, wordnet_folder) for name in families.FAMILIES}
    stock, _, _ = ink.load_ink()
    stock.save(folder / "ink.npz")
    entries = []
    parts = _ticked(jobs.run(workshop, todo, processes), len(todo), tick)
    for (name, split), group in groupby(parts, key=lambda part: (part.job.name, part.job.split)):
        entries.append(write_parts(folder, name, split, list(group), tokenizer, stock, sources[name]))
    manifest = Manifest(vocab_size=tokenizer.vocab_size, corpora=tuple(entries), builder=BUILDER)
    write_manifest(folder, manifest)
    return manifest


def load_texts(wordnet_folder: Path, thin: int = 1) -> tuple[Texts, dict[str, list[Source]]]:
    """(texts by corpus and split, sources by corpus); one text in `thin` is kept."""
    named: dict[str, tuple[Sequence[tuple[str, str]], Source]] = {
        "python_docs": packages.python_docs(),
        "postgres_docs": packages.postgres_docs(),
        "code": packages.library_code(),
        "dictionary": (_dictionary(wordnet_folder), wordnet.source(wordnet_folder)),
    }
    texts: Texts = {}
    for name, (documents, _) in named.items():
        for split in _splits():
            mine = [t for n, t in documents if is_held_out(name, n, HELD_OUT_TEXTS) == (split == "eval")]
            texts[name, split] = mine[::thin] if split == "train" else mine[: max(1, len(mine) // thin)]
    return texts, {name: [source] for name, (_, source) in named.items()}


def counts(texts: Texts, is_small: bool) -> dict[tuple[str, Split], int]:
    """Documents of each corpus and split."""
    found = {key: len(value) for key, value in texts.items()}
    for name, family in families.FAMILIES.items():
        found[name, "train"] = family.count // (SMALL if is_small else 1)
        found[name, "eval"] = NUM_EVAL // (10 if is_small else 1)
    return found


def dialogue_sources(name: str, wordnet_folder: Path) -> list[Source]:
    """What a family is made of: this package's own code, and what it draws from."""
    digest = hashlib.sha256()
    code = sorted(Path(__file__).parent.glob("*.py"))
    for path in code:
        digest.update(path.read_bytes())
    own = Source(
        package=f"scripts/data/tiny ({name})", version="1", licence="Apache-2.0", sha256=digest.hexdigest(), documents=0
    )
    found = [own]
    if name == "gym":
        found.append(_gym_source())
    elif name in ("digits", "printed"):
        found += ink.load_ink()[2]
    if name not in ("gym", "arithmetic", "digits"):
        found.append(wordnet.source(wordnet_folder))
    return found


def _gym_source() -> Source:
    import reasoning_gym

    root = Path(reasoning_gym.__file__).parent
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(root.rglob("*.py")))).hexdigest()
    return Source(
        package="reasoning-gym", version=version("reasoning-gym"), licence="Apache-2.0", sha256=digest, documents=0
    )


def _dictionary(folder: Path) -> list[tuple[str, str]]:
    """Entries in the order of their hashes, a few to a document."""
    entries = list(wordnet.texts(wordnet.load(folder)))
    groups = [entries[i : i + GROUP] for i in range(0, len(entries), GROUP)]
    return [(group[0][0], "\n".join(text for _, text in group)) for group in groups]


def write_parts(
    folder: Path,
    name: str,
    split: Split,
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    stock: Ink,
    sources: list[Source],
) -> CorpusEntry:
    """The files of one corpus and split; pictures are drawn."""
    documents = (document for part in parts for document in part.documents())
    is_text = not any(len(part.weights) for part in parts)
    entry = write_corpus(
        folder, name, split, documents, vocab_size=tokenizer.vocab_size, is_divisible=is_text, sources=sources
    )
    rows = np.concatenate([part.pictures for part in parts])
    if len(rows):
        np.save(folder / f"{name}.{split}.recipes.npy", rows)
        pixels = np.stack([draw(picture, stock) for picture in unpack_recipes(rows)])
        write_pictures(folder, name, split, pixels, [n for part in parts for n in part.shown])
    return entry


def _splits() -> tuple[Split, Split]:
    return "train", "eval"


def _ticked(parts: Iterable[Part], total: int, tick: Tick) -> Iterator[Part]:
    for done, part in enumerate(parts, start=1):
        tick(done, total, f"{part.job.name} {part.job.split}")
        yield part
