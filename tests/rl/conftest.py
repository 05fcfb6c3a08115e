"""The tiny model's folder, written once; the folder of the engines of a module, and the trainer's end of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rl.engines import Here, make_folder
from tests.rl.runs import write_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny_rl"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def here(folder: Path) -> Here:
    return Here(folder)
