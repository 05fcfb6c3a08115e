"""Judges for the tests of re-scoring; they run in the pool's processes."""

from __future__ import annotations

from typing import Any

from baltoro.envs.base import Score


def generous(content: str, reasoning: str | None, check: dict[str, Any]) -> Score:
    """Pays for anything."""
    return Score(1.0, "right", content)
