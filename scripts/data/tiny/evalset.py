"""Write the held-out questions of the tiny model: `python -m scripts.data.tiny.evalset --out bench/eval/tiny.jsonl`.

In: the families' held-out splits. Out: questions for `baltoro bench eval`, one JSON line each. Deterministic; kept in
the repository, so that evaluating needs none of the packages.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # also without an installed baltoro

from PIL import Image

from baltoro.bench.questions import Question
from scripts.data.tiny import (
    arithmetic,
    families,
    gym,
    ink,
    letters,
    pictures,
    problems,
    questions,
    reading,
    schemas,
    talk,
    tools,
)
from scripts.data.tiny.draw import Ink, Picture, draw
from scripts.data.tiny.exchange import Exchange, Json
from scripts.data.tiny.families import Context
from scripts.data.tiny.hashing import restart_with_fixed_hashes

PLAIN_SHARE = 0.8  # height of the digit in a plain picture


def write(context: Context, stock: Ink) -> Iterator[Question]:
    """All questions, family by family."""
    yield from _texts(context)
    yield from _tools(context)
    yield from _pictures(context, stock)


def _texts(context: Context) -> Iterator[Question]:
    pools, known = context.pools, context.facts
    rng = _rng("sums")
    sums = [arithmetic.two_digit(rng, "+-"[i % 2], "eval") for i in range(200)]
    yield from _ask("add_sub", sums)
    for effort in ("low", "high", "max", "none"):
        yield from _ask(f"effort.{effort}", sums[:30], reasoning_effort=effort)
    other = (e for e in arithmetic.exchanges(_rng("other"), "eval") if not _is_two_digit(e))
    yield from _ask("arithmetic", islice(other, 50))
    yield from _ask("problems", islice(problems.exchanges(pools, _rng("problems"), "eval"), 100))
    for name in gym.FAMILIES:
        yield from _ask(f"gym.{name}", _distinct(gym.family_exchanges(name, _rng(name), "eval"), 25))
    yield from _ask("letters", islice(letters.exchanges(pools, _rng("letters"), "eval"), 60))
    for kind in ("meanings", "kinds", "synonyms", "modules", "commands"):
        mine = [fact for fact in known if fact.family == kind]
        yield from _ask(f"facts.{kind}", _distinct(questions.exchanges(mine, _rng(kind), "eval"), 20))
    yield from _ask("unseen", _distinct(questions.unseen(known, _rng("unseen")), 40))
    yield from _ask("reading", islice(reading.exchanges(pools, _rng("reading"), "eval"), 60))
    yield from _ask("talk", islice(talk.exchanges(pools, _rng("talk"), "eval"), 30))
    for i, (exchange, wanted) in enumerate(islice(schemas.items(pools, _rng("schemas"), "eval"), 80)):
        yield _question("json", i, exchange, response_format=wanted)


def _tools(context: Context) -> Iterator[Question]:
    pools = context.pools
    for i, request in enumerate(islice(tools.requests(pools, _rng("tools"), "eval"), 150)):
        check = {"kind": "calls", "gold": list(request.calls)}
        yield _question("tools", i, Exchange(request.question, "", {}, check), tools=list(request.tools))
    requests = tools.requests(pools, _rng("no_tool"), "eval")
    fillers = families.fillers(context, _rng("fillers"), "eval")
    for i, (request, filler) in enumerate(islice(zip(requests, fillers, strict=False), 40)):
        exchange = replace(filler, check={"kind": "calls", "gold": []})
        yield _question("no_tool", i, exchange, tools=list(request.tools))
    for i, (messages, declared, gold) in enumerate(islice(tools.results(pools, _rng("results"), "eval"), 40)):
        body = {"messages": messages, "tools": declared}
        yield Question(f"tool_results/{i}", "tool_results", body, {"kind": "exact", "gold": gold})


def _pictures(context: Context, stock: Ink) -> Iterator[Question]:
    seen = _distinct_digits(pictures.digits(context.labels, _rng("digits"), "eval"), 150)
    plain = [replace(e, picture=_plain(e.picture, i)) for i, e in enumerate(seen) if e.picture is not None]
    yield from _ask("digits", plain, stock)
    varied = pictures.digits(context.labels, _rng("varied"), "eval")
    yield from _ask("digits_varied", islice(varied, 40), stock)
    nouns = context.pools.lists["noun"]
    yield from _ask("printed", islice(pictures.texts(nouns, _rng("printed"), "eval"), 40), stock)


def _plain(picture: Picture, number: int) -> Picture:
    """Upright, in the middle, black on white or white on black."""
    ink, paper = (0, 255) if number % 2 else (255, 0)
    return replace(picture, size=PLAIN_SHARE, angle=0.0, right=0.0, down=0.0, ink=ink, paper=paper, noise=0)


def _ask(family: str, exchanges: Iterable[Exchange], stock: Ink | None = None, **options: object) -> Iterator[Question]:
    """Questions of one family."""
    for i, exchange in enumerate(exchanges):
        yield _question(family, i, exchange, stock, **options)


def _question(family: str, number: int, exchange: Exchange, stock: Ink | None = None, **options: object) -> Question:
    content: object = exchange.question
    if exchange.picture is not None and stock is not None:
        image = {"type": "image_url", "image_url": {"url": data_url(exchange.picture, stock)}}
        content = [image, {"type": "text", "text": exchange.question}]
    body: Json = {"messages": [{"role": "user", "content": content}], **options}
    return Question(f"{family}/{number}", family, body, exchange.check)


def data_url(picture: Picture, stock: Ink) -> str:
    """The picture as a PNG."""
    file = io.BytesIO()
    Image.fromarray(draw(picture, stock)).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _distinct(exchanges: Iterator[Exchange], count: int, tries: int = 20_000) -> list[Exchange]:
    """Up to `count` different questions: some families have few."""
    found: dict[str, Exchange] = {}
    for exchange in islice(exchanges, tries):
        found.setdefault(exchange.question, exchange)
        if len(found) == count:
            break
    return list(found.values())


def _distinct_digits(exchanges: Iterator[Exchange], count: int) -> list[Exchange]:
    found: dict[str, Exchange] = {}
    for exchange in exchanges:
        if exchange.picture is not None:
            found.setdefault(exchange.picture.text, exchange)
        if len(found) == count:
            return list(found.values())
    return list(found.values())


def _is_two_digit(exchange: Exchange) -> bool:
    numbers = [part for part in exchange.thoughts["low"].split(" = ")[0].split() if part.isdigit()]
    return all(len(number) == 2 for number in numbers) and "x" not in exchange.thoughts["low"]


def _rng(name: str) -> Random:
    return Random(f"evaluation/{name}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/eval/tiny.jsonl"))
    parser.add_argument("--wordnet", type=Path, default=Path("data/wordnet/dict"), help="WordNet's database files")
    args = parser.parse_args(argv)
    found = list(write(families.load_context(args.wordnet), ink.load_ink()[0]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(q.line() + "\n" for q in found), encoding="utf-8")
    print(f"{args.out}: {len(found)} questions, {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    restart_with_fixed_hashes()
    main()
