"""logits -> ids and logprobs. Batched over rows; what a row draws depends on its own logits and Draw only.

Order: grammar mask, ends that may not come yet, logit bias, penalties, temperature, top-k, top-p, min-p, draw.
Randomness is a number made from (seed, position): no generator, no state, so the stream of a request is the same
whatever the batch, the spans or a retraction. Greedy (temperature 0 or top_k 1) takes the lowest id of equals.
Logprobs are raw: of the model's own distribution, before all of the above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baltoro.engine.batch import Draw, Found
from baltoro.kernels.copies import to_device, to_host
from baltoro.kernels.dispatch import kernels_for
from baltoro.kernels.sample import reference as kernel
from baltoro.protocol.completion import TopLogprob

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs [M] of chosen ids and the best alternatives of each row (None: nobody wants any), on the device."""

    chosen: Tensor
    best: Tensor | None
    places: Tensor | None
    num_top: Sequence[int]

    def to_host(self) -> Scores:
        """The same on the host; on a GPU the copy is only queued."""
        best, places = self.best, self.places
        return Scores(
            to_host(self.chosen),
            None if best is None else to_host(best),
            None if places is None else to_host(places),
            self.num_top,
        )

    def lists(self) -> tuple[list[float], list[tuple[TopLogprob, ...]]]:
        """Best first, the lower id of equals first."""
        chosen: list[float] = self.chosen.tolist()
        if self.best is None or self.places is None:
            return chosen, [()] * len(self.num_top)
        tops = []
        for logprobs, tokens, count in zip(self.best.tolist(), self.places.tolist(), self.num_top, strict=True):
            order = sorted(zip(logprobs, tokens, strict=True), key=lambda pair: (-pair[0], pair[1]))
            tops.append(tuple(TopLogprob(token, logprob) for logprob, token in order[:count]))
        return chosen, tops


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one step drew: ids [M], whether the model gave a number, and scores if anybody wants them."""

    draws: Sequence[Draw]
    ids: Tensor
    is_valid: Tensor
    scores: Scores | None

    def to_host(self) -> Drawn:
        """The same on the host; on a GPU the copy is only queued."""
        scores = None if self.scores is None else self.scores.to_host()
        return Drawn(self.draws, to_host(self.ids), to_host(self.is_valid), scores)

    def found(self) -> list[Found]:
        """In words of the host; waits for the device."""
        tokens, is_valid = self.ids.tolist(), self.is_valid.tolist()
        if self.scores is None:
            return [Found(token, good) for token, good in zip(tokens, is_valid, strict=True)]
        logprobs, tops = self.scores.lists()
        return [
            Found(token, good)
            if draw.params.logprobs is None
            else Found(token, good, logprob, top if draw.params.logprobs else None)
            for token, good, logprob, top, draw in zip(tokens, is_valid, logprobs, tops, self.draws, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Likeliest:
    """What a captured step of greedy draws found by itself: int64 [2, M], ids and whether the model gave a number.

    On a CPU the memory may be written again before anybody asks, so `to_host` copies."""

    both: Tensor

    @property
    def ids(self) -> Tensor:
        return self.both[0]

    def to_host(self) -> Likeliest:
        """The same on the host; on a GPU the copy is only queued."""
        return Likeliest(self.both.clone() if self.both.device.type == "cpu" else to_host(self.both))

    def found(self) -> list[Found]:
        """In words of the host; waits for the device."""
        return [Found(token, good != 0) for token, good in zip(*self.both.tolist(), strict=True)]


def are_likeliest(draws: Sequence[Draw]) -> bool:
    """Whether each takes the likeliest id as the model has it, and nothing else is asked."""
    return all(is_greedy(draw) and not draw.is_edited and draw.params.logprobs is None for draw in draws)


def draw_ids(logits: Tensor, draws: Sequence[Draw]) -> Drawn:
    """One id per row of logits [M, X] (accumulate dtype), M >= 1, without waiting for the device."""
    raw = logits
    if any(draw.is_edited for draw in draws):
        logits = logits.clone()
        for row, draw in zip(logits, draws, strict=True):
            if draw.is_edited:
                _edit(row, draw)
    best, ids = logits.max(dim=-1)
    at = [n for n, draw in enumerate(draws) if not is_greedy(draw)]
    if len(at) == len(draws):
        ids = _draw(logits, draws)
    elif at:
        rows = to_device(torch.tensor(at), logits.device)
        ids[rows] = _draw(logits[rows], [draws[n] for n in at])
    scores = None
    if any(draw.params.logprobs is not None for draw in draws):
        scores = _score(raw, ids, [draw.params.logprobs or 0 for draw in draws])
    return Drawn(draws, ids, torch.isfinite(best), scores)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Found]:
    """One Found per row of logits [M, X] (accumulate dtype). `logits` may be overwritten where nobody needs the raw."""
    return draw_ids(logits, draws).found() if draws else []


def score(logits: Tensor, targets: Sequence[int], num_top: int) -> Scores:
    """Logprobs of `targets` under logits [M, X], one a row, with the `num_top` best of each row."""
    ids = to_device(torch.tensor(targets), logits.device)
    return _score(logits, ids, [num_top] * len(targets))


def is_greedy(draw: Draw) -> bool:
    """Whether the likeliest token is taken, without a random number."""
    return draw.params.temperature == 0.0 or draw.params.top_k == 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, defined by (seed, position): two rounds of SplitMix64."""
    mixed = _mix(_mix(seed & _MASK) ^ position)
    return float(mixed >> 11) * 2.0**-53


def fork_seed(seed: int, index: int) -> int:
    """The seed of the index-th completion of a request; the first keeps the request's own."""
    return seed if index == 0 else _mix(_mix(seed & _MASK) + index) >> 1


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Ids of rows that are not greedy."""
    device, dtype = logits.device, logits.dtype
    given = [
        (params.temperature, max(params.top_k, 0), params.top_p, params.min_p, uniform(draw.seed, draw.position))
        for draw in draws
        for params in (draw.params,)
    ]
    there = to_device(torch.tensor(given, dtype=torch.float64).T.contiguous(), device)  # one copy
    temperature, top_k, top_p, min_p, numbers = there
    scaled = logits / temperature.to(dtype).unsqueeze(1)
    return kernels_for(device).sample(scaled, top_k.long(), top_p.to(dtype), min_p.to(dtype), numbers)


def _edit(row: Tensor, draw: Draw) -> None:
    """Mask, bans, bias and penalties on one row [X], in place."""
    params, device = draw.params, row.device
    if draw.allowed:
        bits = np.unpackbits(np.frombuffer(draw.allowed, dtype=np.uint8), bitorder="little")[: row.shape[0]]
        allowed = torch.zeros(row.shape[0], dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits.astype(bool))
        row.masked_fill_(~allowed.to(device), -torch.inf)
    if draw.banned:
        row[torch.tensor(draw.banned, device=device)] = -torch.inf
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=device)
    if draw.counts is not None:
        kernel.penalise(
            row,
            torch.tensor(list({*draw.prompt, *draw.counts}), dtype=torch.int64, device=device),
            torch.tensor(list(draw.counts), dtype=torch.int64, device=device),
            torch.tensor(list(draw.counts.values()), dtype=row.dtype, device=device),
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )


def _score(logits: Tensor, ids: Tensor, num_top: Sequence[int]) -> Scores:
    """Logprob of ids[M], and the num_top[m] best of each row."""
    chosen, total = kernel.log_probs(logits, ids)
    width = min(max(num_top), logits.shape[1])
    if not width:
        return Scores(chosen, None, None, num_top)
    values, places = logits.topk(width, dim=-1)
    return Scores(chosen, values - total.unsqueeze(1), places, num_top)
