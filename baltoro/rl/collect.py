"""Many attempts at once: a round of rollouts, from the book's orders to groups that may be trained on.

In: a policy, the book of partial rollout, fresh tasks. Out: complete groups, and what the round was like.
Requests go out while the throttle allows, oldest trajectory first; a turn that ends goes to its env, and on with what
the world said; an attempt at its end is judged. What fails for reasons of ours (engine, sandbox, judge) is tried again
from where it stands, then excluded from its group, never scored 0.
Invariants: a trajectory's budget is over all its turns and rounds; a wait without news ends with an error that names
who is missing; when a round ends with requests under way, they are ended (reprefill) or sleep (carry: the engine keeps
their KV and state in its host tier), and every token that came before is kept, also what they say between two rounds.
With `judge_threads` 0 everything happens in the loop, in the order of the deltas: then an in-process engine repeats.
Source: spec/training.md B.2 (17, 18, 24), C.3.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baltoro.envs.base import Score, count_reasons
from baltoro.errors import InvariantError, WorkerLost
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import FinishReason, SamplingParams
from baltoro.protocol.worker import Submit
from baltoro.rl.config import ThrottleConfig
from baltoro.rl.judging import Ended, Judging, end_again, end_turn
from baltoro.rl.partial import Book, Key, Order
from baltoro.rl.policy import Policy
from baltoro.rl.recipe import RolloutConfig
from baltoro.rl.rollout import Attempt, Talk
from baltoro.rl.round_record import RoundRecord
from baltoro.rl.tasks import Drawn
from baltoro.rl.throttle import Throttle, next_throttle, send_now
from baltoro.rl.types import Group, Trajectory, seed_of

POLL_S = 0.2
LOOK_EVERY = 16  # polls, while nothing waits to be sent: a look costs the engine's time


@dataclass(slots=True)
class _Live:
    """An attempt whose trajectory is in the book. Single writer: the collector."""

    attempt: Attempt
    left: int  # of its budget
    ids: tuple[int, ...] = ()  # where it goes on
    request: str = ""
    tries: int = 0
    is_carried: bool = False
    is_held: bool = False  # the throttle ended its request


class Collector:
    """One run's rollouts. Single writer: the loop."""

    def __init__(
        self, policy: Policy, book: Book, talk: Talk, config: RolloutConfig, throttle: ThrottleConfig, *, seed: int
    ) -> None:
        self.policy, self.book, self._talk, self._config = policy, book, talk, config
        self._throttle_config, self._seed = throttle, seed
        self._live: dict[Key, _Live] = {}
        self._by_request: dict[str, Key] = {}
        self._waiting: deque[Key] = deque()
        self._judging = Judging(config.judge_threads)
        self.throttle: Throttle | None = None
        self._count = self._num_ended = self._polls = 0
        self._max_rows = 1
        self._scores: list[Score] = []
        self.early: list[TokenDelta] = []  # of carried requests, heard by others between two rounds
        self.record = RoundRecord()

    # ---- a round -------------------------------------------------------------------------------------------------
    def collect(self, version: int, fresh: Sequence[tuple[int, Drawn]], group_size: int) -> list[Group]:
        """A round under `version` with new groups (number, task). Errors: WorkerLost, TransferError of the policy;
        InvariantError where nothing happens for `stall_s`."""
        began = time.monotonic()
        self.record, self._scores, self._polls = RoundRecord(), [], -1  # the first poll looks
        trajectories = [t for number, drawn in fresh for t in self._begin(number, drawn, group_size)]
        for order in self.book.begin(version, trajectories):
            self._take(order)
        early, self.early = self.early, []
        self._hear(early)
        last_news = began
        while not self.book.is_over():
            self._send()
            self.record.looks += 1
            self.record.rows += min(1.0, len(self._by_request) / self._max_rows)
            news = self._hear(self.policy.poll(0.0 if self._judging.has_news else POLL_S)) + self._settle()
            now = time.monotonic()
            last_news = now if news else last_news
            if now - last_news > self._config.stall_s:
                raise InvariantError(f"no news for {self._config.stall_s} s; missing are {self._missing()}")
        self._end_round()
        self.record.seconds = time.monotonic() - began
        self.record.reasons = {code: n for code, n in count_reasons(self._scores).items() if n}
        groups = self.book.take(version)
        for trajectory in (t for group in groups for t in group.members):
            self._live.pop(trajectory.key).attempt.close()
        return groups

    def restore(self, drawn: Callable[[Trajectory], Drawn]) -> None:
        """After `Book.restored`: make the attempts of what is in the book again."""
        for trajectory in self.book.pending():
            attempt = Attempt(drawn(trajectory), self._talk)
            attempt.put(trajectory)
            self._live[trajectory.key] = _Live(attempt, 0)

    def close(self) -> None:
        """End envs and threads. The policy is not closed."""
        for live in self._live.values():
            live.attempt.close()
        self._judging.close()

    # ---- out -----------------------------------------------------------------------------------------------------
    def _begin(self, number: int, drawn: Drawn, group_size: int) -> list[Trajectory]:
        made: list[Trajectory] = []
        for index in range(group_size):
            attempt = Attempt(drawn, self._talk, made[0].prompt if made else None)
            fresh = Trajectory(
                task=drawn.task.id, group=number, index=index, prompt=attempt.prompt, effort=drawn.effort
            )
            self._live[fresh.key] = _Live(attempt, 0)
            made.append(fresh)
        return made

    def _take(self, order: Order) -> None:
        live = self._live[order.key]
        live.ids, live.left = order.ids, order.max_tokens
        if not (live.is_carried and order.state_version is not None):
            self._waiting.append(order.key)
        live.is_carried = False

    def _send(self) -> None:
        """As many as the throttle allows now."""
        self._polls += 1
        if not self._waiting and self._polls % LOOK_EVERY:
            return
        now = self.policy.pressure()
        if self.throttle is None:
            self.throttle = Throttle(self._throttle_config.most, retractions=now.retractions)
        self.throttle = next_throttle(self.throttle, now, self._throttle_config, ended=self._num_ended)
        self._num_ended = 0
        self.record.cap = self.throttle.cap
        self.record.retractions = now.retractions
        self._max_rows = max(1, min(now.max_running, self.throttle.cap))
        for _ in range(min(send_now(self.throttle, now), len(self._waiting))):
            self._submit(self._waiting.popleft())
        for request in list(self._by_request)[len(self._by_request) - self.throttle.pause :]:
            self._live[self._by_request[request]].is_held = True
            self.policy.abort(request)

    def _submit(self, key: Key) -> None:
        live = self._live[key]
        self._count += 1
        live.request = f"{key[0]}.{key[1]}.{self._count}"
        self._by_request[live.request] = key
        params = SamplingParams(max_tokens=live.left, temperature=1.0, logprobs=0, seed=seed_of(self._seed, key))
        replays = self._config.replays_routes
        submit = Submit(request_id=live.request, token_ids=live.ids, params=params, return_routed_experts=replays)
        self.policy.submit(submit)

    # ---- back ----------------------------------------------------------------------------------------------------
    def _hear(self, deltas: Sequence[TokenDelta]) -> int:
        """Deltas of requests that are ours; others (ended on purpose) are let pass. Returns how many were ours."""
        news = 0
        for delta in deltas:
            key = self._by_request.get(delta.request_id)
            if key is None:
                continue
            news += 1
            self._say(key, delta)
            if delta.finish_reason is not None:
                del self._by_request[delta.request_id]
                self._on_end(key, delta.finish_reason, delta.error or "")
        return news

    def _say(self, key: Key, delta: TokenDelta) -> None:
        if delta.routed_experts is not None:
            self.book.note_routes(key, delta.routed_experts)
        if not delta.token_ids:
            return
        live = self._live[key]
        thinking = live.attempt.hear_policy(delta.token_ids)
        self.book.say(key, delta.token_ids, delta.logprobs or (), delta.version, thinking)
        live.ids += delta.token_ids
        live.left -= len(delta.token_ids)
        self.record.tokens += len(delta.token_ids)

    def _on_end(self, key: Key, finish: FinishReason, error: str) -> None:
        if finish in ("abort", "error"):
            self._again(key, f"the engine ended it: {finish} {error}".strip())
            return
        self._judge(key, partial(end_turn, self._live[key].attempt, finish), finish)

    def _judge(self, key: Key, work: Callable[[], Ended], finish: FinishReason) -> None:
        """Its verdict, now or when a thread has it."""
        ended = self._judging.begin(key, work)
        if ended is not None:
            self._on_verdict(key, ended, finish)

    def _settle(self) -> int:
        """Verdicts that have come from the threads."""
        news = self._judging.take()
        for key, ended in news:
            is_cut = self._live[key].left <= 0
            self._on_verdict(key, ended, "length" if is_cut else "stop")
        return len(news)

    def _on_verdict(self, key: Key, ended: Ended, finish: FinishReason) -> None:
        live = self._live[key]
        if ended.put_in is not None and live.left > 0:
            self.book.hear(key, ended.put_in)
            live.ids += ended.put_in
            self._waiting.append(key)
            return
        score = ended.score
        if score is None:  # the world would go on, but the budget is spent
            score = Score(0.0, "truncated")
            finish = "length"
        if score.score is None and live.tries < self._config.retries:
            self._judge_again(key, score, finish)
            return
        self._scores.append(score)
        self._num_ended += 1
        if score.score is None:
            self.record.failed += 1
            self.book.fail(key, score.detail or score.reason)
            return
        self.book.finish(key, is_truncated=finish == "length")
        self.book.judge(key, score.score, answer=score.answer, reason=score.reason)

    def _judge_again(self, key: Key, score: Score, finish: FinishReason) -> None:
        """Play the whole attempt to a fresh env."""
        live = self._live[key]
        live.tries += 1
        self.record.retries += 1
        self._judge(key, partial(end_again, live.attempt, self.book.trajectory(key), finish), finish)

    def _again(self, key: Key, why: str) -> None:
        """Go on from the tokens that came, in another request; or give it up."""
        live = self._live[key]
        if live.is_held:
            live.is_held = False
            self._waiting.append(key)
            return
        if live.tries < self._config.retries and live.left > 0:
            live.tries += 1
            self.record.retries += 1
            self._waiting.appendleft(key)
            return
        self.record.failed += 1
        self._scores.append(Score(None, "infrastructure", detail=why))
        self.book.fail(key, why)

    # ---- the end of a round --------------------------------------------------------------------------------------
    def _end_round(self) -> None:
        """Bring what is under way to rest, keep what it said, close the book's round."""
        while self._judging.keys:
            self._settle()
        is_carrying = self.book.config.resume == "carry"
        running = dict(self._by_request)
        if running and is_carrying:
            self.policy.sleep()
            self._hear(self.policy.poll(0.0))
        elif running:
            for request in running:
                self.policy.abort(request)
            self._drain(running)
        while self._judging.keys:
            self._settle()
        self._waiting.clear()
        paused = self.book.stop()
        for key in paused:
            self._live[key].is_carried = is_carrying and self._live[key].request in self._by_request
        self.book.forget_states(key for key in paused if not self._live[key].is_carried)
        self.record.paused = len(paused)

    def _drain(self, running: dict[str, Key]) -> None:
        """Until every ended request has said so; their last tokens count."""
        deadline = time.monotonic() + self._config.stall_s
        while running:
            for delta in self.policy.poll(POLL_S):
                key = running.get(delta.request_id)
                if key is None:
                    continue
                self._say(key, delta)
                if delta.finish_reason is not None:
                    del running[delta.request_id], self._by_request[delta.request_id]
                    if delta.finish_reason in ("stop", "length"):
                        self._on_end(key, delta.finish_reason, "")
            if time.monotonic() > deadline:
                raise WorkerLost(f"the engine does not end {sorted(running)}")

    def _missing(self) -> list[str]:
        judged = {f"{k[0]}.{k[1]} (judge)" for k in self._judging.keys}
        return sorted(self._by_request)[:8] + sorted(judged)[:8] + [f"{len(self._waiting)} not sent"]
