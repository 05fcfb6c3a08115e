"""The number of torch threads of a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baltoro.engine.threads import MIN_WIDTH, num_threads, set_threads
from baltoro.errors import ConfigError

MINI = Path(__file__).parents[2] / "models" / "mini"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The variable unset; torch's threads as they were, afterwards."""
    before = torch.get_num_threads()
    monkeypatch.delenv("BALTORO_THREADS", raising=False)
    yield monkeypatch
    torch.set_num_threads(before)


def test_narrow_models_get_one_thread_and_wide_ones_every_core(given: pytest.MonkeyPatch) -> None:
    assert num_threads(MIN_WIDTH - 1) == 1
    assert num_threads(MIN_WIDTH) == len(os.sched_getaffinity(0))


def test_the_variable_decides_for_every_width_and_torch_is_told(given: pytest.MonkeyPatch) -> None:
    given.setenv("BALTORO_THREADS", "3")
    assert [num_threads(width) for width in (1, MIN_WIDTH)] == [3, 3]
    assert set_threads(MINI) == 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_variable_that_is_no_positive_number_is_refused(given: pytest.MonkeyPatch, value: str) -> None:
    given.setenv("BALTORO_THREADS", value)
    with pytest.raises(ConfigError, match="BALTORO_THREADS"):
        num_threads(1)
