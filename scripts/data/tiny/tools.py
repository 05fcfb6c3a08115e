"""Tool-call dialogues: tools are declared, the user asks, the model calls with typed arguments, or answers without.

In: specs, names. Out: dialogues, and held-out requests with the calls they must lead to. Values are copied from the
user's text. A tenth of the requests is held out, and these draw their names from their own part of the pools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts.data.tiny import schemas
from scripts.data.tiny.exchange import Dialogue, Exchange, Json, Split, is_mine, pick_mode
from scripts.data.tiny.pools import Pools
from scripts.data.tiny.tool_specs import NOUNS, PARAMETERS, SPECS, VERBS, Spec
from scripts.data.tiny.wordnet import article

CURRENCIES = ("euros", "dollars", "yen", "pounds", "francs", "EUR", "USD", "JPY", "GBP", "CHF")
LANGUAGES = ("German", "French", "Spanish", "Italian", "Polish", "Dutch", "Greek", "Turkish", "Latin", "Finnish")
ENDINGS = ("txt", "py", "md", "csv", "json", "log", "png")


@dataclass(frozen=True)
class Request:
    """What the user says, what is declared, the calls it must lead to, and the specs and values behind them."""

    question: str
    tools: Sequence[Json]
    calls: Sequence[Json]
    spoken: Sequence[tuple[Spec, Json]]


def requests(pools: Pools, rng: Random, split: Split) -> Iterator[Request]:
    """Requests that need a call, without end: mostly one, at times two of the same tool."""
    while True:
        if rng.random() < 0.3:
            spec = made_up(rng)
            others = [made_up(rng) for _ in range(rng.randint(0, 2))]
        else:
            spec, *others = rng.sample(SPECS, rng.choices((1, 2, 3), (3, 4, 3))[0])
        spoken = [speak(spec, pools, rng, split)]
        if rng.random() < 0.1 and len(spec.takes) <= 2:
            spoken.append(speak(spec, pools, rng, split))
        declared = [declaration(s, rng) for s in [spec, *others]]
        if len({d["function"]["name"] for d in declared}) < len(declared):
            continue
        rng.shuffle(declared)
        question = " ".join(text for text, _ in spoken)
        if not is_mine(split, "tools", question):
            continue
        calls = [{"name": spec.name, "arguments": values} for _, values in spoken]
        yield Request(question, declared, calls, [(spec, values) for _, values in spoken])


def dialogues(pools: Pools, fillers: Iterator[Exchange], rng: Random, split: Split) -> Iterator[Dialogue]:
    """A call (and in half of the cases its result and the answer); one in six dialogues needs no tool.

    `tool_choice` is one-shot, so it comes with dialogues of one answer alone.
    """
    for request in requests(pools, rng, split):
        thinking, effort, level = pick_mode(rng)
        messages: list[Json] = []
        choice: str | None = None
        if rng.random() < 1 / 6:
            messages += _plain(next(fillers), thinking, level)
            choice = "none" if rng.random() < 0.2 else None
        else:
            messages += _called(request, thinking, level)
            if rng.random() < 0.5:
                messages += _answered(request, pools, rng, split, thinking)
                more = rng.random()
                if more < 0.15:
                    messages += _plain(next(fillers), thinking, level)
                elif more < 0.3:
                    messages += _called(again(request, pools, rng, split), thinking, level)
            elif rng.random() < 0.15:
                choice = "required"
        yield Dialogue(messages=messages, thinking=thinking, effort=effort, tools=request.tools, tool_choice=choice)


def again(request: Request, pools: Pools, rng: Random, split: Split) -> Request:
    """The same tool with other values."""
    spec = request.spoken[0][0]
    text, values = speak(spec, pools, rng, split)
    return Request(text, request.tools, [{"name": spec.name, "arguments": values}], [(spec, values)])


def declaration(spec: Spec, rng: Random) -> Json:
    """The tool as OpenAI's API declares it; what not every phrase says is optional. People leave parts out."""
    needed = [name for name in spec.takes if all(f"{{{name}}}" in phrase for phrase in spec.phrases)]
    properties = {name: dict(schema) for name, (schema, _) in spec.takes.items()}
    if rng.random() < 0.15:
        for name, schema in properties.items():
            schema["description"] = f"The {name.replace('_', ' ')}."
    parameters: Json = {"type": "object", "properties": properties}
    if rng.random() < 0.9:
        parameters["required"] = needed
    function: Json = {"name": spec.name, "parameters": parameters}
    if rng.random() < 0.9:
        function["description"] = spec.description
    return {"type": "function", "function": function}


def made_up(rng: Random) -> Spec:
    """A tool that no list holds, with one to three parameters."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    names = rng.sample(sorted(PARAMETERS), rng.randint(1, 3))
    listed = (" and " if len(names) == 2 else ", ").join(f"{name.replace('_', ' ')} {{{name}}}" for name in names)
    phrases = (
        f"{verb.capitalize()} the {noun} with {listed}.",
        f"Please {verb} a {noun}: {listed}.",
        f"Use {verb}_{noun} with {listed}.",
    )
    takes = {name: PARAMETERS[name] for name in names}
    return Spec(f"{verb}_{noun}", f"{verb.capitalize()} a {noun}.", takes, (rng.choice(phrases),))


def speak(spec: Spec, pools: Pools, rng: Random, split: Split) -> tuple[str, Json]:
    """(what the user says, arguments that the phrase gives). In the order of the alphabet, as K3 shows a schema."""
    phrase = rng.choice(spec.phrases)
    values = {}
    said = {}
    for name, (_, kind) in spec.takes.items():
        if f"{{{name}}}" in phrase:
            values[name], said[name] = value_of(kind, pools, rng, split)
    return phrase.format(**said), dict(sorted(values.items()))


def value_of(kind: str, pools: Pools, rng: Random, split: Split) -> tuple[Any, str]:
    """(the argument, how it is said)."""
    if kind in ("city", "room", "first", "last", "noun", "colour", "day", "country"):
        found: Any = pools.pick(rng, kind, split)
        return found, found
    if kind in ("flag", "switch"):
        found = rng.random() < 0.5
        return found, ("on" if found else "off") if kind == "switch" else ("yes" if found else "no")
    if kind == "words":
        found = [pools.pick(rng, "noun", split) for _ in range(rng.randint(2, 3))]
        return found, ", ".join(found)
    if kind == "integers":
        found = [rng.randint(0, 99) for _ in range(rng.randint(2, 5))]
        return found, ", ".join(map(str, found))
    found = _simple(kind, pools, rng, split)
    return found, str(found)


def _simple(kind: str, pools: Pools, rng: Random, split: Split) -> Any:
    draws: dict[str, Callable[[], Any]] = {
        "person": lambda: schemas.person(pools, rng, split),
        "email": lambda: schemas.email(pools, rng, split),
        "code": lambda: schemas.code(rng),
        "price": lambda: schemas.price(rng),
        "phrase": lambda: phrase(pools, rng, split),
        "file": lambda: (
            f"{pools.pick(rng, 'noun', split)}{rng.choice(('', '', str(rng.randint(1, 99))))}.{rng.choice(ENDINGS)}"
        ),
        "number": lambda: rng.choice((rng.randint(0, 999), schemas.price(rng))),
        "minutes": lambda: rng.randint(1, 90),
        "small": lambda: rng.randint(1, 12),
        "count": lambda: rng.randint(1, rng.choice((99, 999))),
        "age": lambda: rng.randint(1, 99),
        "year": lambda: rng.randint(1900, 2050),
        "degrees": lambda: rng.choice((rng.randint(15, 28), rng.randint(15, 28) + 0.5)),
        "temperature": lambda: rng.randint(-20, 40),
        "date": lambda: date(rng),
        "time": lambda: f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}",
        "symbol": lambda: "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4))),
        "unit": lambda: rng.choice(("celsius", "fahrenheit")),
        "mode": lambda: rng.choice(("car", "train", "bike")),
        "size": lambda: rng.choice(("small", "medium", "large")),
        "sky": lambda: rng.choice(("sunny", "cloudy", "rainy", "foggy", "clear", "windy")),
        "currency": lambda: rng.choice(CURRENCIES),
        "language": lambda: rng.choice(LANGUAGES),
    }
    return draws[kind]()


def phrase(pools: Pools, rng: Random, split: Split) -> str:
    """Two or three words that nobody wrote together before."""
    noun, kind = pools.pick(rng, "noun", split), rng.random()
    if kind < 0.5:
        return f"{pools.pick(rng, 'adjective', split)} {noun}"
    if kind < 0.8:
        return f"the {noun} of {pools.pick(rng, 'city', split)}"
    return f"{pools.pick(rng, 'verb', split)} the {noun}"


def date(rng: Random) -> str:
    return f"{rng.randint(2020, 2035)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def thoughts(request: Request) -> dict[str, str]:
    """Which tool, then its arguments, then their types."""
    name = request.calls[0]["name"]
    rows, typed = [], []
    for call in request.calls:
        shown = {k: v if isinstance(v, str) else json.dumps(v) for k, v in call["arguments"].items()}
        rows.append(f"{name}: " + ", ".join(f"{k} = {v}" for k, v in shown.items()))
        typed += [f"{k} is {article(_type_of(request, k))}: {v}" for k, v in shown.items()]
    high = "\n".join(rows)
    return {"low": f"I call {name}.", "high": high, "max": f"The tool {name} fits.\n" + "\n".join(typed) + f"\n{high}"}


def _type_of(request: Request, parameter: str) -> str:
    kind: str = request.spoken[0][0].takes[parameter][0]["type"]
    return kind


def _called(request: Request, thinking: bool, level: str) -> list[Json]:
    calls = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": c["name"], "arguments": json.dumps(c["arguments"])},
        }
        for i, c in enumerate(request.calls)
    ]
    answer: Json = {"role": "assistant", "content": "", "tool_calls": calls}
    if thinking:
        answer["reasoning_content"] = thoughts(request)[level]
    return [{"role": "user", "content": request.question}, answer]


def _answered(request: Request, pools: Pools, rng: Random, split: Split, thinking: bool) -> list[Json]:
    """The results, and what is said about them."""
    messages, said = [], []
    for i, (spec, values) in enumerate(request.spoken):
        result = {name: value_of(kind, pools, rng, split)[0] for name, kind in spec.result.items()}
        body = json.dumps(result or {"ok": True}, ensure_ascii=False)
        messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": body})
        said.append(_fill(spec.says, {**values, **result}))
    answer: Json = {"role": "assistant", "content": " ".join(said)}
    if thinking:
        answer["reasoning_content"] = "The tool has answered."
    return [*messages, answer]


def _fill(text: str, values: Json) -> str:
    """Parameters that were not said leave "it"."""
    spoken = {k: ("on" if v else "off") if isinstance(v, bool) else str(v) for k, v in values.items()}
    return re.sub(r"\{(\w+)\}", lambda m: spoken.get(m[1], "it"), text)


def _plain(exchange: Exchange, thinking: bool, level: str) -> list[Json]:
    answer: Json = {"role": "assistant", "content": exchange.answer}
    if thinking:
        answer["reasoning_content"] = exchange.thought(level)
    return [{"role": "user", "content": exchange.question}, answer]


def results(pools: Pools, rng: Random, split: Split) -> Iterator[tuple[list[Json], list[Json], str]]:
    """(messages up to the tool's result, tools, what is to be said about it), without end."""
    for request in requests(pools, rng, split):
        if len(request.spoken) > 1 or not request.spoken[0][0].result:
            continue
        asked = _called(request, False, "high")
        result, answer = _answered(request, pools, rng, split, False)
        yield [*asked, result], list(request.tools), answer["content"]
