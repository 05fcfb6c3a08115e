"""Snapshots: what a forward keeps of the middle of a span is the state of a request whose prefill ended there.

Faults reported of other engines are named by their number in docs/spec/serving.md G.1. Slots begin full of NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.spans import Spans
from baltoro.model.build import new_model
from baltoro.model.cache_map import CacheMap, Snapshot
from baltoro.model.config import K3Config
from baltoro.model.context import ForwardContext
from baltoro.model.decoder import K3Model
from baltoro.model.state import CacheViews
from tests.model.harness import Harness, random_tokens
from tests.tiny import tiny_k3, tiny_kimi_linear

CONFIGS = {"k3": tiny_k3(), "kimi-linear": tiny_kimi_linear()}
CASES = [(name, dtype) for name in CONFIGS for dtype in (torch.float64, torch.float32)]
LENGTHS = (70, 130, 200)
DEPTHS = [(i, depth) for i, n in enumerate(LENGTHS) for depth in (64, 128, 192) if depth < n]


@pytest.fixture(params=CASES, scope="module", ids=lambda case: f"{case[0]}-{str(case[1])[6:]}")
def model(request: pytest.FixtureRequest) -> K3Model:
    name, dtype = request.param
    return slow(CONFIGS[name], dtype)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """A matrix product split over threads rounds a row as its place among the rows will have it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def slow(config: K3Config, dtype: torch.dtype) -> K3Model:
    return new_model(config, dtype=dtype, std=0.2, decay="slow", seed=1)


def prompts(model: K3Model) -> list[list[int]]:
    return [random_tokens(n, model.config.vocab_size, seed=n) for n in LENGTHS]


def near(model: K3Model, found: list[Tensor], expected: list[Tensor]) -> None:
    tolerance = 1e-10 if model.dtype == torch.float64 else 1e-4
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def ended(model: K3Model, tokens: list[int]) -> list[Tensor]:
    """The state of a request whose prefill is `tokens`."""
    harness = Harness(model, 1)
    harness.step([(0, tokens)])
    return harness.state(1)


def with_snapshots(model: K3Model, *, packed: bool) -> list[tuple[Harness, int, int, int]]:
    """(harness, request, depth, slot) for every depth of every prompt, in one forward or in one for each prompt."""
    tokens, kept = prompts(model), []
    groups = [DEPTHS] if packed else [[item for item in DEPTHS if item[0] == i] for i in range(3)]
    for group in groups:
        harness, members = Harness(model, 3, num_spare=len(group)), sorted({i for i, _ in group})
        asked = [(members.index(i), depth, 4 + at) for at, (i, depth) in enumerate(group)]
        harness.step([(i, tokens[i]) for i in members], snapshots=asked)
        kept += [(harness, i, depth, slot) for (i, depth), (_, _, slot) in zip(group, asked, strict=True)]
    return kept


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
def test_a_snapshot_is_the_state_of_a_prefill_that_ended_there(model: K3Model, packed: bool) -> None:
    """G-05, G-08: several in one span, three ragged requests in one forward, every layer and both kinds of state."""
    tokens = prompts(model)
    for harness, i, depth, slot in with_snapshots(model, packed=packed):
        near(model, harness.state(slot), ended(model, tokens[i][:depth]))


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_snapshot_is_that_state_to_the_last_bit(name: str, dtype: torch.dtype) -> None:
    """G-05, where nothing else rounds differently: both forwards have the same rows in the same places, every expert
    is active, so that each gets the same rows too, and no layer attends over lengths."""
    config = CONFIGS[name].with_(mla_layers=(), num_active_experts=CONFIGS[name].num_experts, num_mtp_layers=0)
    model = slow(config, dtype)
    one, three, many = prompts(model)
    inside = Harness(model, 3, num_spare=5)
    inside.step(
        [(0, one), (1, three), (2, many)],
        snapshots=[(0, 64, 4), (1, 64, 5), (1, 128, 6), (2, 192, 7), (2, 64, 8)],
    )
    for i, depth, slot in ((0, 64, 4), (1, 128, 6), (2, 64, 8)):
        ends = Harness(model, 4)
        rest = prompts(model)
        tail, rest[i] = rest[i][depth:], rest[i][:depth]
        work = [(n, rest[n]) for n in range(3)]
        ends.step([*work[: i + 1], (3, tail), *work[i + 1 :]])
        own = int(ends.slots[i])
        assert all(torch.equal(a, b) for a, b in zip(inside.state(slot), ends.state(own), strict=True)), (i, depth)


def test_a_request_continued_from_a_snapshot_has_the_logits_of_the_unbroken_run(model: K3Model) -> None:
    tokens = prompts(model)
    for harness, i, depth, slot in with_snapshots(model, packed=True):
        unbroken = Harness(model, 1).run(0, tokens[i], ())
        harness.restore(i, slot, depth)
        rest = torch.cat([harness.step([(i, [tokens[i][depth]])])[0], harness.step([(i, tokens[i][depth + 1 :])])[0]])
        near(model, [rest], [unbroken[depth:]])


def test_a_snapshot_of_another_depth_shows(model: K3Model) -> None:
    """G-10, and proof of the test above: rows of 128 tokens with the state of 64 give other logits."""
    tokens = prompts(model)[2]
    unbroken = Harness(model, 1).run(0, tokens, ())
    harness = Harness(model, 1, num_spare=2)
    harness.step([(0, tokens)], snapshots=[(0, 64, 2), (0, 128, 3)])
    for slot, is_right in ((2, False), (3, True)):
        harness.restore(0, slot, 128)
        gap = (harness.step([(0, tokens[128:])])[0] - unbroken[128:]).abs().max()
        assert (gap < 1e-3) == is_right


def test_a_span_that_starts_off_the_grid_keeps_what_lies_ahead_of_it_only(model: K3Model) -> None:
    """G-12: after 70 tokens, a span of 100 passes 128; 64 lies behind it and is nobody's to write."""
    tokens = prompts(model)[2]
    harness = Harness(model, 1, num_spare=2)
    harness.step([(0, tokens[:70])])
    harness.step([(0, tokens[70:170])], snapshots=[(0, 58, 2)])
    near(model, harness.state(2), ended(model, tokens[:128]))
    assert all(view.isnan().all() for view in harness.state(3))
    for length in (64 - 70, 64, 128):  # 64 itself, 134, past the end
        with pytest.raises(ShapeError):
            harness.step([(0, tokens[170:190])], snapshots=[(0, length, 3)])


def test_the_end_of_a_span_can_be_kept_anywhere(model: K3Model) -> None:
    tokens = prompts(model)
    harness = Harness(model, 2, num_spare=3)
    harness.step([(0, tokens[0]), (1, tokens[1])], snapshots=[(1, 130, 3), (1, 64, 4), (0, 70, 5)])
    for slot, request in ((3, 1), (5, 0)):
        own = int(harness.slots[request])
        assert all(torch.equal(a, b) for a, b in zip(harness.state(slot), harness.state(own), strict=True))
    near(model, harness.state(4), ended(model, tokens[1][:64]))


def test_decodes_in_the_step_do_not_shift_snapshots(model: K3Model) -> None:
    tokens = prompts(model)
    harness = Harness(model, 3, num_spare=2)
    harness.step([(0, tokens[0]), (1, tokens[1][:30])])
    harness.step([(2, tokens[2]), (0, [3]), (1, [5])], snapshots=[(0, 128, 4)])
    near(model, harness.state(4), ended(model, tokens[2][:128]))
    near(model, harness.state(int(harness.slots[1])), ended(model, [*tokens[1][:30], 5]))
    assert all(view.isnan().all() for view in harness.state(5))


def test_snapshots_write_their_slots_and_change_nothing_else(model: K3Model) -> None:
    tokens = prompts(model)
    plain, asked = (Harness(model, 2, num_spare=2) for _ in range(2))
    logits = plain.step([(0, tokens[0]), (1, tokens[1])])
    logits_asked = asked.step([(0, tokens[0]), (1, tokens[1])], snapshots=[(1, 128, 4)])
    assert all(torch.equal(a, b) for a, b in zip(logits, logits_asked, strict=True))
    for slot in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(plain.state(slot), asked.state(slot), strict=True))
    assert all(view.isnan().all() for slot in (0, 3) for view in asked.state(slot))
    assert all(view.isfinite().all() for view in asked.state(4))


def test_a_slot_that_had_another_owner_is_written_whole_and_read_never(model: K3Model) -> None:
    """G-07, G-17: A, then B in the slots of A, then A again from its snapshot and once more from nothing."""
    a, b = prompts(model)[1], prompts(model)[2]
    unbroken = Harness(model, 1).run(0, a, ())
    harness = Harness(model, 1, num_spare=2)
    harness.step([(0, a)], snapshots=[(0, 64, 2), (0, 128, 3)])
    rows = [view.clone() for view in harness.views.kv]
    harness.done[0] = 0
    harness.step([(0, b)], snapshots=[(0, 192, 3)])
    near(model, harness.state(3), ended(model, b[:192]))
    for view, kept in zip(harness.views.kv, rows, strict=True):
        view.copy_(kept)
    harness.restore(0, 2, 64)
    near(model, [harness.step([(0, a[64:])])[0]], [unbroken[64:]])
    harness.done[0] = 0
    near(model, [harness.step([(0, a)])[0]], [unbroken])


def test_the_grid_of_states_is_that_of_the_kernel(model: K3Model) -> None:
    assert model.state_chunk == 64
    tokens = prompts(model)[1]
    harness = Harness(model, 1, num_spare=1)
    with pytest.raises(ShapeError, match="multiples of 64"):
        harness.step([(0, tokens)], snapshots=[(0, 65, 2)])


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        ([Snapshot(0, 1, 3)], "no prefill span"),
        ([Snapshot(2, 1, 3)], "no prefill span"),
        ([Snapshot(1, 0, 3)], "outside its span"),
        ([Snapshot(1, 6, 3)], "outside its span"),
        ([Snapshot(1, 5, 3), Snapshot(1, 4, 3)], "one slot"),
    ],
)
def test_snapshots_that_cannot_be_are_refused(taken: list[Snapshot], message: str) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    cache = CacheMap(nothing, nothing, nothing[None], 4, CacheViews((), (), ()), tuple(taken))
    with pytest.raises(ShapeError, match=message):
        ForwardContext(torch.zeros(6, dtype=torch.int64), Spans.build([1, 5], [9, 0]), cache, num_decodes=1)
