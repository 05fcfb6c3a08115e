"""The tiny model's folder, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rl.runs import write_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny_rl"))
