"""JSON by schema: values from a text, put into the fields of a schema that the request brings along.

In: names and things. Out: dialogues with a response format, and the value that the answer must have. A tenth of
the texts is held out, and these draw their values from their own parts of the pools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from scripts.data.tiny.exchange import Dialogue, Exchange, Json, Split, is_mine, pick_mode, reply
from scripts.data.tiny.pools import Pools

# field -> (JSON schema, phrase); the value comes from `_value`
FIELDS: dict[str, tuple[Json, tuple[str, ...]]] = {
    "name": ({"type": "string"}, ("the name is {x}", "it is about {x}", "{x} is the name")),
    "city": ({"type": "string"}, ("from {x}", "in {x}", "the city is {x}")),
    "country": ({"type": "string"}, ("the country is {x}", "the country {x}")),
    "age": ({"type": "integer"}, ("{x} years old", "age {x}", "the age is {x}")),
    "job": ({"type": "string"}, ("works as a {x}", "job: {x}", "the job is {x}")),
    "colour": ({"type": "string"}, ("the colour is {x}", "colour {x}", "in {x}")),
    "price": ({"type": "number"}, ("costs {x} dollars", "the price is {x}", "price {x}")),
    "count": ({"type": "integer"}, ("{x} pieces", "the count is {x}", "{x} of them")),
    "day": ({"type": "string"}, ("on {x}", "the day is {x}")),
    "item": ({"type": "string"}, ("the item is a {x}", "item: {x}", "a {x}")),
    "email": ({"type": "string"}, ("email {x}", "the address is {x}", "write to {x}")),
    "code": ({"type": "string"}, ("code {x}", "the code is {x}")),
    "is_new": ({"type": "boolean"}, ("{new}", "it is {new}")),
    "is_open": ({"type": "boolean"}, ("{open}", "it is {open}")),
    "tags": ({"type": "array", "items": {"type": "string"}}, ("tags {list}", "the tags are {list}")),
    "scores": ({"type": "array", "items": {"type": "integer"}}, ("scores {list}", "the scores are {list}")),
    "size": ({"type": "string", "enum": ["small", "medium", "large"]}, ("{x} size", "the size is {x}")),
}
ASKS = (
    "Give the data as JSON: {text}.", "Extract the fields: {text}.", "{text}.", "Turn this into JSON: {text}.",
    "Fill in the schema. Text: {text}.", "Here is a note: {text}. Give it as JSON.", "Parse this: {text}.",
)  # fmt: skip


def items(pools: Pools, rng: Random, split: Split) -> Iterator[tuple[Exchange, Json]]:
    """(exchange, response format), without end. Fields are in the order of the alphabet, as K3 shows a schema."""
    while True:
        names = sorted(rng.sample(sorted(FIELDS), rng.choices((1, 2, 3, 4), (1, 4, 4, 2))[0]))
        values = {name: _value(pools, rng, split, name) for name in names}
        told = list(names)
        if rng.random() < 0.3:
            rng.shuffle(told)
        text = ", ".join(_phrase(rng, name, values[name]) for name in told)
        question = rng.choice(ASKS).format(text=text)
        if not is_mine(split, "schemas", text):
            continue
        lines = [f"{name}: {_written(value)}" for name, value in values.items()]
        levels = {
            "low": f"{len(names)} fields",
            "high": "\n".join(lines),
            "max": "\n".join([f"The fields are {', '.join(names)}.", *lines]),
        }
        check = {"kind": "json", "gold": values}
        wanted = response_format(names)
        if rng.random() < 0.12:  # without a schema, the text must name the fields
            question, wanted = f"Give {' and '.join(names)} as JSON: {text}.", {"type": "json_object"}
        yield Exchange(question, json.dumps(values, ensure_ascii=False), levels, check), wanted


def response_format(names: list[str]) -> Json:
    schema = {
        "type": "object",
        "properties": {name: FIELDS[name][0] for name in names},
        "required": names,
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def dialogues(pools: Pools, rng: Random, split: Split) -> Iterator[Dialogue]:
    """One request each."""
    for exchange, wanted in items(pools, rng, split):
        thinking, effort, level = pick_mode(rng)
        messages = [{"role": "user", "content": exchange.question}, reply(exchange, thinking, level)]
        yield Dialogue(messages=messages, thinking=thinking, effort=effort, response_format=wanted)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _phrase(rng: Random, name: str, value: Any) -> str:
    listed = ", ".join(map(str, value)) if isinstance(value, list) else ""
    return rng.choice(FIELDS[name][1]).format(
        x=value, list=listed, new="new" if value else "used", open="open" if value else "closed"
    )


def _value(pools: Pools, rng: Random, split: Split, name: str) -> Any:
    if name in ("city", "country", "job", "colour", "day"):
        return pools.pick(rng, name, split)
    draws: dict[str, Callable[[], Any]] = {
        "name": lambda: person(pools, rng, split),
        "age": lambda: rng.randint(1, 99),
        "price": lambda: price(rng),
        "count": lambda: rng.randint(1, rng.choice((9, 99, 999))),
        "item": lambda: pools.pick(rng, "noun", split),
        "email": lambda: email(pools, rng, split),
        "code": lambda: code(rng),
        "is_new": lambda: rng.random() < 0.5,
        "is_open": lambda: rng.random() < 0.5,
        "tags": lambda: [pools.pick(rng, rng.choice(("noun", "adjective")), split) for _ in range(rng.randint(2, 3))],
        "scores": lambda: [rng.randint(0, 99) for _ in range(rng.randint(2, 4))],
        "size": lambda: rng.choice(("small", "medium", "large")),
    }
    return draws[name]()


def person(pools: Pools, rng: Random, split: Split) -> str:
    first = pools.pick(rng, "first", split)
    return first if rng.random() < 0.4 else f"{first} {pools.pick(rng, 'last', split)}"


def email(pools: Pools, rng: Random, split: Split) -> str:
    ending = rng.choice(("org", "com", "net"))
    return f"{pools.pick(rng, 'first', split).lower()}@{pools.pick(rng, 'noun', split)}.{ending}"


def price(rng: Random) -> float:
    """Two decimals, never a whole number, so that its JSON is what the text says."""
    return round(
        rng.randint(0, rng.choice((9, 99, 999))) + rng.choice((rng.randint(1, 9) / 10, rng.randint(11, 99) / 100)), 2
    )


def code(rng: Random) -> str:
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    head = "".join(rng.choice(letters) for _ in range(rng.randint(1, 3)))
    return f"{head}{rng.choice(('-', '', ''))}{rng.randint(1, 10 ** rng.randint(1, 4))}"
