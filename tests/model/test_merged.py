"""Projections of one input as one matrix, with rows up to a multiple of a step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from baltoro.model.build import new_model
from baltoro.model.context import train_context
from baltoro.model.kda import KDA, ROW_STEP
from baltoro.model.merged import merge_rows
from tests.tiny import tiny_k3


@dataclass
class Reader:
    weight: nn.Parameter


def readers(*weights: Tensor) -> list[Reader]:
    return [Reader(nn.Parameter(weight)) for weight in weights]


@torch.no_grad()
@pytest.mark.parametrize(("step", "rows"), [(1, 9), (3, 9), (8, 16), (16, 16)])
def test_a_copy_has_zeros_up_to_the_step(step: int, rows: int) -> None:
    weights = [torch.randn(n, 6) for n in (4, 2, 3)]
    some = readers(*(weight.clone() for weight in weights))
    merged = merge_rows(some, step=step)
    assert merged is not None and merged.shape == (rows, 6)
    assert torch.equal(merged[:9], torch.cat(weights)) and not merged[9:].any()
    some[2].weight.fill_(7.0)
    assert (merged[6:9] == 7.0).all() and not merged[9:].any()


@pytest.mark.parametrize("behind", [0, 42, 60])
def test_a_view_ends_with_its_weights(behind: int) -> None:
    """Nine rows of six; seven more would be 42 numbers, here NaN, which a gradient of zero does not take away."""
    memory = torch.randn(9 * 6 + behind)
    memory[54:] = float("nan")
    whole = memory[:54].view(9, 6)
    merged = merge_rows(readers(*whole.split([4, 2, 3])), may_copy=False, step=8)
    assert merged is not None and merged.data_ptr() == memory.data_ptr() and torch.equal(merged, whole)
    x = torch.randn(2, 6, requires_grad=True)
    (x @ merged.T)[:, :9].sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("heads", [3, 4, 8])
def test_a_rank_of_any_number_of_heads_has_columns_by_the_step(heads: int) -> None:
    """And its output is that of the projections one by one; what the columns behind hold changes nothing."""
    config = tiny_k3(vision=None, kda_num_heads=heads)
    plain, made = (new_model(config, dtype=torch.float64, std=0.2, decay="slow", seed=2) for _ in range(2))
    made.merge()
    mixers = [module for module in made.modules() if isinstance(module, KDA)]
    assert mixers and all(mixer._merged is not None and len(mixer._merged) % ROW_STEP == 0 for mixer in mixers)
    for mixer in mixers:
        assert mixer._merged is not None
        num = sum(len(reader.weight) for reader in mixer._readers)
        mixer._merged[num:] = float("nan")
    tokens = torch.arange(40) * 3 % config.vocab_size
    wanted, got = (model(train_context(tokens, (40,))) for model in (plain, made))
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)
