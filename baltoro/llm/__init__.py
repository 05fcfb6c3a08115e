"""The offline front doors: chat protocol and engine in the caller's process, or an engine in a process of its own."""

from __future__ import annotations

from baltoro.llm.offline import LLM

__all__ = ["LLM"]
