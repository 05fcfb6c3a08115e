"""What every cell of the equivalence matrix serves, the oracle, and what must hold.

Each cell gets the same conversation, in stages: shared starts of odd lengths, forks, pictures, second turns that extend
an answer, and, after other requests have filled the memory, some of it again. The oracle is each request alone in one
span through the model, without a cache. Free memory is NaN throughout.

In: a Cell and a tiny model with slow decay. Out: a Report: what each completion was told, what it might have found in
the cache, how often what happened. Invariants: prompts depend on the cell only through the answers they extend, and
these are checked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from baltoro.cache.retention import RETENTION_NAMES
from baltoro.engine.batch import Draw
from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.engine.sampler import fork_seed, sample
from baltoro.model.build import new_model
from baltoro.model.context import ForwardContext, Media, train_context
from baltoro.model.decoder import K3Model
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import MediaItem, Submit
from tests.e2e.matrix import ENDPOINTS, GRID, Cell
from tests.engine.stub import run
from tests.tiny import tiny_k3, tiny_kimi_linear

# ---- model and oracle ------------------------------------------------------------------------------------------------
STD = 0.05
"""Of the weights. Float32 then rounds logprobs by at most 6e-6 after 250 tokens (twice STD: 2e-5, too near a bound
of 1e-5); what happened 200 tokens ago still moves them by more than 1e-2."""
PICTURE_GRID = (1, 4, 6)  # 6 features
NUM_FEATURES = 6
PAD = 126


@cache
def model_of(name: str, dtype: torch.dtype, device: str = "cpu") -> K3Model:
    """On a GPU merged, as an engine there has it. The same draws whatever the dtype. "k3-all": every expert is active,
    since rounding to bf16 flips borderline picks of a router that was never trained."""
    config = tiny_kimi_linear() if name == "kimi_linear" else tiny_k3()
    if name == "k3-all":
        config = config.with_(num_active_experts=config.num_experts)
    model = new_model(config, dtype=dtype, seed=3, std=STD, decay="slow", device=device)
    return model if device == "cpu" else model.merge()


@cache
def pixels(picture: int) -> torch.Tensor:
    return torch.rand(24, 3, 6, 6, generator=torch.Generator().manual_seed(5 + picture)) * 2 - 1


@cache
@torch.inference_mode()
def alone(
    name: str, dtype: torch.dtype, tokens: tuple[int, ...], num_prompt: int, picture: int | None = None
) -> torch.Tensor:
    """Logits [T, X] in float64 of a prompt and its answer in one span without a cache."""
    model = model_of(name, dtype)
    ctx = train_context(torch.tensor(tokens), (len(tokens),))
    media = None
    if picture is not None:
        rows = [at for at, token in enumerate(tokens[:num_prompt]) if token == PAD]
        media = Media(pixels(picture), (PICTURE_GRID,), torch.tensor(rows), torch.arange(len(rows)))
    return model(ForwardContext(ctx.tokens, ctx.spans, media=media)).double()


# ---- requests --------------------------------------------------------------------------------------------------------
NUM_TOKENS = 6
"""Of each answer."""
HOST_TOKENS = 450
BACKUP_TOKENS = 320
"""KV that the host holds in front of a disk; as many bytes are for states."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `due`: prompt tokens that a cache with room must find, by retention policy (else 0 or more); if
    `is_resent`, a small device in front of a host and a disk must find them too."""

    name: str
    prompt: tuple[int, ...]
    picture: int | None = None
    n: int = 1
    is_scored: bool = False
    salt: str = ""
    is_resent: bool = False
    due: dict[str, int] = field(default_factory=dict)

    @property
    def params(self) -> SamplingParams:
        """Greedy; several completions are drawn."""
        return SamplingParams(
            temperature=0.0 if self.n == 1 else 0.8,
            max_tokens=NUM_TOKENS,
            seed=4,
            logprobs=0,
            prompt_logprobs=0 if self.is_scored else None,
        )

    @property
    def submit(self) -> Submit:
        items: tuple[MediaItem, ...] = ()
        if self.picture is not None:
            items = (MediaItem(pixels(self.picture).numpy().tobytes(), PICTURE_GRID, 6),)
        return Submit(
            request_id=self.name,
            token_ids=self.prompt,
            params=self.params,
            media=items,
            n=self.n,
            cache_salt=self.salt,
        )

    def spelled(self, answer: Sequence[int] = ()) -> tuple[object, ...]:
        """Prompt and answer; two requests may share as much as is equal."""
        pads = (("pad", self.picture) if token == PAD else token for token in self.prompt)
        return (self.salt, *pads, *answer)


def words(seed: int, count: int) -> tuple[int, ...]:
    """Random ids that are no control ids."""
    return tuple(torch.randint(0, 119, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def all_policies(depth: int, **others: int) -> dict[str, int]:
    return dict.fromkeys(RETENTION_NAMES, depth) | others


def conversation(cell: Cell, answers: dict[str, tuple[int, ...]], *, has_pictures: bool) -> Iterator[list[Ask]]:
    """Stages of requests that run together; each stage may build on the `answers` to those before."""
    start, tale = words(1, 150), words(2, 93)
    see = (*words(3, 20), *[PAD] * NUM_FEATURES, *words(4, 99))
    first = Ask("first", (*start, *words(5, 37)))
    picture = Ask("picture", see, picture=0)  # its answer crosses a grid point
    yield [first, picture] if has_pictures else [first]
    second = Ask("second", (*start, *words(6, 53)), due={"turns": 128, "interval": 128})
    forks = Ask("forks", (*start[:140], *words(7, 5)), n=3, due={"turns": 128, "interval": 128})
    yield [second, forks]
    turn = Ask("turn", (*first.prompt, *answers["first"], *words(8, 31)), due=all_policies(192))
    again = Ask("again", first.prompt)
    salted = Ask("salted", start[:70], salt="other")
    scored = Ask("scored", second.prompt, is_scored=True)
    yield [turn, again, salted, scored]
    if has_pictures:
        look = Ask("look", (*see, *answers["picture"], *words(9, 20)), picture=0, due=all_policies(128))
        other = Ask("other", see[:70], picture=1)
        fork = Ask("fork", (*see[:90], *words(10, 41)), picture=0)
        yield [look, other, fork]
    if cell.cache in ("host", "disk"):
        yield [Ask("long", words(11, 250)), Ask("tale", tale)]
        yield [Ask("longer", words(12, 260))]
    yield [Ask("turn back", turn.prompt, is_resent=True, due=turn.due)]  # one at a time: each has the host for itself
    if has_pictures:
        yield [Ask("look back", look.prompt, picture=0, is_resent=True, due=look.due)]
    yield [Ask("second back", second.prompt)]


# ---- serving ---------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Report:
    """What became of a cell. Deltas and cached counts by (name, index)."""

    asks: dict[str, Ask] = field(default_factory=dict)
    deltas: dict[tuple[str, int], list[TokenDelta]] = field(default_factory=dict)
    allowed: dict[tuple[str, int], int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def answer(self, name: str, index: int = 0) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas[name, index] for token in delta.token_ids)

    def cached(self, name: str, index: int = 0) -> int:
        return self.deltas[name, index][-1].num_cached_tokens


def options_of(cell: Cell, name: str, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    """Options of the engine. A cell with tiers has a device that holds two requests, and evicts; in front of a disk the
    host holds what one step may evict, and spills."""
    has_tier = cell.cache in ("host", "disk")
    num_tokens = (576 if cell.page == 192 else 512) if has_tier else 3072
    options: dict[str, Any] = {
        "page_size": cell.page,
        "hash_endpoint": ENDPOINTS[cell.page],
        "track_interval": GRID,
        "num_pages": num_tokens // cell.page,
        "num_slots": 7 if has_tier else 48,
        "max_running": 6,
        "max_context": 288,
        "max_batch_tokens": cell.budget,
        "prefix_cache": cell.cache != "off",
        "retention": cell.retention,
        "pool": cell.pool,
        "overlap": cell.loop == "overlap",
        "retract_every": 0 if cell.retract == "off" else 4,
        "retract_to": "host" if cell.retract == "host" else "recompute",
        "is_poisoned": True,
    }
    if has_tier:
        shape = model_of(name, dtype).config
        row_bytes = len(shape.mla_layers) * shape.kv_row_width * dtype.itemsize
        tokens = HOST_TOKENS if cell.cache == "disk" else 4096
        if cell.retract == "host":
            tokens += BACKUP_TOKENS  # what a backup takes, a prefix cannot have
        options["host_cache_bytes"] = 2 * row_bytes * tokens
    if cell.cache == "disk":
        options |= {"disk_cache_dir": str(folder), "disk_cache_bytes": 2**24}
    return options


def make_engine(name: str, dtype: torch.dtype, options: dict[str, Any]) -> Engine:
    config = EngineConfig(dtype=str(dtype).removeprefix("torch."), **options)
    return Engine(model_of(name, dtype, config.device), config, eos_ids=())


def serve(cell: Cell, name: str, dtype: torch.dtype, folder: Path, **others: Any) -> Report:
    """The whole conversation through one engine, audited after each step. `others`: options beside the cell's."""
    engine, report = make_engine(name, dtype, options_of(cell, name, dtype, folder) | others), Report()
    answers: dict[str, tuple[int, ...]] = {}
    seen: list[tuple[object, ...]] = []
    for stage in conversation(cell, answers, has_pictures=name == "k3"):
        for ask in stage:
            report.asks[ask.name] = ask
            for index in range(ask.n):
                own = [ask.spelled()] if index else []
                report.allowed[ask.name, index] = max([_shared(ask, one) for one in seen + own], default=0)
            seen.append(ask.spelled())
            engine.add(ask.submit)
        report.deltas |= run(engine, max_steps=20_000)
        for ask in stage:
            answers[ask.name] = report.answer(ask.name)
            seen.append(ask.spelled(answers[ask.name]))
        _let_files_land(engine)
    report.counts = counts_of(engine)
    engine.flush()
    assert engine.stats()["pages_used"] == engine.stats()["slots_used"] == 0
    engine.close()
    return report


def counts_of(engine: Engine) -> dict[str, int]:
    """How often what happened since the start; what the engine does not have counts 0."""
    scheduler, cache_of = engine.scheduler, engine.scheduler.memory.cache
    counts = Counter(retracted=scheduler.counts.retractions)
    if cache_of is None:
        return counts
    tree, tier = cache_of.tree.stats(), cache_of.tier
    counts.update(hit_tokens=cache_of.counts.hit_tokens, snapshots=cache_of.counts.snapshots)
    counts.update(backups=cache_of.counts.backups, evicted=tree.num_evicted_nodes + tree.num_evicted_states)
    if tier is None:
        return counts
    counts.update(loaded_tokens=tier.num_loaded_tokens)
    if tier.third is not None:
        disk = tier.third.stats()
        counts.update(written=disk.num_written_total, read=disk.num_read_total, bad=disk.num_bad_total)
    return counts


def _shared(ask: Ask, other: Sequence[object]) -> int:
    """How much of a prompt may come from another request: as far as both are equal, down to the grid, never the last
    token."""
    mine, count = ask.spelled(), 0
    for one, two in zip(mine, other, strict=False):
        if one != two:
            break
        count += 1
    depth = min(count - 1, len(ask.prompt) - 1)  # the salt comes first
    return 0 if ask.is_scored else max(0, depth) // GRID * GRID


def _let_files_land(engine: Engine, limit_s: float = 60.0) -> None:
    """Wait until the third tier has written what it was given, so that a later stage can find it."""
    memory, end = engine.scheduler.memory, time.monotonic() + limit_s
    third = memory.cache.tier.third if memory.cache is not None and memory.cache.tier is not None else None
    while third is not None and third.stats().num_pending_bytes:
        memory.poll()
        assert time.monotonic() < end, "the disk tier does not finish"


# ---- what must hold --------------------------------------------------------------------------------------------------
def check_answers(report: Report, name: str, dtype: torch.dtype) -> None:
    """float64: the tokens are those that the oracle draws; both: their logprobs are the oracle's."""
    bound = 1e-9 if dtype == torch.float64 else 1e-5
    for (request, index), deltas in report.deltas.items():
        ask, answer = report.asks[request], report.answer(request, index)
        assert len(answer) == NUM_TOKENS, f"{request}: {deltas[-1].error}"
        tokens = (*ask.prompt, *answer)
        logits = alone(name, dtype, tokens, len(ask.prompt), ask.picture)[:-1]
        if dtype == torch.float64:
            seed, places = fork_seed(ask.params.seed or 0, index), range(len(ask.prompt), len(tokens))
            drawn = sample(logits[len(ask.prompt) - 1 :].clone(), [Draw(ask.params, seed, at) for at in places])
            assert answer == tuple(found.token for found in drawn), f"{request}/{index}"
        wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
        scores = [delta.logprobs[0] for delta in deltas if delta.logprobs is not None]
        if ask.is_scored:
            assert deltas[0].prompt_logprobs is not None
            scores = [*(score for score in deltas[0].prompt_logprobs if score is not None), *scores]
        off = (torch.tensor(scores, dtype=torch.float64) - wanted[-len(scores) :]).abs().max()
        assert off < bound, f"{request}/{index}: logprobs are off by {off}"


def check_hits(report: Report, cell: Cell) -> None:
    """No completion claims more than another left behind; those that must hit do."""
    for (request, index), allowed in report.allowed.items():
        found = report.cached(request, index)
        assert found % GRID == 0 and 0 <= found <= (0 if cell.cache == "off" else allowed), f"{request}/{index}"
        ask = report.asks[request]
        if cell.cache == "on" or (ask.is_resent and cell.cache != "off"):
            due = ask.due.get(cell.retention, 0)
            assert found >= due, f"{request}/{index}: {found} of {due} tokens that are due"
