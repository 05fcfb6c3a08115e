"""Common ground of all tests: seeds, uninitialised memory that shows, the published files if they are at hand."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from baltoro.config import environment
from tests.contract.tree import NIGHTLY

# The same examples on every machine: a run says something about the change under test, not about the day's luck. New
# ones are looked for by `pytest --hypothesis-profile=default` and by the nightly set.
if find_spec("hypothesis") is not None:  # the interpreter's environment has none
    import hypothesis

    hypothesis.settings.register_profile("same", derandomize=True)
    hypothesis.settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves them out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remember which tests of this run are marked `nightly`: contract/test_nightly.py asks."""
    config.stash[NIGHTLY] = [item.nodeid for item in items if item.get_closest_marker("nightly")]


@pytest.fixture(autouse=True)
def _honest_torch() -> Iterator[None]:
    """Fixed seed, and torch.empty filled with NaN, so that memory nobody wrote cannot pass for zeros."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def k3_data() -> Path:
    """Folder of the published config, index and tokenizer file."""
    folder = environment("BALTORO_K3_DATA")
    if not folder:
        pytest.skip("BALTORO_K3_DATA is not set: it names the folder with the published config, index and tokenizer")
    return Path(folder)
