"""Families of reasoning-gym as tasks (extra `train`): one question, one reply.

In: the name of a family of that package, options of its difficulty. Out: tasks.
Families of FAMILIES are judged here, strictly: the number, or the exact words. All others are judged by the package's
own scorer, which reads the model's text, in the pool of killable processes; only full marks count as right, since
several of its scorers pay a little for any text.
Left out of FAMILIES on purpose: families without a gold answer, and those whose scorer pays for wrong text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from baltoro.envs.base import Env, Reply, Score, Split, Task, infrastructure, question_task
from baltoro.envs.pool import Job, RewardPool
from baltoro.envs.rewards import SingleTurn, judge
from baltoro.envs.tasks.held_out import is_mine, shows_held_out_pair
from baltoro.errors import ConfigError

BATCH = 200  # instances drawn at once; part of what a seed means
SCORER = "baltoro.envs.tasks.gym:package_score"

# name -> (kind of answer, options below the package's own difficulty): sizes that the tiny model's corpora have
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "chain_sum": ("number", {"max_terms": 4, "max_digits": 2}),
    "products": ("number", {"max_digits": 2}),
    "gcd": ("number", {"max_value": 200}),
    "lcm": ("number", {"max_value": 30}),
    "fraction_simplification": ("exact", {"max_value": 20, "max_factor": 12, "styles": ("plain",)}),
    "letter_counting": ("number", {"min_words": 2, "max_words": 7}),
    "spell_backward": ("exact", {"max_word_len": 8}),
    "word_sequence_reversal": ("exact", {"max_words": 6}),
    "word_sorting": ("exact", {"max_words": 5}),
    "ransom_note": ("exact", {"max_note_length": 5, "max_magazine_length": 12}),
    "isomorphic_strings": ("exact", {"max_string_length": 6}),
    "count_bits": ("number", {"max_n": 2000}),
    "base_conversion": ("exact", {"max_value": 250}),
    "leg_counting": ("number", {"min_animals": 2, "max_animals": 4, "max_instances": 9}),
    "coin_flip": ("number", {"max_trials": 9}),
    "number_filtering": ("exact", {"min_decimals": 0, "max_decimals": 0, "max_numbers": 6}),
    "needle_haystack": ("exact", {"min_num_statements": 10, "max_num_statements": 12}),
    "simple_equations": (
        "number",
        {"max_terms": 3, "max_value": 12, "operators_weights": (0.45, 0.45, 0.1)},
    ),
    "number_sequence": ("number", {"max_complexity": 1}),
}


@dataclass(frozen=True)
class Gym:
    """One family. `options` replace those of FAMILIES one by one; `pool` judges families that are not in there.

    Errors: ConfigError where the package is not installed, or has no such family or option.
    """

    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    pool: RewardPool | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES and self.pool is None:
            here = ", ".join(FAMILIES)
            raise ConfigError(f"{self.family} is judged by reasoning-gym: give a reward pool; judged here are {here}")
        next(self._entries(0))

    @property
    def name(self) -> str:
        return f"gym.{self.family}"

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for entry in self._entries(Random(f"{self.name}/{split}/{seed}").getrandbits(31)):
            question = str(entry["question"]).strip()
            if not is_mine(split, self.family, question) or (split == "train" and shows_held_out_pair(question)):
                continue
            yield question_task(self.name, question, self._check(entry))

    def env(self) -> Env:
        return SingleTurn(self._score)

    def reference(self, task: Task) -> Sequence[Reply]:
        return [Reply(str(task.check["answer"]))]

    def _entries(self, seed: int) -> Iterator[Mapping[str, Any]]:
        try:
            from reasoning_gym import create_dataset
        except ImportError as error:
            raise ConfigError(
                f"tasks of reasoning-gym need the extra `train` ({error}): pip install baltoro[train]"
            ) from error
        options = {**FAMILIES.get(self.family, ("", {}))[1], **self.options}
        rng = Random(seed)
        while True:
            try:
                yield from create_dataset(self.family, size=BATCH, seed=rng.getrandbits(31), **options)
            except (ValueError, TypeError, AssertionError, IndexError) as error:  # the last: no word is so long
                raise ConfigError(f"reasoning-gym cannot make {self.family} with {options}: {error}") from error

    def _check(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        answer = entry["answer"]
        if self.family not in FAMILIES:
            return {"kind": "package", "answer": answer, "entry": dict(entry)}
        kind = FAMILIES[self.family][0]
        gold: Any = answer
        if kind == "number":
            gold = float(answer) if "." in answer or "e" in answer else int(answer)
        return {"kind": kind, "gold": gold, "answer": answer}

    def _score(self, reply: Reply, task: Task) -> Score:
        if task.check["kind"] != "package":
            return judge(reply, task.check)
        if reply.finish_reason in ("abort", "error"):
            return infrastructure(f"the completion ended with {reply.finish_reason}")
        if reply.finish_reason == "length":
            return Score(0.0, "truncated", reply.content or None)
        if not reply.content.strip():
            return Score(0.0, "no_answer")
        answer = reply.content.strip()
        score = self._by_package(answer, task)
        if score.is_excluded and self._by_package(str(task.check["answer"]), task).score == 1.0:
            # the scorer works: the answer broke it, and must not be excused for that
            return Score(0.0, "wrong", answer, detail=f"the scorer fails on it: {score.detail}")
        return score

    def _by_package(self, answer: str, task: Task) -> Score:
        assert self.pool is not None
        text = answer.encode(errors="replace").decode()
        return self.pool.score(Job(SCORER, {"family": self.family, "answer": text, "entry": task.check["entry"]}))


def package_score(family: str, answer: str, entry: dict[str, Any]) -> Score:
    """The package's own judgement, in a worker of the pool."""
    from reasoning_gym import get_score_answer_fn

    is_right = float(get_score_answer_fn(family)(answer, entry)) >= 1.0
    return Score(1.0, "right", answer) if is_right else Score(0.0, "wrong", answer)
