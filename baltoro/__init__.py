"""Baltoro: trains, post-trains and serves models of the Kimi K3 architecture.

Public names are loaded on first use, so that `import baltoro` costs nothing and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baltoro.llm import LLM
    from baltoro.model.config import K3Config
    from baltoro.protocol.completion import Completion
    from baltoro.protocol.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "K3Config", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "baltoro.llm",
    "K3Config": "baltoro.model.config",
    "Completion": "baltoro.protocol.completion",
    "SamplingParams": "baltoro.protocol.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'baltoro' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
