"""Sampling kernels against definitions written out row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baltoro.kernels.sample import reference as kernel


def _kept(logits: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """What may be drawn, by definition: sort, cut, renormalise, cut, compare with the best."""
    order = sorted(range(len(logits)), key=lambda x: -float(logits[x]))
    left = order[:top_k] if top_k > 0 else order
    border = float(logits[left[-1]])
    left = [x for x in order if float(logits[x]) >= border]  # equals of the last one stay
    weights = {x: math.exp(float(logits[x]) - float(logits[order[0]])) for x in left}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for x in left:
        if top_p < 1.0 and mass >= top_p * total:
            break
        nucleus.append(x)
        mass += weights[x]
    border = float(logits[nucleus[-1]])
    return {x for x in left if float(logits[x]) >= border and weights[x] >= min_p}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([5, 40, 700]),
    rows=st.lists(
        st.tuples(st.sampled_from([0, 1, 3, 30]), st.sampled_from([1.0, 0.9, 0.5, 0.999]), st.sampled_from([0.0, 0.2])),
        min_size=1,
        max_size=4,
    ),
)
def test_floor_keeps_what_the_definition_keeps(seed: int, size: int, rows: list[tuple[int, float, float]]) -> None:
    """Flat distributions over more ids than the head are among them: the full sort has to step in."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), size, generator=generator, dtype=torch.float64) * (0.1 if seed % 2 else 3.0)
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    lowest = kernel.floor(logits, top_k, top_p.double(), min_p.double())
    for row, border, options in zip(logits, lowest, rows, strict=True):
        kept = set(torch.nonzero(row >= border).flatten().tolist())
        assert kept == _kept(row, *options)


def test_rows_do_not_see_each_other() -> None:
    logits = torch.randn(3, 600, dtype=torch.float64)
    options = (torch.tensor([0, 7, 0]), torch.tensor([0.97, 1.0, 1.0]).double(), torch.tensor([0.0, 0.0, 0.1]).double())
    together = kernel.floor(logits, *options)
    alone = [kernel.floor(logits[n : n + 1], *(o[n : n + 1] for o in options)) for n in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_draws_follow_the_distribution() -> None:
    """Evenly spaced numbers hit each id in proportion to its probability; what is below the floor never comes."""
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64))
    count = 1000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    ids = kernel.draw(logits.expand(count, 4), torch.full((count,), math.log(0.15)).double(), uniform)
    assert torch.bincount(ids, minlength=4).tolist() == [0, 444, 223, 333]


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_draw_an_id_that_is_possible(number: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -1.0, -torch.inf, -torch.inf]])
    (found,) = kernel.draw(logits, torch.tensor([-torch.inf]), torch.tensor([number], dtype=torch.float64))
    assert int(found) == (1 if number == 0.0 else 2)


def test_penalties_follow_their_formulas() -> None:
    row = torch.tensor([2.0, -2.0, 1.0, 0.5])
    kernel.penalise(
        row,
        torch.tensor([0, 1, 2]),
        torch.tensor([2]),
        torch.tensor([3.0]),
        repetition=2.0,
        frequency=0.25,
        presence=0.5,
    )
    assert row.tolist() == [1.0, -4.0, 0.5 - 0.75 - 0.5, 0.5]


def test_log_probs_are_those_of_a_softmax() -> None:
    logits = torch.randn(3, 9, dtype=torch.float64)
    ids = torch.tensor([4, 0, 8])
    chosen, total = kernel.log_probs(logits, ids)
    assert torch.allclose(chosen, torch.log_softmax(logits, -1)[torch.arange(3), ids])
    assert torch.allclose(total, torch.logsumexp(logits, -1))
