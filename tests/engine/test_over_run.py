"""A row that ran over the end of its request is harmless to the prefix cache too."""

from __future__ import annotations

import pytest

from tests.engine.stub import EOS, StubModel, make_engine, run, submit, tokens_of
from tests.engine.truth import check_tree


@pytest.mark.parametrize("overlap", [False, True])
def test_a_working_slot_that_ran_over_the_end_is_not_kept(overlap: bool) -> None:
    """Serving.md G-50: the request ends on the grid, where its working slot becomes a checkpoint; the row of the step
    that was in flight has changed that slot by then."""
    num_on_grid = 0
    for n in (6, 7, 19, 31):
        engine = make_engine(
            StubModel(can_end=True), prefix_cache=True, hash_endpoint=4, track_interval=400, overlap=overlap
        )
        prompt = [(7 * n + 3 * i) % 59 for i in range(n % 13 + 3)]
        submit(engine, "a", prompt, max_tokens=40, temperature=0.9, seed=n)
        found = tokens_of(run(engine)["a", 0])
        num_on_grid += found[-1] == EOS and (len(prompt) + len(found) - 1) % 4 == 0
        check_tree(engine)
        engine.close()
    assert num_on_grid == 4
