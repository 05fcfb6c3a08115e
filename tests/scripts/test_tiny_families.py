"""The families: deterministic, held out where they say so, and readable by the parser that serves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest

from baltoro.bench.scoring import is_right
from baltoro.chat.messages import normalise
from baltoro.chat.parser import parse
from baltoro.chat.segments import encode_segments
from baltoro.chat.tokenizer import END_OF_MSG, Tokenizer
from scripts.data.tiny import (
    arithmetic,
    gym,
    letters,
    pictures,
    problems,
    questions,
    reading,
    render,
    schemas,
    talk,
    tools,
)
from scripts.data.tiny.exchange import Exchange, Split, pair_is_held_out, shows_held_out_pair
from scripts.data.tiny.families import FAMILIES, Context

WITHOUT_GYM = [name for name in FAMILIES if name != "gym"]


@pytest.mark.parametrize("name", WITHOUT_GYM)
def test_the_same_seed_gives_the_same_dialogues(name: str, world: Context) -> None:
    first, second = (list(islice(FAMILIES[name].stream(world, Random("x"), "train"), 20)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", WITHOUT_GYM)
def test_the_parser_reads_the_last_answer_back(name: str, world: Context, tokenizer: Tokenizer) -> None:
    for dialogue in islice(FAMILIES[name].stream(world, Random("y"), "train"), 40):
        *_, (answer, weight) = render.runs(dialogue)
        ids = encode_segments(answer, tokenizer)
        found = parse(ids, tokenizer, thinking=dialogue.thinking, has_tools=bool(dialogue.tools))
        said = normalise([dialogue.messages[-1]])[0]
        assert weight == 1
        assert found.content == said["content"]
        assert (found.reasoning or "") == said.get("reasoning_content", "")
        assert [c.name for c in found.tool_calls] == [c["function"]["name"] for c in said.get("tool_calls", ())]


@pytest.mark.parametrize("name", WITHOUT_GYM)
def test_what_counts_is_what_the_assistant_says(name: str, world: Context, tokenizer: Tokenizer) -> None:
    end = tokenizer.special(END_OF_MSG)
    for dialogue in islice(FAMILIES[name].stream(world, Random("z"), "train"), 20):
        document = render.document(dialogue, tokenizer)
        assert document.weights is not None and len(document.weights) == len(document.ids)
        said = [i for i, w in zip(document.ids, document.weights, strict=True) if w]
        turns = sum(m["role"] == "assistant" for m in dialogue.messages)
        assert said.count(end) == (turns if dialogue.learns == "all" else 1)
        assert document.ids[-1] == end and not document.weights[0]


def test_the_trained_answer_is_judged_right(world: Context) -> None:
    streams = [
        arithmetic.exchanges(Random(1), "train"),
        problems.exchanges(world.pools, Random(1), "train"),
        letters.exchanges(world.pools, Random(1), "train"),
        questions.exchanges(world.facts, Random(1), "train"),
        reading.exchanges(world.pools, Random(1), "train"),
        talk.exchanges(world.pools, Random(1), "train"),
        pictures.digits(world.labels, Random(1), "train"),
        (exchange for exchange, _ in schemas.items(world.pools, Random(1), "train")),
    ]
    for stream in streams:
        for exchange in islice(stream, 200):
            assert is_right({"content": exchange.answer}, exchange.check), exchange


def test_effort_asks_for_the_length_of_the_thoughts(world: Context) -> None:
    lengths: dict[str, list[int]] = {"low": [], "high": [], "max": []}
    for dialogue in islice(FAMILIES["arithmetic"].stream(world, Random(1), "train"), 300):
        if dialogue.effort:
            lengths[dialogue.effort].append(len(dialogue.messages[-1]["reasoning_content"]))
    low, high, most = (sum(found) / len(found) for found in lengths.values())
    assert low < high / 2 and high < most


def test_no_training_sum_shows_a_held_out_pair(world: Context) -> None:
    for exchange in islice(arithmetic.exchanges(Random(2), "train"), 2000):
        assert not shows_held_out_pair(f"{exchange.question} {exchange.thoughts['max']}"), exchange.question
    for exchange in islice(problems.exchanges(world.pools, Random(3), "train"), 500):
        assert not shows_held_out_pair(exchange.thoughts["max"]), exchange.question


def test_held_out_sums_are_of_held_out_pairs() -> None:
    for i in range(100):
        exchange = arithmetic.two_digit(Random(i), "+-"[i % 2], "eval")
        a, _, b = exchange.thoughts["low"].split(" = ")[0].split()
        assert pair_is_held_out(int(a), int(b))
    assert sum(pair_is_held_out(a, b) for a in range(10, 100) for b in range(a, 100)) == pytest.approx(410, rel=0.15)


def both(train: Iterator[Exchange], evaluation: Iterator[Exchange], count: int = 400) -> tuple[set[str], set[str]]:
    return {e.question for e in islice(train, count)}, {e.question for e in islice(evaluation, count // 4)}


def test_no_held_out_question_is_trained_on(world: Context) -> None:
    pairs = [
        both(problems.exchanges(world.pools, Random(4), "train"), problems.exchanges(world.pools, Random(5), "eval")),
        both(letters.exchanges(world.pools, Random(4), "train"), letters.exchanges(world.pools, Random(5), "eval")),
        both(questions.exchanges(world.facts, Random(4), "train"), questions.exchanges(world.facts, Random(5), "eval")),
    ]
    for trained, held_out in pairs:
        assert held_out and not trained & held_out


def test_no_held_out_request_or_schema_is_trained_on(world: Context) -> None:
    def asked(split: Split) -> tuple[set[str], set[str]]:
        requests = islice(tools.requests(world.pools, Random(10), split), 1500 if split == "train" else 150)
        items = islice(schemas.items(world.pools, Random(11), split), 1500 if split == "train" else 150)
        return {r.question for r in requests}, {exchange.question for exchange, _ in items}

    for trained, held_out in zip(asked("train"), asked("eval"), strict=True):
        assert held_out and not trained & held_out


def test_tool_calls_of_the_two_splits_share_no_city(world: Context) -> None:
    def cities(split: str) -> set[str]:
        found = set()
        for request in islice(tools.requests(world.pools, Random(6), split), 400):  # type: ignore[arg-type]
            for call in request.calls:
                found |= {v for k, v in call["arguments"].items() if k == "city"}
        return found

    assert cities("train") and cities("eval") and not cities("train") & cities("eval")


def test_arguments_have_the_types_that_are_declared(world: Context) -> None:
    kinds = {"string": str, "integer": int, "boolean": bool, "array": list}
    for request in islice(tools.requests(world.pools, Random(7), "train"), 300):
        declared = {t["function"]["name"]: t["function"]["parameters"]["properties"] for t in request.tools}
        for call in request.calls:
            assert list(call["arguments"]) == sorted(call["arguments"])
            for name, value in call["arguments"].items():
                kind = declared[call["name"]][name]["type"]
                assert type(value) in ((int, float) if kind == "number" else (kinds[kind],))


def test_held_out_digits_are_not_shown_in_training(world: Context) -> None:
    drawn = [e.picture for e in islice(pictures.digits(world.labels, Random(8), "train"), 300) if e.picture]
    trained = {int(p.text) for p in drawn if p.font < 0}
    held_out = {int(e.picture.text) for e in islice(pictures.digits(world.labels, Random(9), "eval"), 100) if e.picture}
    assert trained and held_out and not trained & held_out
    assert all(pictures.is_test_digit(i) for i in held_out)


@pytest.mark.parametrize("name", gym.FAMILIES)
@pytest.mark.slow
def test_worked_thinking_comes_to_the_answer_of_the_package(name: str) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra train)")
    for exchange in islice(gym.family_exchanges(name, Random(1), "train"), 30):
        thought, answer = exchange.thoughts["max"], exchange.answer
        assert is_right({"content": answer}, exchange.check)
        if exchange.check["kind"] == "number":
            assert answer in thought.replace(",", " ").split() or f"{answer}." in thought, (thought, answer)
        elif name in (
            "spell_backward",
            "fraction_simplification",
            "ransom_note",
            "isomorphic_strings",
            "needle_haystack",
        ):
            assert answer in thought
        elif name == "base_conversion":
            assert " ".join(answer) in thought


def test_training_draws_strange_words_and_never_what_is_held_out(world: Context) -> None:
    """A value that was seen in its place needs no copying; evaluation keeps to its own part of the list."""
    for kind in ("first", "colour", "noun", "city"):
        rng = Random(kind)
        drawn = [world.pools.pick(rng, kind, "train") for _ in range(400)]
        strange = [word for word in drawn if word not in world.pools.lists[kind]]
        assert 0.3 < len(strange) / len(drawn) < 0.5 and len(set(strange)) > 0.6 * len(strange)
        assert not set(drawn) & set(world.pools.parts[kind, "eval"])
        assert all((word[0] == word[0].upper()) == (kind in ("first", "city")) for word in strange)
        held_out = {world.pools.pick(rng, kind, "eval") for _ in range(100)}
        assert held_out <= set(world.pools.parts[kind, "eval"])
