"""Draft windows: the logits of decoding one by one, states that stay, a fold that moves them, steps replayed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from baltoro.cache.windows import WindowRecords
from baltoro.engine.config import MAX_WINDOW, EngineConfig
from baltoro.engine.engine import Engine
from baltoro.errors import ConfigError, InvariantError, ShapeError
from baltoro.kernels.kda import fused
from baltoro.kernels.mla import split_decode
from baltoro.kernels.spans import Spans
from baltoro.model.build import new_model
from baltoro.model.cache_map import CacheMap
from baltoro.model.config import K3Config
from baltoro.model.context import DraftWindows, ForwardContext
from tests.engine.stub import StubModel
from tests.engine.test_graphs import FakeBackend, answers
from tests.engine.walker import Walker, greedy, speculate
from tests.model.adapters import random_adapter
from tests.model.harness import random_tokens
from tests.tiny import tiny_k3, tiny_kimi_linear

LENGTHS = (1, 13, 30, 4)
"""Of prompts: a window behind one token is wider than what is before it."""
TOKENS = 20
"""Of each request behind its prompt."""
CLOSE = {"atol": 1e-10, "rtol": 0.0}


def make_engine(config: K3Config | None = None, **options: Any) -> Engine:
    model = new_model(config or tiny_k3(), dtype=torch.float64, seed=3, std=0.15, decay="slow").merge()
    defaults: dict[str, Any] = {"page_size": 4, "num_pages": 80, "num_slots": 5, "pool": "fixed", "prefix_cache": False}
    defaults |= {"dtype": "float64", "is_poisoned": True, "max_batch_tokens": 24, "max_context": 80, "max_running": 5}
    return Engine(model, EngineConfig(**(defaults | options)))


def records(max_requests: int) -> WindowRecords:
    """For windows of 4 tokens of `tiny_k3`."""
    return WindowRecords(4, max_requests, 4, heads=3, dim=8, dtype=torch.float64, device="cpu")


class Truth:
    """Random tokens of every request, decoded one by one: logits, and the state behind each token."""

    def __init__(self, engine: Engine, seed: int = 3, adapters: Sequence[int] = ()) -> None:
        vocab = engine.model_config.vocab_size
        self.tokens = [random_tokens(length + TOKENS, vocab, seed + n) for n, length in enumerate(LENGTHS)]
        self.walker = walker = Walker(engine, len(LENGTHS))
        walker.adapters = list(adapters) or walker.adapters
        self.logits: list[list[Tensor]] = [[] for _ in LENGTHS]
        self.states: list[dict[int, list[Tensor]]] = [{} for _ in LENGTHS]
        self.start(walker)
        for place in range(TOKENS):
            work = [(n, self.tokens[n][length + place : length + place + 1]) for n, length in enumerate(LENGTHS)]
            for n, rows in enumerate(walker.step(work)):
                self.logits[n].append(rows[0])
                self.states[n][walker.done[n]] = walker.state(n)

    def start(self, walker: Walker) -> None:
        """Prefill every prompt."""
        for n, length in enumerate(LENGTHS):
            walker.step([(n, self.tokens[n][:length])])
            self.states[n][length] = walker.state(n)

    def at(self, n: int, position: int) -> Tensor:
        """Logits [X] behind the token at `position` of a request."""
        return self.logits[n][position - LENGTHS[n]]


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(make_engine())


def walk(engine: Engine, truth: Truth, seed: int, adapters: Sequence[int] = ()) -> set[tuple[int, int]]:
    """Windows of random requests, true up to a random token, folded up to a random one that is still true; then decodes
    of some. Everything against the truth. Returns (tokens of a window, how many stayed) as they came."""
    walker, dice, seen = Walker(engine, len(LENGTHS)), random.Random(seed), set[tuple[int, int]]()
    walker.adapters = list(adapters) or walker.adapters
    truth.start(walker)
    vocab, width = engine.model_config.vocab_size, walker.verifier.width
    left = dict(enumerate(LENGTHS))
    while left:
        chosen = dice.sample(sorted(left), dice.randint(1, len(left)))
        work, good = [], []
        for n in chosen:
            count = dice.randint(1, min(width, len(truth.tokens[n]) - walker.done[n]))
            true = dice.randint(1, count)  # the rest is spoilt
            tokens = truth.tokens[n][walker.done[n] :][:count]
            work.append((n, tokens[:true] + [(token + 7) % vocab for token in tokens[true:]]))
            good.append(true)
        before = [walker.state(n) for n in range(len(LENGTHS))]
        found = walker.verify(work)
        for n, old in enumerate(before):
            assert same_bits(walker.state(n), old), "verify moved a state"
        for (n, _), true, logits, ids in zip(work, good, found.logits, found.ids.tolist(), strict=True):
            for t in range(true):
                torch.testing.assert_close(logits[t], truth.at(n, walker.done[n] + t), **CLOSE)
                assert ids[t] == int(logits[t].argmax())
        accepted = [dice.randint(0, true) for true in good]
        walker.fold(work, accepted)
        seen |= {(len(window), count) for (_, window), count in zip(work, accepted, strict=True)}
        decodes = [n for n in chosen if walker.done[n] < len(truth.tokens[n]) and dice.random() < 0.5]
        for n in chosen:
            check_state(walker, truth, n)
        if decodes:
            check_decodes(walker, truth, decodes)
        left = {n: length for n, length in left.items() if walker.done[n] < len(truth.tokens[n])}
    return seen


def check_decodes(walker: Walker, truth: Truth, chosen: Sequence[int]) -> None:
    """One ordinary step more."""
    logits = walker.step([(n, truth.tokens[n][walker.done[n] :][:1]) for n in chosen])
    for n, rows in zip(chosen, logits, strict=True):
        torch.testing.assert_close(rows[0], truth.at(n, walker.done[n] - 1), **CLOSE)
        check_state(walker, truth, n)


def check_state(walker: Walker, truth: Truth, n: int) -> None:
    for got, expected in zip(walker.state(n), truth.states[n][walker.done[n]], strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """NaN and all."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("width", [3, 8])
def test_windows_and_folds_equal_decoding_one_by_one(truth: Truth, width: int, is_captured: bool) -> None:
    engine, backend = make_engine(verify_window=width), FakeBackend()
    if is_captured:
        engine.runner.capture(3, 20, backend)  # four windows run eagerly
    seen = walk(engine, truth, seed=width)
    assert {length for length, _ in seen} >= {1, 2, 3} and {count for _, count in seen} >= {0, 1, 2}
    assert bool(backend.replays) == is_captured


def test_every_accepted_length_of_a_full_window(truth: Truth) -> None:
    engine, everyone = make_engine(verify_window=8), range(len(LENGTHS))
    walker = Walker(engine, len(LENGTHS))
    truth.start(walker)
    arena = engine.pool.arena.clone()
    for count in range(9):
        engine.pool.arena.copy_(arena)
        walker.done = list(LENGTHS)
        work = [(n, truth.tokens[n][length : length + 8]) for n, length in enumerate(LENGTHS)]
        walker.verify(work)
        walker.fold(work, [count] * len(work))
        for n in everyone:
            check_state(walker, truth, n)
        check_decodes(walker, truth, everyone)


@pytest.mark.parametrize("config", [tiny_kimi_linear(), tiny_k3(mla_layers=()), tiny_k3(mla_layers=tuple(range(7)))])
def test_other_models_verify_too(config: K3Config) -> None:
    """Plain residual and softplus gate; layers of one kind only."""
    walk(make_engine(config, verify_window=4), Truth(make_engine(config)), seed=1)


def test_a_step_writes_its_rows_and_the_sinks_alone() -> None:
    """Three windows in a graph of four, one full; poisoned memory around them; a fold then writes one slot."""
    engine, backend = make_engine(verify_window=5), FakeBackend()
    engine.runner.capture(4, 20, backend)
    walker = Walker(engine, 4)
    for n in range(4):
        walker.step([(n, random_tokens(6, 131, n))])
    work = [(0, [1, 2, 3, 4, 5]), (2, [6, 7]), (3, [6])]
    before, replays = engine.pool.arena.clone(), backend.replays
    found = walker.verify(work)
    assert backend.replays == replays + 1 and torch.isfinite(found.logits).all(), "padded tokens are finite as well"
    row = engine.pool.layout.row
    assert row is not None
    written = {byte // row.num_bytes for byte in (engine.pool.arena != before).nonzero().flatten().tolist()}
    places = [(n, place) for n, window in work for place in range(6, 6 + len(window))]
    expected = {int(walker.pages[n, place // 4]) * 4 + place % 4 for n, place in places}
    assert expected <= written <= expected | set(range(4)), "rows of these tokens and of page 0"
    before = engine.pool.arena.clone()
    walker.fold(work, [0, 2, 0])
    size, base = engine.pool.layout.slot_bytes, engine.pool.shape.slots_base
    changed = (engine.pool.arena != before).nonzero().flatten()
    assert {(byte - base) // size for byte in changed.tolist()} == {walker.slots[2]}


def test_what_fills_up_sees_only_what_it_writes() -> None:
    """Tokens and requests alike: on a GPU a NaN would reach others through products of whole windows."""
    engine = make_engine(verify_window=6)
    walker = Walker(engine, 4)
    walker.step([(0, [1, 2, 3])])
    walker.verify([(0, [4, 5])])
    facts, tokens, rows = walker.verifier._rows.split([4, 6, 6])
    assert facts.T.tolist() == [[walker.slots[0], 5, 2, 0], *[[0, 6, 6, 0]] * 4]
    assert tokens[:, 0].tolist() == [4, 5, 0, 0, 0, 0] and not tokens[:, 1:].any()
    first = int(walker.pages[0, 0]) * 4
    assert rows[:, 0].tolist() == [first + 3, int(walker.pages[0, 1]) * 4, 2, 3, 0, 1]
    assert rows[:, 1:].T.tolist() == [[0, 1, 2, 3, 0, 1]] * 4, "six keys over the sink page, all written in this step"
    assert not walker.verifier._table.rows[1:].any() and walker.verifier._table.rows.shape[1] >= 2


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
def test_windows_of_adapters(is_captured: bool) -> None:
    """Base and two adapters in one step, experts and all, each as when it decodes; a second graph has their terms."""
    slots, backend = (0, 1, 2, 1), FakeBackend()
    plain, engine = (make_engine(max_loras=2, max_lora_rank=3, verify_window=width) for width in (0, 4))
    for one in (plain, engine):
        assert one.bank is not None
        for slot, rank in ((1, 2), (2, 3)):
            adapter = random_adapter(one.model_config, rank, seed=slot, std=0.3, dtype=torch.float64)
            one.bank.install(slot, adapter)
    told: list[tuple[int, int]] = []
    if is_captured:
        engine.runner.fixed_slots = 2
        engine.runner.prepare_verify(records(5), 21)
        engine.runner.capture(4, 20, backend, lambda done, total: told.append((done, total)))
        assert told == [(n + 1, 12) for n in range(12)], "three sizes, with and without, windows and decodes"
    walk(engine, Truth(plain, adapters=slots), seed=2, adapters=slots)
    assert bool(backend.replays) == is_captured


def test_windows_and_prompts_in_one_step(truth: Truth) -> None:
    """The model takes both: windows come first, as decodes do."""
    engine = make_engine(verify_window=4)
    walker = Walker(engine, len(LENGTHS))
    for n in (0, 1):
        walker.step([(n, truth.tokens[n][: LENGTHS[n]])])
    spans = [walker.span(n, truth.tokens[n][LENGTHS[n] :][:4]) for n in (0, 1)] + [walker.span(2, truth.tokens[2][:9])]
    table = torch.zeros(3, 6, dtype=torch.int64)
    rows = []
    for line, span in zip(table, spans, strict=True):
        pages = torch.from_numpy(span.pages)
        line[: len(pages)] = pages
        places = torch.arange(span.start, span.end)
        rows.append(pages[places // 4] * 4 + places % 4)
    windows = DraftWindows(
        torch.tensor([4, 4]), WindowRecords(4, 2, 4, heads=3, dim=8, dtype=torch.float64, device="cpu").of(2)
    )
    cache = CacheMap(
        torch.tensor([span.slot for span in spans]), torch.cat(rows), table, 4, engine.runner.views,
        lengths=torch.tensor([span.end for span in spans[:2]]),
    )  # fmt: skip
    tokens = torch.tensor([token for span in spans for token in span.tokens])
    lengths, starts = [len(span.tokens) for span in spans], [span.start for span in spans]
    ctx = ForwardContext(tokens, Spans.build(lengths, starts), cache, num_decodes=2, windows=windows)
    with torch.no_grad():
        found = engine.runner.model(ctx).split(lengths)
    for n in (0, 1):
        expected = torch.stack([truth.at(n, LENGTHS[n] + t) for t in range(4)])
        torch.testing.assert_close(found[n], expected, **CLOSE)
    alone = Walker(make_engine(), len(LENGTHS))
    torch.testing.assert_close(found[2], alone.step([(2, truth.tokens[2][:9])])[0], **CLOSE)
    walker.done[2] = 9
    for got, expected in zip(walker.state(2), alone.state(2), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)
    with pytest.raises(ShapeError, match="length 4"):
        ForwardContext(tokens[1:], Spans.build([3, 4, 9], starts), cache, num_decodes=2, windows=windows)


def test_speculation_draws_the_tokens_of_plain_decodes() -> None:
    prompts = [random_tokens(length, 131, length) for length in LENGTHS]
    expected = greedy(Walker(make_engine(), 4), prompts, 24)
    for is_captured in (False, True):
        engine = make_engine(verify_window=6)
        if is_captured:
            engine.runner.capture(4, 20, FakeBackend())
        found, steps = speculate(Walker(engine, 4), prompts, expected, 131)
        assert found == expected and steps < 20


def test_an_engine_with_room_for_windows_serves_as_before() -> None:
    """Its scheduler plans none; without the option there is nothing."""
    plain, engine, told = make_engine(), make_engine(verify_window=4), []
    engine.runner.capture(4, 20, FakeBackend(), lambda done, total: told.append((done, total)))
    assert plain.runner.verifier is None and engine.runner.verifier is not None
    assert answers(engine) == answers(plain)
    assert told == [(n + 1, 6) for n in range(6)]


def test_records_take_what_a_window_needs() -> None:
    """K3's widths, a rank of 12 heads: x and v in bf16, keys, decays and beta in FP32."""
    whole = WindowRecords(69, 2, 8, heads=12, dim=128, dtype=torch.bfloat16, device="meta")
    assert whole.num_bytes == 69 * 2 * 8 * 12 * (3 * 128 * 2 + 128 * 2 + 2 * 128 * 4 + 4)
    part = whole.of(1)
    assert part.k.shape == (69, 1, 8, 12, 128) and part.k.is_contiguous()


def test_a_fold_needs_a_run_of_its_own() -> None:
    engine = make_engine(verify_window=4)
    walker = Walker(engine, 4)
    walker.step([(0, [1, 2, 3])])
    with pytest.raises(InvariantError, match="fold"):
        walker.fold([(0, [4])], [1])
    with pytest.raises(ShapeError, match="1 to 4 tokens"):
        walker.verify([(0, [1, 2, 3, 4, 5])])
    with pytest.raises(ShapeError, match="1 to 5 windows"):
        walker.verify([(0, [1])] * 6)
    walker.verify([(0, [4])])
    walker.fold([(0, [4])], [1])
    with pytest.raises(InvariantError, match="fold"):
        walker.fold([(0, [4])], [1])


def test_windows_that_cannot_be_are_refused() -> None:
    for window in (-1, 1, 9):
        with pytest.raises(ConfigError, match=f"verify_window {window} must be"):
            EngineConfig(verify_window=window)
    with pytest.raises(ConfigError, match="max_batch_tokens"):
        EngineConfig(verify_window=8, max_batch_tokens=7)
    with pytest.raises(ConfigError, match="max_context"):
        EngineConfig(verify_window=8, max_context=8)
    with pytest.raises(ConfigError, match="this model"):
        Engine(StubModel(), EngineConfig(verify_window=4, num_pages=20, num_slots=3))
    assert MAX_WINDOW == fused.MAX_WINDOW == split_decode.MAX_WINDOW
