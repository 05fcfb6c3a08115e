"""Long and short requests: the share of the long ones in memory and in a step."""

from __future__ import annotations

from tests.engine.stub import make_engine, run, submit


def test_long_requests_run_together_while_their_share_of_memory_lasts() -> None:
    engine = make_engine(long_prompt_tokens=8, long_share=0.5)  # 160 tokens, 80 for the long ones
    for name in ("a", "b"):
        submit(engine, name, range(30))
    submit(engine, "c", range(30))
    for _ in range(6):
        engine.step()
        engine.audit()
    assert [request.request_id for request in engine.scheduler.running] == ["a", "b"]
    run(engine)


def test_the_share_of_a_step_is_counted_anew_in_every_step() -> None:
    engine = make_engine(long_prompt_tokens=8, long_share=0.5, max_running=1, max_batch_tokens=16)
    submit(engine, "long", range(30))
    engine.step()  # alone: takes all 16
    submit(engine, "short", range(4))
    engine.step()
    assert engine.scheduler.running[0].num_computed == 24
    assert set(run(engine)) == {("long", 0), ("short", 0)}


def test_a_short_request_passes_a_long_one_that_has_no_share_left() -> None:
    engine = make_engine(long_prompt_tokens=8, long_share=0.25)  # 40 tokens for the long ones
    for name in ("a", "b"):
        submit(engine, name, range(30))
    submit(engine, "short", range(4))
    for _ in range(3):
        engine.step()
        engine.audit()
    assert [request.request_id for request in engine.scheduler.running] == ["a", "short"]
    assert set(run(engine)) == {("a", 0), ("b", 0), ("short", 0)}
