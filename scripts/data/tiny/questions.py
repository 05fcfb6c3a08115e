"""Questions about the texts: words of WordNet, modules of Python, commands of PostgreSQL.

In: facts. Out: exchanges. Two ways to be held out: a wording (the fact is asked about in training, in other words), or,
for the family `unseen`, the fact itself (the texts tell it, no dialogue does).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from scripts.data.tiny.exchange import Exchange, Split, is_held_out
from scripts.data.tiny.wordnet import WordNet, article

NUM_WORDS = {"n": 1600, "v": 300, "a": 300}  # common words asked about
LONGEST = 90  # characters of a meaning worth learning by heart

MEANS = (
    "What does {x} mean?", "What is the meaning of {x}?", "Define {x}.", "What does the word {x} mean?",
    "Give me the definition of {x}.", "Explain the word {x}.", 'What does "{x}" mean?', "Tell me what {x} means.",
)  # fmt: skip
KINDS = (
    "What kind of thing is {an_x}?", "What is {an_x}?", "What sort of thing is {an_x}?", "{An_x} is a kind of what?",
    "What type of thing is {an_x}?", "Tell me what kind of thing {an_x} is.",
)  # fmt: skip
MODULES = (
    "What does the Python module {x} do?", "What is the module {x} for?", "What is {x} in Python?",
    "What does {x} do in Python?", "Describe the Python module {x}.", "What is the Python module {x}?",
)  # fmt: skip
COMMANDS = (
    "What does the SQL command {x} do?", "What does {x} do in PostgreSQL?", "What is {x} for in SQL?",
    "Describe the command {x}.", "What is the PostgreSQL command {x} for?",
)  # fmt: skip
OTHER_WORDS = (
    "What is another word for {x}?", "Give me a synonym of {x}.", "Which word means the same as {x}?",
    "Name a synonym for {x}.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that can be asked in several wordings."""

    family: str
    about: str
    wordings: Sequence[str]
    answer: str
    thought: str
    kind: str  # of check: overlap of words, or one of several accepted words
    gold: Sequence[str]


def facts(net: WordNet, synopses: Sequence[tuple[str, str]], commands: Sequence[tuple[str, str]]) -> list[Fact]:
    """All of them, in a fixed order."""
    found = _word_facts(net)
    for module, purpose in synopses:
        answer = f"{module}: {purpose[:1].lower() + purpose[1:] if purpose[1:2].islower() else purpose}."
        found.append(Fact("modules", module, MODULES, answer, f"{module} is a Python module.", "overlap", [purpose]))
    for command, purpose in commands:
        answer = f"{command}: {purpose}."
        found.append(Fact("commands", command, COMMANDS, answer, f"{command} is an SQL command.", "overlap", [purpose]))
    return found


def _word_facts(net: WordNet) -> list[Fact]:
    found = []
    for part, count in NUM_WORDS.items():
        for sense in net.common(part)[:count]:
            word = sense.words[0]
            if len(sense.meaning) <= LONGEST:
                answer = f"{word}: {sense.meaning}."
                thought = f"{word} is a word of the dictionary."
                found.append(Fact("meanings", word, MEANS, answer, thought, "overlap", [sense.meaning]))
            others = [w for w in sense.words[1:] if w.isalpha()]
            if others:
                answer, thought = others[0], f"{word} and {others[0]} mean the same."
                found.append(Fact("synonyms", word, OTHER_WORDS, answer, thought, "one_of", others))
            above = net.kind_of(sense)
            if part == "n" and above is not None:
                names = sorted({w.lower() for s in net.kinds_of(sense)[:4] for w in s.words})
                answer = f"{article(word).capitalize()} is a kind of {above.words[0]}."
                found.append(Fact("kinds", word, KINDS, answer, f"{word} belongs to {above.words[0]}.", "has", names))
    return found


def exchanges(known: Sequence[Fact], rng: Random, split: Split) -> Iterator[Exchange]:
    """Without end. Training: facts that are not unseen, in wordings that are not held out; evaluation: the others."""
    while True:
        fact = rng.choice(known)
        wording = rng.choice(fact.wordings)
        if not is_unseen(fact) and wording_is_held_out(fact, wording) == (split == "eval"):
            yield ask(fact, wording)


def unseen(known: Sequence[Fact], rng: Random) -> Iterator[Exchange]:
    """Facts that no dialogue tells."""
    mine = [fact for fact in known if is_unseen(fact)]
    while True:
        fact = rng.choice(mine)
        yield ask(fact, rng.choice(fact.wordings))


def is_unseen(fact: Fact) -> bool:
    return is_held_out("fact", f"{fact.family} {fact.about}", 0.08)


def wording_is_held_out(fact: Fact, wording: str) -> bool:
    return is_held_out("wording", f"{fact.family} {fact.about} {wording}", 0.2)


def ask(fact: Fact, wording: str) -> Exchange:
    named = article(fact.about)
    question = wording.format(x=fact.about, an_x=named, An_x=named[:1].upper() + named[1:])
    levels = {"low": fact.thought, "high": f"They ask about {fact.about}. {fact.thought}"}
    levels["max"] = f"{levels['high']} I say it in few words."
    return Exchange(question, fact.answer, levels, {"kind": fact.kind, "gold": list(fact.gold)})
