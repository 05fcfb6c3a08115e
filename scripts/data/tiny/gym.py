"""Questions of reasoning-gym, with our own worked thinking.

In: the package (0.1.25), a seed. Out: exchanges. One question in ten is held out, by its text.
Left out on purpose: families without a gold answer (graph_color, rubiks_cube, boxnet, rush_hour,
propositional_logic), those whose scorer pays for wrong text (game_of_life_halting, figlet_font) or fails on it
(prime_factorization).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from scripts.data.tiny import traces
from scripts.data.tiny.exchange import Exchange, Split, is_mine, shows_held_out_pair
from scripts.data.tiny.traces import Trace

PACKAGE = "reasoning_gym"
BATCH = 400


@dataclass(frozen=True)
class Family:
    """`share`: how often it comes; `kind`: how an answer is judged; `options`: difficulty, below the package's own."""

    trace: Trace
    share: int
    kind: str = "number"
    options: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "chain_sum": Family(traces.chain_sum, 10, options={"max_terms": 4, "max_digits": 2}),
    "products": Family(traces.products, 8, options={"max_digits": 2}),
    "gcd": Family(traces.gcd_trace, 6, options={"max_value": 200}),
    "lcm": Family(traces.lcm_trace, 4, options={"max_value": 30}),
    "fraction_simplification": Family(
        traces.fraction, 4, "exact", {"max_value": 20, "max_factor": 12, "styles": ("plain",)}
    ),
    "letter_counting": Family(traces.letter_counting, 8, options={"min_words": 2, "max_words": 7}),
    "spell_backward": Family(traces.spell_backward, 8, "exact", {"max_word_len": 8}),
    "word_sequence_reversal": Family(traces.word_reversal, 6, "exact", {"max_words": 6}),
    "word_sorting": Family(traces.word_sorting, 6, "exact", {"max_words": 5}),
    "ransom_note": Family(traces.ransom_note, 5, "exact", {"max_note_length": 5, "max_magazine_length": 12}),
    "isomorphic_strings": Family(traces.isomorphic, 4, "exact", {"max_string_length": 6}),
    "count_bits": Family(traces.count_bits, 6, options={"max_n": 2000}),
    "base_conversion": Family(traces.base_conversion, 6, "exact", {"max_value": 250}),
    "leg_counting": Family(traces.leg_counting, 6, options={"min_animals": 2, "max_animals": 4, "max_instances": 9}),
    "coin_flip": Family(traces.coin_flip, 2, options={"max_trials": 9}),
    "number_filtering": Family(
        traces.number_filtering, 5, "exact", {"min_decimals": 0, "max_decimals": 0, "max_numbers": 6}
    ),
    "needle_haystack": Family(traces.needle, 5, "exact", {"min_num_statements": 10, "max_num_statements": 12}),
    "simple_equations": Family(
        traces.simple_equation, 6, options={"max_terms": 3, "max_value": 12, "operators_weights": (0.45, 0.45, 0.1)}
    ),
    "number_sequence": Family(traces.number_sequence, 8, options={"max_complexity": 1}),
}


def exchanges(rng: Random, split: Split) -> Iterator[Exchange]:
    """A mixture of all families, without end."""
    streams = {name: family_exchanges(name, Random(rng.random()), split) for name in FAMILIES}
    shares = [family.share for family in FAMILIES.values()]
    while True:
        yield next(streams[rng.choices(list(FAMILIES), shares)[0]])


def family_exchanges(name: str, rng: Random, split: Split) -> Iterator[Exchange]:
    """One family, without end."""
    from reasoning_gym import create_dataset

    family = FAMILIES[name]
    while True:
        for entry in create_dataset(name, size=BATCH, seed=rng.getrandbits(31), **family.options):
            exchange = exchange_of(name, entry)
            if exchange is None or not is_mine(split, name, exchange.question):
                continue
            if split == "train" and shows_held_out_pair(exchange.thoughts["max"]):
                continue
            yield exchange


def exchange_of(name: str, entry: dict[str, Any]) -> Exchange | None:
    """None where the working does not come to the package's answer."""
    family = FAMILIES[name]
    thoughts = family.trace({**entry["metadata"], "text": entry["question"], "answer": entry["answer"]})
    if thoughts is None:
        return None
    gold: Any = entry["answer"]
    if family.kind == "number":
        gold = float(gold) if "." in gold or "e" in gold else int(gold)
    return Exchange(entry["question"].strip(), entry["answer"], thoughts, {"kind": family.kind, "gold": gold})
