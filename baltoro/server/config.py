"""What a server was told: names, limits, key. No torch, no sockets.

Invariants: frozen; every limit has a unit in its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of one HTTP process.

    `max_context_tokens` bounds prompt plus answer; `default_max_tokens` is what /v1/completions and /generate use when
    a request names no limit (chat may use the whole context). `default_effort` None shows the model no effort.
    `patch_size` is the side of a patch of the vision tower; None: the model reads no pictures.
    """

    model_name: str
    max_context_tokens: int
    api_key: str | None = None
    max_body_bytes: int = 64 << 20
    max_choices: int = 128
    max_prompts: int = 1024
    max_images: int = 64
    default_max_tokens: int = 256
    default_effort: str | None = None
    is_thinking: bool = True
    patch_size: int | None = None
    call_timeout_s: float = 30.0
    default_sampling: Mapping[str, float] = field(default_factory=dict)
