"""The policy on the fixed held-out set: some sampled attempts on each task, and one greedy.

In: a policy that serves a version, held-out tasks. Out: an EvalRecord: pass rates with 95 % intervals over tasks.
Invariants: always the same tasks and the same seeds, so two evaluations differ by the policy alone; what failed for
reasons of infrastructure is counted beside, not as wrong; greedy ends where sampling would (temperature 0).
Source: spec/training.md F.0, F.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from baltoro.envs.base import Score
from baltoro.errors import InvariantError
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import FinishReason, SamplingParams
from baltoro.protocol.worker import Submit
from baltoro.rl.collect import POLL_S
from baltoro.rl.judging import end_turn
from baltoro.rl.policy import Policy
from baltoro.rl.rollout import Attempt, Talk
from baltoro.rl.tasks import Drawn
from baltoro.rl.types import seed_of

GREEDY = -1
SILENT_POLLS = 1000  # in a row, before an evaluation gives up


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """Pass rates: sampled is the mean over tasks of the mean over draws. half_width: of its 95 % interval over tasks.

    length  mean sampled tokens of the sampled attempts; failed: attempts without a verdict
    """

    version: int
    tasks: int
    draws: int
    sampled: float
    half_width: float
    greedy: float
    length: float
    failed: int


@dataclass(slots=True)
class Tried:
    """One attempt: `key` is (number of the task, number of the draw or GREEDY); `score` None: it did not end."""

    attempt: Attempt
    key: tuple[int, int]
    ids: tuple[int, ...]
    left: int
    score: Score | None = None
    num_sampled: int = 0


def evaluate(
    policy: Policy,
    tasks: Sequence[Drawn],
    talk: Talk,
    *,
    draws: int,
    max_tokens: int,
    seed: int,
    most: int,
    others: list[TokenDelta] | None = None,
) -> EvalRecord:
    """`most`: attempts at once; `others` gets what requests of somebody else say meanwhile.

    Errors: InvariantError where the engine falls silent, or nothing was judged.
    """
    ones = try_all(policy, tasks, talk, draws=draws, max_tokens=max_tokens, seed=seed, most=most, others=others)
    return summary(ones, version=policy.version, tasks=len(tasks), draws=draws)


def try_all(
    policy: Policy,
    tasks: Sequence[Drawn],
    talk: Talk,
    *,
    draws: int,
    max_tokens: int,
    seed: int,
    most: int,
    others: list[TokenDelta] | None = None,
) -> list[Tried]:
    """Every attempt of an evaluation, judged. As `evaluate`."""
    if not tasks:
        raise InvariantError("there is no held-out task: nothing would be evaluated")
    ones = []
    for number, drawn in enumerate(tasks):
        prompt = talk.prompt(drawn)
        for index in (GREEDY, *range(draws)):
            attempt = Attempt(drawn, talk, prompt)
            ones.append(Tried(attempt, (number, index), attempt.prompt, max_tokens))
    try:
        _run(policy, ones, seed=seed, most=most, others=[] if others is None else others)
    finally:
        for one in ones:
            one.attempt.close()
    return ones


def summary(ones: Sequence[Tried], *, version: int, tasks: int, draws: int) -> EvalRecord:
    """Errors: InvariantError where nothing was judged."""
    sampled, greedy = [], []
    for number in range(tasks):
        mine = [one.score.score for one in ones if one.key[0] == number and one.key[1] >= 0 and one.score is not None]
        known = [value for value in mine if value is not None]
        if known:
            sampled.append(fmean(known))
    greedy = [o.score.score for o in ones if o.key[1] == GREEDY and o.score is not None and o.score.score is not None]
    if not sampled or not greedy:
        raise InvariantError("no held-out attempt could be judged; see the log of the engine and of the sandbox")
    half = 1.96 * stdev(sampled) / math.sqrt(len(sampled)) if len(sampled) > 1 else 1.0
    failed = sum(one.score is None or one.score.score is None for one in ones)
    length = fmean(one.num_sampled for one in ones if one.key[1] >= 0)
    return EvalRecord(version, tasks, draws, fmean(sampled), half, fmean(greedy), length, failed)


def _run(policy: Policy, ones: Sequence[Tried], *, seed: int, most: int, others: list[TokenDelta]) -> None:
    """All attempts to their end."""
    waiting, running, silent, count = list(reversed(ones)), dict[str, Tried](), 0, 0
    while waiting or running:
        while waiting and len(running) < most:
            one = waiting.pop()
            name = f"eval.{count}"
            count += 1
            running[name] = one
            policy.submit(Submit(request_id=name, token_ids=one.ids, params=_params(one, seed)))
        told = policy.poll(POLL_S)
        deltas = [delta for delta in told if delta.request_id in running]
        others += [delta for delta in told if delta.request_id not in running]
        silent = 0 if deltas else silent + 1
        if silent > SILENT_POLLS:
            raise InvariantError(f"no news of {len(running)} held-out attempts: {sorted(running)[:5]}")
        for delta in deltas:
            one = running[delta.request_id]
            one.attempt.hear_policy(delta.token_ids)
            one.ids += delta.token_ids
            one.left -= len(delta.token_ids)
            one.num_sampled += len(delta.token_ids)
            if delta.finish_reason is not None:
                del running[delta.request_id]
                if _end(one, delta.finish_reason):
                    waiting.append(one)


def _end(one: Tried, finish: FinishReason) -> bool:
    """A turn has ended; whether the attempt goes on."""
    if finish in ("abort", "error"):
        one.score = Score(None, "infrastructure", detail=f"the engine ended it: {finish}")
        return False
    ended = end_turn(one.attempt, finish)
    if ended.put_in is not None and one.left > 0:
        one.ids += ended.put_in
        return True
    one.score = ended.score or Score(0.0, "truncated")
    return False


def _params(one: Tried, seed: int) -> SamplingParams:
    is_greedy = one.key[1] == GREEDY
    return SamplingParams(
        max_tokens=one.left,
        temperature=0.0 if is_greedy else 1.0,
        logprobs=0,
        seed=seed_of(seed, (one.key[0], 1 + one.key[1])),
    )
