"""plan and commit on the scripted model: batching, chunks, retraction, abort, forks, priorities; every answer equals
the one computed from the tokens alone."""

from __future__ import annotations

import pytest

from baltoro.engine.engine import Engine
from baltoro.errors import ContextLengthError, InvariantError, QueueFull, RequestError
from baltoro.protocol.sampling import SamplingParams
from tests.engine.stub import StubModel, expected, make_engine, run, submit, tokens_of

PROMPTS = [[(7 * i + 3 * j) % 59 for j in range(length)] for i, length in enumerate((1, 2, 5, 17, 40, 64, 9, 30))]


def _submit_all(engine: Engine, max_tokens: int = 12) -> None:
    for i, prompt in enumerate(PROMPTS):
        submit(engine, f"r{i}", prompt, max_tokens=max_tokens)


def _check_all(engine: Engine, max_tokens: int = 12) -> None:
    deltas = run(engine)
    for i, prompt in enumerate(PROMPTS):
        found = deltas[f"r{i}", 0]
        assert tokens_of(found) == expected(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        assert [d.finish_reason for d in found] == [None] * (max_tokens - 1) + ["length"]
        assert all(d.num_prompt_tokens == len(prompt) for d in found)
    assert engine.stats()["pages_used"] == engine.stats()["slots_used"] == 0
    engine.audit()


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("max_batch_tokens", [1, 3, 24, 1000])
def test_every_page_size_and_budget_gives_the_same_tokens(page_size: int, max_batch_tokens: int) -> None:
    engine = make_engine(page_size=page_size, num_pages=4 * 96 // page_size, max_batch_tokens=max_batch_tokens)
    _submit_all(engine)
    _check_all(engine)


def test_a_step_mixes_decodes_and_pieces_of_prompts_within_the_budget() -> None:
    model = StubModel()
    engine = make_engine(model, max_batch_tokens=24)
    _submit_all(engine)
    _check_all(engine)
    assert all(ctx.spans.num_tokens <= 24 for ctx in model.contexts)
    assert any(0 < ctx.num_decodes < len(ctx.spans) for ctx in model.contexts)
    assert any(ctx.num_decodes >= 3 for ctx in model.contexts), "decodes of several requests share a step"
    for ctx in model.contexts:
        decodes = [n == 1 and s > 0 for n, s in zip(ctx.spans.lengths, ctx.spans.starts, strict=True)]
        assert decodes == sorted(decodes, reverse=True), "decodes come first"


def test_prompts_are_cut_on_the_chunk_grid_when_the_budget_allows() -> None:
    model = StubModel()
    engine = make_engine(model, max_batch_tokens=70)
    submit(engine, "a", [1] * 140, max_tokens=1)
    run(engine)
    assert [ctx.spans.lengths for ctx in model.contexts] == [(64,), (64,), (12,)]


def test_retraction_recomputes_and_changes_no_token() -> None:
    """Six pages for three growing requests: somebody has to give memory back, again and again."""
    engine = make_engine(num_pages=14, max_context=48)
    for i in range(3):
        submit(engine, f"r{i}", PROMPTS[3][i:], max_tokens=20)
    deltas = run(engine)
    assert engine.stats()["num_retracted_reqs"] >= 1
    for i in range(3):
        assert tokens_of(deltas[f"r{i}", 0]) == expected(PROMPTS[3][i:], SamplingParams(temperature=0.0, max_tokens=20))


@pytest.mark.parametrize("every", [2, 3, 7])
def test_forced_retraction_changes_no_token(every: int) -> None:
    engine = make_engine(retract_every=every)
    _submit_all(engine)
    _check_all(engine)
    assert engine.stats()["num_retracted_reqs"] >= 3


def test_the_first_in_precedence_is_never_retracted_for_another() -> None:
    engine = make_engine(num_pages=12, max_context=48)
    for i in range(4):
        submit(engine, f"r{i}", PROMPTS[6], max_tokens=30)
    finished: list[str] = []
    while engine.has_work:
        for delta in engine.step():
            if delta.finish_reason:
                finished.append(delta.request_id)
        engine.audit()
    assert engine.stats()["num_retracted_reqs"]
    assert finished[0] == "r0"


def test_higher_priority_runs_first_and_is_retracted_last() -> None:
    engine = make_engine(num_slots=1)
    submit(engine, "low", [1, 2], max_tokens=2, priority=-1)
    submit(engine, "late", [1, 2], max_tokens=2)
    submit(engine, "high", [1, 2], max_tokens=2, priority=5)
    order = []
    while engine.has_work:
        order += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert order == ["high", "late", "low"]


def test_a_request_that_does_not_fit_waits_and_nobody_overtakes_it() -> None:
    engine = make_engine(num_pages=20, max_context=80, max_batch_tokens=10)
    submit(engine, "long", [1] * 40, max_tokens=4)
    assert engine.step() == []
    submit(engine, "too long for now", [2] * 60, max_tokens=4)
    submit(engine, "short", [3], max_tokens=4)
    assert engine.step() == []
    assert engine.stats()["num_running_reqs"] == 1 and engine.stats()["num_queue_reqs"] == 2
    deltas = run(engine)
    for name, prompt in (("long", [1] * 40), ("too long for now", [2] * 60), ("short", [3])):
        assert tokens_of(deltas[name, 0]) == expected(prompt, SamplingParams(temperature=0.0, max_tokens=4))


def test_abort_at_any_moment_gives_everything_back() -> None:
    """Before a step, between plan and commit, while waiting, while reading the prompt, while writing."""
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    for moment in range(16):
        engine = make_engine(max_batch_tokens=10, num_slots=2)
        for i in range(3):
            submit(engine, f"r{i}", PROMPTS[4 + i % 2], max_tokens=16)
        for _ in range(moment):
            engine.step()
        plan = engine.scheduler.plan()
        assert plan is not None
        used = engine.stats()["pages_used"]
        engine.abort("r0")
        engine.abort("r2")
        engine.abort("never heard of")
        if any(span.request.request_id == "r0" for span in plan.spans):
            assert engine.stats()["pages_used"] == used, "memory in flight stays until commit"
        engine.scheduler.commit(plan, engine.runner.run(plan))
        engine.audit()
        deltas = run(engine)
        aborted = [d for d in deltas.get(("r0", 0), []) if d.finish_reason == "abort"]
        assert len(aborted) == 1 and aborted[0].token_ids == ()
        assert deltas["r0", 0][-1] is aborted[0], "nothing is told after the end"
        assert tokens_of(deltas["r1", 0])[-1] == expected(PROMPTS[5], greedy)[-1]
        assert engine.stats()["pages_used"] == engine.stats()["slots_used"] == 0


def test_abort_of_all_ends_all() -> None:
    engine = make_engine()
    _submit_all(engine)
    engine.step()
    engine.abort()
    deltas = run(engine)
    assert {found[-1].finish_reason for found in deltas.values()} == {"abort"} and len(deltas) == len(PROMPTS)
    assert not engine.has_work


@pytest.mark.parametrize("length", [1, 2, 4, 5, 18])
@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_n_completions_share_the_prompt_and_draw_their_own_tokens(length: int, num_slots: int) -> None:
    prompt = PROMPTS[4][:length]
    engine = make_engine(num_slots=num_slots, max_batch_tokens=7)
    submit(engine, "other", PROMPTS[2], max_tokens=4)
    submit(engine, "many", prompt, n=4, max_tokens=9, temperature=0.9, seed=11)
    deltas = run(engine)
    outputs = [tokens_of(deltas["many", index]) for index in range(4)]
    params = SamplingParams(temperature=0.9, max_tokens=9, seed=11)
    assert outputs == [expected(prompt, params, index=index) for index in range(4)]
    assert len({tuple(output) for output in outputs}) == 4


def test_the_shared_prompt_is_read_once_when_there_is_room() -> None:
    engine = make_engine(num_slots=4)
    submit(engine, "many", PROMPTS[4], n=4, max_tokens=3, temperature=1.0, seed=1)
    engine.step()
    engine.step()
    engine.step()
    assert engine.stats()["num_running_reqs"] == 4
    assert engine.stats()["pages_used"] == 9 + 4, "9 full pages are shared, the last one is everybody's own"
    run(engine)
    assert engine.stats()["prompt_tokens"] == 39 + 4


def test_abort_while_siblings_wait_for_the_prompt() -> None:
    for moment in range(5):
        engine = make_engine(max_batch_tokens=16)
        submit(engine, "many", PROMPTS[4], n=3)
        for _ in range(moment):
            engine.step()
        plan = engine.scheduler.plan()
        assert plan is not None
        engine.abort("many")
        engine.scheduler.commit(plan, engine.runner.run(plan))
        deltas = run(engine)
        assert all(deltas["many", i][-1].finish_reason == "abort" for i in range(3))
        assert engine.stats()["pages_used"] == engine.stats()["slots_used"] == 0
        submit(engine, "many", [5], max_tokens=3)
        assert tokens_of(run(engine)["many", 0]) == expected([5], SamplingParams(temperature=0.0, max_tokens=3))


def test_retraction_of_forks_changes_no_token() -> None:
    engine = make_engine(num_pages=14, max_context=48, retract_every=3)
    submit(engine, "many", PROMPTS[3], n=4, max_tokens=14, temperature=0.8, seed=5)
    deltas = run(engine)
    params = SamplingParams(temperature=0.8, max_tokens=14, seed=5)
    assert [tokens_of(deltas["many", i]) for i in range(4)] == [expected(PROMPTS[3], params, index=i) for i in range(4)]


def test_the_context_ends_a_request_at_its_last_position() -> None:
    engine = make_engine(num_pages=4, max_context=16)
    submit(engine, "a", [1] * 10, max_tokens=100)
    found = run(engine)["a", 0]
    assert len(tokens_of(found)) == 6 and found[-1].finish_reason == "length"
    with pytest.raises(ContextLengthError, match="16 together"):
        submit(engine, "b", [1] * 16)


def test_what_cannot_be_served_is_refused_at_once() -> None:
    engine = make_engine(max_waiting=1)
    for bad in ({"prompt": []}, {"prompt": [61]}, {"prompt": [-1]}, {"prompt": [1], "n": 0}):
        with pytest.raises(RequestError):
            submit(engine, "bad", **bad)
    with pytest.raises(RequestError, match="logit_bias"):
        submit(engine, "bad", [1], logit_bias={61: 1.0})
    submit(engine, "a", [1])
    with pytest.raises(RequestError, match="in use"):
        submit(engine, "a", [1])
    with pytest.raises(QueueFull):
        submit(engine, "b", [1], n=2)
    assert list(run(engine)) == [("a", 0)]
    submit(engine, "b", [1, 2], n=3)
    assert len(run(engine)) == 3, "one request counts one, however many completions it asks for"


def test_nothing_is_admitted_in_a_step_that_had_to_retract() -> None:
    engine = make_engine(num_pages=12, max_context=48)
    for i in range(4):
        submit(engine, f"r{i}", PROMPTS[6], max_tokens=30)
    num_seen = 0
    while engine.has_work:
        before, names = engine.stats()["num_retracted_reqs"], {r.name for r in engine.scheduler.running}
        engine.step()
        if engine.stats()["num_retracted_reqs"] != before:
            num_seen += 1
            assert {r.name for r in engine.scheduler.running} < names
    assert num_seen


def test_admission_keeps_pages_back_for_those_that_run() -> None:
    """Without it a second request would be let in only to lose its memory a few steps later."""
    engine = make_engine(num_pages=19, max_context=76)
    submit(engine, "first", PROMPTS[7], max_tokens=46)  # 8 pages now, 19 at the end
    submit(engine, "second", PROMPTS[7], max_tokens=4)
    for _ in range(4):
        engine.step()
    assert engine.stats()["num_running_reqs"] == 1
    run(engine)
    assert engine.stats()["num_retracted_reqs"] == 0


def test_planning_further_than_one_step_ahead_is_a_bug() -> None:
    engine = make_engine()
    submit(engine, "a", [1])
    engine.scheduler.plan()
    engine.scheduler.plan()
    with pytest.raises(InvariantError, match="in flight"):
        engine.scheduler.plan()


@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_models_with_one_kind_of_state_run(kind: str) -> None:
    from tests.engine.stub import stub_config

    config = stub_config(mla_layers=() if kind == "kda" else (0, 1, 2, 3, 4))
    engine = make_engine(StubModel(config))
    submit(engine, "a", PROMPTS[4], n=2, max_tokens=9)
    deltas = run(engine)
    params = SamplingParams(temperature=0.0, max_tokens=9)
    assert tokens_of(deltas["a", 1]) == expected(PROMPTS[4], params, config=config, index=1)


def test_a_small_share_of_a_small_step_still_lets_a_long_prompt_advance() -> None:
    engine = make_engine(max_batch_tokens=2, max_running=1, long_prompt_tokens=12, long_share=0.1)
    submit(engine, "long", PROMPTS[3], max_tokens=2)
    submit(engine, "short", PROMPTS[1], max_tokens=2)
    deltas = run(engine)
    assert tokens_of(deltas["long", 0]) == expected(PROMPTS[3], SamplingParams(temperature=0.0, max_tokens=2))
