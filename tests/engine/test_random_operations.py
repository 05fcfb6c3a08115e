"""The whole engine under random operations: every completion equals the one computed from its tokens alone, whatever
comes, is aborted or loses its memory in between; books and owners are compared after every operation."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baltoro.cache.retention import RETENTION_NAMES
from baltoro.errors import QueueFull
from baltoro.protocol.sampling import SamplingParams
from tests.engine.stub import VOCAB, StubModel, expected, make_engine, submit, tokens_of

# Few different beginnings, so that prefixes are shared.
TOKENS = st.builds(
    lambda common, own: list(range(common)) + own,
    st.sampled_from([0, 0, 9, 17]),
    st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=13),
)


class Requests(RuleBasedStateMachine):
    """`asked` is the dictionary: what each request must answer, computed without an engine when it ends."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        num_slots=st.integers(1, 4),
        max_batch_tokens=st.sampled_from([1, 5, 16, 64]),
        num_tokens=st.sampled_from([48, 64, 160]),
        max_running=st.integers(1, 6),
        pool=st.sampled_from(["unified", "fixed"]),
        overlap=st.booleans(),
        retention=st.sampled_from(["off", *RETENTION_NAMES]),
        hash_endpoint=st.sampled_from([4, 8]),
    )
    def start(self, page_size: int, num_tokens: int, retention: str, **options: Any) -> None:
        if retention != "off":
            options |= {"prefix_cache": True, "retention": retention, "track_interval": 8}
        self.engine = make_engine(
            StubModel(can_end=True),
            page_size=page_size,
            num_pages=num_tokens // page_size,
            max_context=48,
            max_waiting=6,
            **options,
        )
        self.asked: dict[str, tuple[list[int], int, SamplingParams]] = {}
        self.told: dict[tuple[str, int], list[Any]] = {}
        self.count = 0

    @rule(
        prompt=TOKENS,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 1),
        max_tokens=st.integers(1, 14),
        temperature=st.sampled_from([0.0, 0.9]),
    )
    def ask(self, prompt: list[int], n: int, priority: int, **params: Any) -> None:
        name = f"r{self.count}"
        self.count += 1
        params |= {"seed": self.count, "top_k": 20}
        try:
            submit(self.engine, name, prompt, n=n, priority=priority, **params)
        except QueueFull:
            return
        self.asked[name] = (prompt, n, SamplingParams(**params))

    @rule()
    def flush(self) -> None:
        self.engine.flush()

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._note(self.engine.step())

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), is_in_flight=st.booleans())
    def abort(self, data: st.DataObject, is_in_flight: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        is_ours = is_in_flight and not self.engine.loop.is_in_flight
        plan = self.engine.scheduler.plan() if is_ours else None
        self.engine.abort(name)
        if plan is not None:
            self.engine.scheduler.commit(plan, self.engine.runner.run(plan))
        self._note(self.engine.scheduler.take_deltas())

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        scheduler = self.engine.scheduler
        self.engine.loop.settle()
        if not scheduler.running:
            return
        at = data.draw(st.integers(0, len(scheduler.running) - 1))
        scheduler.retraction.retract(scheduler.running[at])

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.audit()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self._note(self.engine.step())
            self.engine.audit()
        assert not self.asked, "everything that was asked has ended"
        self.engine.flush()
        self.engine.close()
        assert self.engine.stats()["pages_used"] == self.engine.stats()["slots_used"] == 0

    def _note(self, deltas: list[Any]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            self.told.setdefault(key, []).append(delta)
            if delta.finish_reason is None:
                continue
            prompt, n, params = self.asked[delta.request_id]
            wanted, found = expected(prompt, params, index=delta.index, can_end=True), tokens_of(self.told.pop(key))
            if delta.finish_reason == "abort":
                assert found == wanted[: len(found)] and len(found) < len(wanted)
            else:
                assert found == wanted
                assert (delta.finish_reason == "stop") == (len(found) < params.max_tokens or found[-1] == VOCAB - 1)
            if n == 1:
                del self.asked[delta.request_id]
            else:
                self.asked[delta.request_id] = (prompt, n - 1, params)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
