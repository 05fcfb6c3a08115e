"""The sampler: who is greedy, what edits do, where randomness comes from, what logprobs say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from baltoro.engine.batch import Draw
from baltoro.engine.sampler import fork_seed, sample, score, uniform
from baltoro.protocol.sampling import SamplingParams

VOCAB = 50


def _draw(seed: int = 0, position: int = 3, **fields: Any) -> Draw:
    edits = {name: fields.pop(name) for name in ("prompt", "counts", "banned", "allowed") if name in fields}
    return Draw(SamplingParams(**fields), seed, position, **edits)


def _logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [7, 30]] = 1.0
    assert [f.token for f in sample(logits, [_draw(temperature=0.0), _draw(top_k=1)])] == [7, 7]


def test_a_row_draws_the_same_alone_and_in_any_company() -> None:
    logits = _logits(6)
    draws = [
        _draw(1, temperature=0.7),
        _draw(2, top_p=0.8, logprobs=2),
        _draw(3, temperature=0.0),
        _draw(4, top_k=5, min_p=0.05),
        _draw(5, counts={3: 2, 9: 1}, prompt=[1, 2], repetition_penalty=1.7, frequency_penalty=0.5, logprobs=0),
        _draw(6, banned=(4, 5), logit_bias={7: 5.0}),
    ]
    together = sample(logits.clone(), draws)
    for n, draw in enumerate(draws):
        (alone,) = sample(logits[n : n + 1].clone(), [draw])
        assert alone == together[n]
    backwards = sample(logits.flip(0).clone(), draws[::-1])
    assert backwards[::-1] == together


def test_the_random_number_is_defined_by_seed_and_position() -> None:
    numbers = {(seed, at): uniform(seed, at) for seed in range(40) for at in range(40)}
    assert numbers[3, 5] == uniform(3, 5)
    assert len(set(numbers.values())) == len(numbers)
    assert all(0.0 <= number < 1.0 for number in numbers.values())
    assert abs(np.mean(list(numbers.values())) - 0.5) < 0.03
    assert abs(np.corrcoef([numbers[1, at] for at in range(40)], [numbers[2, at] for at in range(40)])[0, 1]) < 0.5


def test_siblings_have_streams_of_their_own() -> None:
    seeds = [fork_seed(9, index) for index in range(20)]
    assert seeds[0] == 9 and len(set(seeds)) == 20 and all(0 <= seed < 2**63 for seed in seeds)


def test_sampled_tokens_follow_the_distribution() -> None:
    """Chi-square over 8 ids and 4000 positions."""
    logits = torch.tensor([0.5, 0.0, -1.0, 1.5, 0.2, -0.3, 0.9, -2.0])
    count = 4000
    found = sample(logits.expand(count, 8).clone(), [_draw(7, at, temperature=0.8) for at in range(count)])
    seen = np.bincount([f.token for f in found], minlength=8)
    wanted = torch.softmax(logits / 0.8, -1).numpy() * count
    assert float(((seen - wanted) ** 2 / wanted).sum()) < 24.3  # 99.9% of chi-square with 7 degrees


def test_a_mask_leaves_only_what_it_allows() -> None:
    bits = np.zeros(VOCAB, dtype=np.uint8)
    bits[[8, 33]] = 1
    allowed = np.packbits(bits, bitorder="little").tobytes()
    logits = _logits()
    (greedy,) = sample(logits, [_draw(temperature=0.0, allowed=allowed)])
    assert greedy.token == (8 if logits[0, 8] >= logits[0, 33] else 33)
    drawn = {sample(logits, [_draw(at, at, temperature=5.0, allowed=allowed)])[0].token for at in range(40)}
    assert drawn == {8, 33}
    (nothing,) = sample(logits, [_draw(temperature=0.0, allowed=bytes(len(allowed)))])
    assert not nothing.is_valid


def test_a_short_mask_forbids_the_ids_behind_its_end() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 40] = 9.0
    (found,) = sample(logits, [_draw(temperature=0.0, allowed=b"\xff\xff")])
    assert found.token == 0


def test_edits_do_what_their_names_say() -> None:
    logits = _logits()
    best = int(logits.argmax())
    second = int(logits[0].topk(2).indices[1])
    assert sample(logits, [_draw(temperature=0.0, banned=(best,))])[0].token == second
    assert sample(logits, [_draw(temperature=0.0, logit_bias={best: -100.0})])[0].token == second
    assert sample(logits, [_draw(temperature=0.0, counts={best: 9}, frequency_penalty=2.0)])[0].token == second
    assert sample(logits, [_draw(temperature=0.0, counts={best: 1}, presence_penalty=0.0)])[0].token == best
    assert (
        sample(logits, [_draw(temperature=0.0, counts={}, prompt=[best], repetition_penalty=50.0)])[0].token == second
    )
    assert logits.equal(_logits()), "the raw logits stay as they were"


def test_logprobs_are_raw_and_sorted() -> None:
    logits = _logits()
    raw = torch.log_softmax(logits, -1)[0]
    (found,) = sample(logits, [_draw(temperature=0.3, top_k=3, logit_bias={1: 3.0}, logprobs=5)])
    assert found.logprob is not None and math.isclose(found.logprob, float(raw[found.token]), abs_tol=1e-6)
    assert found.top is not None and [t.token for t in found.top] == raw.topk(5).indices.tolist()
    assert all(math.isclose(t.logprob, float(raw[t.token]), abs_tol=1e-6) for t in found.top)
    assert sample(logits, [_draw(logprobs=0)])[0].top is None


def test_equal_alternatives_come_in_order_of_id() -> None:
    (found,) = sample(torch.zeros(1, 4), [_draw(temperature=0.0, logprobs=4)])
    assert found.top is not None and [t.token for t in found.top] == [0, 1, 2, 3]


def test_scores_are_those_of_the_targets() -> None:
    logits = _logits(3)
    logprobs, best = score(logits, [4, 9, 2], 2).lists()
    raw = torch.log_softmax(logits, -1)
    assert np.allclose(logprobs, raw[torch.arange(3), [4, 9, 2]], atol=1e-6)
    assert [[t.token for t in tops] for tops in best] == raw.topk(2).indices.tolist()


def test_a_row_without_numbers_is_reported_and_hurts_no_other() -> None:
    logits = _logits(3)
    logits[1] = torch.nan
    found = sample(logits, [_draw(temperature=0.0), _draw(1), _draw(2)])
    assert [f.is_valid for f in found] == [True, False, True]
