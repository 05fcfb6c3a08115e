"""A device with random delays: overlapped engines answer the same, whatever is late, and free memory is NaN."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from baltoro.protocol.sampling import SamplingParams
from tests.engine.late import make_late
from tests.engine.stub import VOCAB, StubModel, expected, make_engine, run, submit, tokens_of
from tests.engine.truth import check_tree

CASES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight": {"num_pages": 20, "num_slots": 3, "max_context": 64},
    "page 1": {"page_size": 1, "num_pages": 96, "max_context": 64},
    "page 16": {"page_size": 16, "num_pages": 8, "max_context": 64},
    "fixed pool": {"pool": "fixed", "num_pages": 24, "max_context": 64},
    "host": {"num_pages": 20, "max_context": 64, "host_cache_bytes": 20000, "retract_to": "host", "retract_every": 5},
    "no cache": {"prefix_cache": False, "retract_every": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_a_late_device_changes_no_token(case: str) -> None:
    options: dict[str, Any] = {"prefix_cache": True, "hash_endpoint": 4, "track_interval": 8, "pool": "unified"}
    random = Random(case)
    engine = make_engine(StubModel(can_end=True), overlap=True, max_batch_tokens=20, **(options | CASES[case]))
    make_late(engine, seed=1)
    asked = {}
    for n in range(14):
        prompt = [
            *range(random.choice([0, 9, 17])),
            *(random.randrange(VOCAB - 1) for _ in range(random.randint(1, 9))),
        ]
        params: dict[str, Any] = {"max_tokens": random.randint(1, 16), "temperature": 0.9, "seed": n}
        asked[f"r{n}"] = (prompt, SamplingParams(**params))
        submit(engine, f"r{n}", prompt, **params)
    deltas = run(engine)
    for name, (prompt, sampling) in asked.items():
        assert tokens_of(deltas[name, 0]) == expected(prompt, sampling, can_end=True), name
    if engine.config.prefix_cache:
        check_tree(engine)
    engine.flush()
    engine.close()
    assert engine.stats()["pages_used"] == engine.stats()["slots_used"] == 0
