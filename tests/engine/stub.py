"""A scripted model that lives off the cache: its next token depends on every byte it was told to remember.

Recurrent state: a hash folded over all tokens. Conv: the last taps. KV: every row of the request, weighted by position.
All values are small integers, exact in any float, so a request's whole output can be computed from its tokens alone
(`expected`), and a page, slot or row in the wrong place changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baltoro.engine.batch import Draw
from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.engine.sampler import fork_seed, sample
from baltoro.model.config import K3Config
from baltoro.model.context import ForwardContext
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit

PRIME = 8191
VOCAB = 61
EOS = 60  # the script never gives it unless asked to


def stub_config(**changes: Any) -> K3Config:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "num_layers": 5,
        "mla_layers": (2, 4),
        "kda_num_heads": 3,
        "kda_head_dim": 2,
        "num_heads": 2,
        "kv_lora_rank": 5,
        "qk_rope_head_dim": 2,
        "max_position_embeddings": 512,
        "eos_token_id": EOS,
    }
    return K3Config(**(fields | changes))


class StubModel:
    """Reads and writes exactly what the context says. `can_end` lets the script reach the end token.

    `state_chunk`: inside a span it has states at multiples of this only, as the real one.
    """

    def __init__(self, config: K3Config | None = None, *, can_end: bool = False, state_chunk: int = 4) -> None:
        self.config = config or stub_config()
        self.can_end = can_end
        self.state_chunk = state_chunk
        self.contexts: list[ForwardContext] = []

    def __call__(self, ctx: ForwardContext) -> Tensor:
        assert ctx.cache is not None
        self.contexts.append(ctx)
        rows = []
        for n, (offset, length, start) in enumerate(
            zip(ctx.spans.offsets, ctx.spans.lengths, ctx.spans.starts, strict=False)
        ):
            for at in range(length):
                rows.append(self._token(ctx, n, offset + at, start + at))
                self._keep(ctx, n, at + 1)
        logits = torch.stack(rows)
        return logits if ctx.logit_rows is None else logits[ctx.logit_rows]

    def _keep(self, ctx: ForwardContext, n: int, done: int) -> None:
        """Write the snapshots that are due after the first `done` tokens of span n."""
        assert ctx.cache is not None
        for taken in ctx.cache.snapshots:
            if (taken.span, taken.length) != (n, done):
                continue
            position = ctx.spans.starts[n] + done
            is_there = done == ctx.spans.lengths[n] or position % self.state_chunk == 0
            assert is_there, f"no state at {position} inside a span"
            for view in (*ctx.cache.views.recurrent, *ctx.cache.views.conv):
                view[taken.slot] = view[int(ctx.cache.slots[n])]

    def _token(self, ctx: ForwardContext, n: int, row: int, position: int) -> Tensor:
        cache, token = ctx.cache, int(ctx.tokens[row])
        assert cache is not None
        slot, place = int(cache.slots[n]), int(cache.kv_rows[row])
        total = 0
        for layer, (state, conv) in enumerate(zip(cache.views.recurrent, cache.views.conv, strict=True)):
            fold, taps = 0, [0] * conv.shape[1]
            if position:
                fold = _same(state[slot].reshape(1, -1))[0]
                taps = _same(conv[slot])
            fold, taps = (fold * 31 + token + layer + 1) % PRIME, [*taps[1:], token]
            state[slot] = fold
            conv[slot] = torch.tensor(taps)[:, None].to(conv.dtype)
            total += fold + sum((i + 2) * value for i, value in enumerate(taps))
        size = cache.page_size
        pages = cache.page_table[n, : position // size + 1]
        for layer, kv in enumerate(cache.views.kv):
            kv[place // size, place % size] = token + layer + 1
            seen = _same(kv[pages].flatten(0, 1)[: position + 1])
            total += sum((at + 1) * value for at, value in enumerate(seen))
        return script_logits(total, can_end=self.can_end)


def _same(rows: Tensor) -> list[int]:
    """The one value that fills each row; a row of mixed or missing values is a fault of the engine."""
    values = rows[:, 0]
    assert bool((rows == values[:, None]).all()), "a row that was not written as a whole, or not at all"
    return [int(value) for value in values.tolist()]


def script_logits(total: int, *, can_end: bool) -> Tensor:
    """Logits [X] that a state of the script gives."""
    spread = torch.arange(1, VOCAB + 1, dtype=torch.float64) * (total % PRIME + 1)
    logits = 3.0 * torch.sin(spread * 0.7).float()
    if not can_end:
        logits[EOS] = -50.0
    return logits


def logits_after(tokens: Sequence[int], config: K3Config, *, can_end: bool = False) -> Tensor:
    """What the script gives after `tokens`, from the tokens alone."""
    total, taps = 0, config.conv_size - 1
    last = ([0] * taps + list(tokens))[-taps:]
    for layer in range(len(config.kda_layers)):
        fold = 0
        for token in tokens:
            fold = (fold * 31 + token + layer + 1) % PRIME
        total += fold + sum((i + 2) * value for i, value in enumerate(last))
    for layer in range(len(config.mla_layers)):
        total += sum((at + 1) * (token + layer + 1) for at, token in enumerate(tokens))
    return script_logits(total, can_end=can_end)


def expected(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    config: K3Config | None = None,
    index: int = 0,
    can_end: bool = False,
) -> list[int]:
    """The output of one completion, computed alone and without a cache; `params` without text stops."""
    config, tokens = config or stub_config(), list(prompt)
    seed = fork_seed(params.seed or 0, index)
    is_penalised = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
    stops = (*params.stop_token_ids, *(() if params.ignore_eos else (EOS,)))
    for done in range(params.max_tokens):
        counts = Counter(tokens[len(prompt) :]) if is_penalised else None
        seen = frozenset(prompt) if params.repetition_penalty != 1.0 else frozenset()
        draw = Draw(params, seed, len(tokens), seen, counts, stops if done < params.min_tokens else ())
        (found,) = sample(logits_after(tokens, config, can_end=can_end).unsqueeze(0), [draw])
        tokens.append(found.token)
        if found.token in stops:
            break
    return tokens[len(prompt) :]


def make_engine(model: StubModel | None = None, *, max_context: Any = "auto", **options: Any) -> Engine:
    """An engine on a stub with a poisoned arena of 40 pages of 4 tokens and 4 slots, if not said otherwise."""
    defaults: dict[str, Any] = {
        "page_size": 4,
        "num_pages": 40,
        "num_slots": 4,
        "max_batch_tokens": 24,
        "dtype": "float32",
        "is_poisoned": True,
        "prefix_cache": False,
        "pool": "fixed",
        "overlap": False,
    }
    return Engine(model or StubModel(), EngineConfig(**(defaults | options), max_context=max_context))


def submit(
    engine: Engine, request_id: str, prompt: Sequence[int], *, n: int = 1, priority: int = 0, **params: Any
) -> None:
    """Add one request; greedy unless said otherwise."""
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | params))
    engine.add(Submit(request_id=request_id, token_ids=tuple(prompt), params=sampling, n=n, priority=priority))


def run(engine: Engine, *, max_steps: int = 2000) -> dict[tuple[str, int], list[TokenDelta]]:
    """Step until nothing is left, auditing after each step: deltas by (request, index)."""
    deltas: dict[tuple[str, int], list[TokenDelta]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return deltas
        for delta in engine.step():
            deltas.setdefault((delta.request_id, delta.index), []).append(delta)
        engine.audit()
    raise AssertionError(f"still busy after {max_steps} steps")


def tokens_of(deltas: Sequence[TokenDelta]) -> list[int]:
    """All tokens sent, trimmed ones included."""
    return [token for delta in deltas for token in delta.token_ids]
