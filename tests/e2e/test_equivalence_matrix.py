"""Every cell of the equivalence matrix gives the tokens and logprobs of the oracle, and does what it is there for.

CI runs a covering set (every pair of values of two axes is in one of its cells) in float64, the nightly set the full
product, and the covering set in float32.
    float64  tokens equal, logprobs within 1e-9
    float32  logprobs within 1e-5 of the oracle's for the same tokens
`matrix.py` says what a cell is, `conversation.py` what it serves. Short prompts, one option at a time:
`test_equivalence.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from baltoro.engine.engine import Engine
from baltoro.engine.lookup import Found, PrefixLookup
from baltoro.engine.request import Request
from tests.e2e.conversation import Ask, Report, check_answers, check_hits, make_engine, options_of, serve, words
from tests.e2e.matrix import AXES, NUM_CELLS, Cell, covering, full_product, values_of
from tests.engine.stub import run

FLOAT64, FLOAT32 = torch.float64, torch.float32
DTYPES = (FLOAT64, FLOAT32)
KIMI_LINEAR = (
    Cell("overlap", 16, "on", 37, "recompute", "turns", "unified"),
    Cell("plain", 1, "host", 150, "host", "interval", "fixed"),
    Cell("overlap", 192, "disk", 1000, "off", "turns", "unified"),
)
STEPWISE = Cell("plain", 64, "on", 37, "off", "interval", "unified")


def check_cell(cell: Cell, name: str, dtype: torch.dtype, folder: Path) -> None:
    """Serve, compare, and see that what the cell is named for has happened."""
    report = serve(cell, name, dtype, folder)
    check_answers(report, name, dtype)
    check_hits(report, cell)
    check_events(report, cell)


def check_events(report: Report, cell: Cell) -> None:
    """Hits, loads, retractions, backups."""
    counts, due = report.counts, set()
    if cell.retract != "off":
        due.add("retracted")
    if cell.retract == "host" and cell.cache == "host":
        due.add("backups")
    if cell.cache != "off":
        due |= {"hit_tokens", "snapshots"}
    if cell.cache in ("host", "disk"):
        due |= {"evicted", "loaded_tokens"}
    if cell.cache == "disk":
        due |= {"written", "read"}
    assert not {event for event in due if not counts[event]}, f"these did not happen in {cell}"
    assert not counts["bad"]


@pytest.mark.slow
@pytest.mark.parametrize("cell", covering(), ids=str)
def test_a_cell_equals_the_oracle(cell: Cell, tmp_path: Path) -> None:
    check_cell(cell, "k3", FLOAT64, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", covering(), ids=str)
def test_a_cell_in_float32_equals_the_oracle(cell: Cell, tmp_path: Path) -> None:
    check_cell(cell, "k3", FLOAT32, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", KIMI_LINEAR, ids=str)
def test_a_cell_of_kimi_linear_equals_the_oracle(cell: Cell, tmp_path: Path) -> None:
    check_cell(cell, "kimi_linear", FLOAT64, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", AXES["page"])
@pytest.mark.parametrize("where", AXES["cache"])
def test_the_full_product_equals_the_oracle(where: str, page: int, tmp_path: Path) -> None:
    """All that differ in the other axes, in one test; every one that fails is told. In float64, whose bound on logprobs
    is the tighter one by four orders."""
    failed = []
    for cell in full_product():
        if (cell.cache, cell.page) != (where, page):
            continue
        try:
            check_cell(cell, "k3", FLOAT64, tmp_path / str(cell))
        except AssertionError as error:
            failed.append(f"{cell}: {error}")
    assert not failed, "\n".join(failed)


def test_the_cells_of_ci_cover_every_pair() -> None:
    """And are what they are every time; all three axes of most triples meet too."""
    cells = covering()
    assert len(set(cells)) == NUM_CELLS
    assert cells == covering.__wrapped__()
    for size, share in ((2, 1.0), (3, 0.85)):
        wanted = set().union(*(values_of(cell, size) for cell in full_product()))
        found = set().union(*(values_of(cell, size) for cell in cells))
        assert len(found) >= share * len(wanted)


def test_every_pair_of_values_is_possible_but_those_that_mean_nothing() -> None:
    """Without a cache there is nothing to retain, without a host nowhere to back up to."""
    found = set().union(*(values_of(cell, 2) for cell in full_product()))
    wanted = {((one, a), (two, b)) for one, two in combinations(AXES, 2) for a in AXES[one] for b in AXES[two]} - {
        (("cache", "off"), ("retention", name)) for name in AXES["retention"][1:]
    }
    assert wanted - found == {(("cache", where), ("retract", "host")) for where in ("off", "on")}


# ---- teeth -----------------------------------------------------------------------------------------------------------
def _second_turn(engine: Engine) -> Report:
    """A prompt of 200 tokens, then one that goes on from it; the report is of the second alone."""
    first, report = Ask("first", words(1, 200)), Report()
    engine.add(first.submit)
    answer = [token for delta in run(engine)["first", 0] for token in delta.token_ids]
    second = Ask("second", (*first.prompt, *answer, *words(2, 20)))
    engine.add(second.submit)
    report.asks, report.deltas = {"second": second}, run(engine)
    assert report.cached("second") == 192
    return report


@pytest.mark.parametrize("dtype", DTYPES, ids=("float64", "float32"))
def test_the_checkpoint_of_another_depth_would_be_seen(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV of 192 tokens with the state of 128 is off by far more than any bound here."""
    check_answers(_second_turn(make_engine("k3", dtype, options_of(STEPWISE, "k3", dtype, tmp_path))), "k3", dtype)
    find = PrefixLookup.find

    def find_wrongly(lookup: PrefixLookup, request: Request) -> Found:
        found = find(lookup, request)
        if not found.depth:
            return found
        shallower = lookup.tree.match(request.namespace, request.hold.ids, found.depth - 1)
        assert found.match is not None
        assert (found.depth, shallower.depth) == (192, 128)
        return replace(found, match=replace(found.match, state=shallower.state))

    monkeypatch.setattr(PrefixLookup, "find", find_wrongly)
    report = _second_turn(make_engine("k3", dtype, options_of(STEPWISE, "k3", dtype, tmp_path)))
    with pytest.raises(AssertionError, match="second/0"):
        check_answers(report, "k3", dtype)


def test_a_state_lost_in_a_checkpoint_would_be_seen(tmp_path: Path) -> None:
    """Zeros in every state that the tree keeps change what is restored from it."""
    engine = make_engine("k3", FLOAT32, options_of(STEPWISE, "k3", FLOAT32, tmp_path))
    engine.add(Ask("first", words(1, 200)).submit)
    run(engine)
    for part in engine.pool.slot_views():
        part[:] = 0.0
    again, report = Ask("again", words(1, 200)), Report()
    engine.add(again.submit)
    report.asks, report.deltas = {"again": again}, run(engine)
    assert report.cached("again") == 192
    with pytest.raises(AssertionError, match="logprobs are off"):
        check_answers(report, "k3", FLOAT32)
