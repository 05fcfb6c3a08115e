"""The published vocabulary, for the tests that need it, where it is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baltoro.chat.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def k3_dir() -> Path:
    directory = os.environ.get("BALTORO_K3_DATA")
    if not directory or not (Path(directory) / "tiktoken.model").is_file():
        pytest.skip("BALTORO_K3_DATA does not name a directory with the published tiktoken.model")
    return Path(directory)


@pytest.fixture(scope="session")
def k3_tok(k3_dir: Path) -> Tokenizer:
    return Tokenizer.load(k3_dir)
