"""A handful of words in WordNet's file format, and the context that the tiny model's families draw from."""

# ruff: noqa: SIM905 (lists of words)

from __future__ import annotations

from pathlib import Path

from scripts.data.tiny import pools, questions, wordnet
from scripts.data.tiny.families import Context

KINDS = {"animal": "dog horse bird snake sheep goat duck mouse lion tiger wolf bear".split()}
KINDS["tool"] = "hammer saw drill knife spade brush needle wrench".split()
KINDS["plant"] = "tree rose grass moss fern daisy lily oak pine cactus".split()
CITIES = "Oslo Paris Quito Lima Bern Cairo Delhi Tunis Turin Basel Leeds Malmo Bergen Kyoto Osaka Porto".split()
PEOPLE = "Bach Berg Britten Chopin Haydn Holst Liszt Mahler Mozart Verdi Wagner Weber".split()
VERBS = "run walk sing read write paint cook sell find carry".split()
ADJECTIVES = "small large green quiet early narrow gentle famous honest modern".split()
COUNTRIES = "Norway France Peru Egypt India Japan".split()


def write_wordnet(folder: Path) -> Path:
    """data.* and index.sense, with a gloss for each word."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {"noun": [], "verb": [], "adj": [], "adv": []}
    index: list[str] = []

    def add(file: str, part: str, number: int, word: str, gloss: str, links: str = "000") -> int:
        offset = 1000 + len(index)
        lines[file].append(f"{offset:08d} 03 {part} 01 {word} 0 {links} | {gloss}  ")
        index.append(f"{word.lower()}%{number}:03:00:: {offset:08d} 1 9")
        return offset

    def named(words: list[str], above: int, sign: str, what: str) -> None:
        for word in words:
            add(
                "noun",
                "n",
                1,
                word,
                f'{what} that people call {word.lower()}; "we saw {word} there"',
                _link(sign, above),
            )

    thing = add("noun", "n", 1, "thing", "an object of any sort")
    for kind, words in KINDS.items():
        named(words, add("noun", "n", 1, kind, f"a sort of {kind}", _link("@", thing)), "@", f"some {kind}")
    named(CITIES, add("noun", "n", 1, "city", "a large town", _link("@", thing)), "@i", "a city")
    named(PEOPLE, add("noun", "n", 1, "composer", "someone who writes music", _link("@", thing)), "@i", "a composer")
    named(COUNTRIES, add("noun", "n", 1, "country", "a state with land", _link("@", thing)), "@i", "a country")
    for word in VERBS:
        add("verb", "v", 2, word, f"to {word} something")
    for word in ADJECTIVES:
        add("adj", "a", 3, word, f"being {word}")
    add("adv", "r", 4, "often", "many times")
    for file, found in lines.items():
        (folder / f"data.{file}").write_text("  1 licence\n" + "\n".join(found) + "\n")
    (folder / "index.sense").write_text("\n".join(index) + "\n")
    return folder


def context(folder: Path) -> Context:
    """What the families need, without the packages' documentation."""
    net = wordnet.load(write_wordnet(folder))
    modules = [
        ("json", "Encode and decode JSON"),
        ("heapq", "Heap queue algorithm"),
        ("cmd", "Build line-oriented shells"),
    ]
    facts = questions.facts(net, modules, [("VACUUM", "garbage-collect a database")])
    return Context(net, pools.load(net), facts, [i % 10 for i in range(60)])


def _link(sign: str, offset: int) -> str:
    return f"001 {sign} {offset:08d} n 0000"
