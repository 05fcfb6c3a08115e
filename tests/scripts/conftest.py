"""A small world for the families, made once."""

from __future__ import annotations

import pytest

from baltoro.chat.tokenizer import Tokenizer
from scripts.data.tiny.families import Context
from tests.scripts import small_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return small_world.context(tmp_path_factory.mktemp("wordnet"))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.of_bytes()
