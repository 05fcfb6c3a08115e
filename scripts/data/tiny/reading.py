"""Short texts of made-up facts, with questions that the text answers.

In: names and things. Out: exchanges. A text is held out by its people: names come from the split's own part of the pool.
"""

# ruff: noqa: E501 (tables, one entry a line)

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from scripts.data.tiny.exchange import Exchange, Split
from scripts.data.tiny.pools import Pools

# attribute -> (pool, sentences, questions, answers in words)
ATTRIBUTES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    "city": ("city", ("{N} lives in {x}.", "{N} comes from {x}.", "The home of {N} is {x}."), ("Where does {N} live?", "In which city does {N} live?", "Which city does {N} come from?"), "{N} lives in {x}."),
    "job": ("job", ("{N} works as a {x}.", "{N} is a {x}.", "The job of {N} is {x}."), ("What is the job of {N}?", "What does {N} do for a living?", "What does {N} work as?"), "{N} is a {x}."),
    "pet": ("animal", ("{N} has a {x}.", "{N} owns a {x}.", "The pet of {N} is a {x}."), ("Which animal does {N} have?", "What pet does {N} own?", "What kind of pet does {N} have?"), "{N} has a {x}."),
    "hobby": ("hobby", ("{N} likes {x}.", "{N} loves {x}.", "In the evening {N} enjoys {x}."), ("What does {N} like?", "What is the hobby of {N}?", "What does {N} enjoy?"), "{N} likes {x}."),
    "food": ("food", ("The favourite food of {N} is {x}.", "{N} eats {x} every week."), ("What is the favourite food of {N}?", "What does {N} like to eat?"), "{N} likes to eat {x}."),
    "colour": ("colour", ("The car of {N} is {x}.", "{N} has a {x} car."), ("What colour is the car of {N}?", "Which colour does the car of {N} have?"), "The car of {N} is {x}."),
    "age": ("", ("{N} is {x} years old.", "{N} turned {x} this year."), ("How old is {N}?", "What is the age of {N}?"), "{N} is {x} years old."),
    "friend": ("first", ("The best friend of {N} is {x}.", "{N} often meets {x}."), ("Who is the best friend of {N}?", "Who does {N} often meet?"), "It is {x}."),
    "day": ("day", ("{N} travels on {x}.", "The free day of {N} is {x}."), ("On which day does {N} travel?", "When is {N} free?"), "It is {x}."),
}  # fmt: skip
LEADS = (
    "Read this: {text}\n{question}",
    "{text}\n\n{question}",
    "{text} {question}",
    "Text: {text}\nQuestion: {question}",
)


def exchanges(pools: Pools, rng: Random, split: Split) -> Iterator[Exchange]:
    """Without end. One or two people, two to four facts about each; one in ten questions is not answered by the text."""
    while True:
        people: list[str] = []
        while len(people) < rng.choice((1, 2, 2)):
            name = pools.pick(rng, "first", split)
            if name not in people:
                people.append(name)
        told: list[tuple[str, str, str, str]] = []
        for person in people:
            for attribute in rng.sample(sorted(ATTRIBUTES), rng.randint(2, 4)):
                told.append(_tell(pools, rng, split, person, attribute))
        rng.shuffle(told)
        yield _ask(rng, people, told)


def _tell(pools: Pools, rng: Random, split: Split, person: str, attribute: str) -> tuple[str, str, str, str]:
    """(person, attribute, value, sentence)."""
    pool, sentences, _, _ = ATTRIBUTES[attribute]
    value = pools.pick(rng, pool, split) if pool else str(rng.randint(5, 90))
    sentence = rng.choice(sentences).format(N=person, x=value)
    for vowel in "aeiou":
        sentence = sentence.replace(f" a {vowel}", f" an {vowel}")
    return person, attribute, value, sentence


def _ask(rng: Random, people: list[str], told: list[tuple[str, str, str, str]]) -> Exchange:
    text = " ".join(sentence for *_, sentence in told)
    known = {(person, attribute) for person, attribute, *_ in told}
    missing = [(p, a) for p in people for a in sorted(ATTRIBUTES) if (p, a) not in known]
    if rng.random() < 0.1:
        person, attribute = rng.choice(missing)
        question = rng.choice(ATTRIBUTES[attribute][2]).format(N=person)
        levels = {"low": "The text does not say it.", "high": f"{question} The text does not say it."}
        answer, gold = "The text does not say.", ["not say"]
    else:
        person, attribute, value, sentence = rng.choice(told)
        _, _, questions, said = ATTRIBUTES[attribute]
        question = rng.choice(questions).format(N=person)
        answer = said.format(N=person, x=value)
        for vowel in "aeiou":
            answer = answer.replace(f" a {vowel}", f" an {vowel}")
        levels = {
            "low": value,
            "high": f"The text says: {sentence}",
            "max": f"{question} The text says: {sentence} So: {value}.",
        }
        gold = [value.lower()]
    prompt = rng.choice(LEADS).format(text=text, question=question)
    return Exchange(prompt, answer, levels, {"kind": "has", "gold": gold})
