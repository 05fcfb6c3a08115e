"""EngineConfig: what the user asked of an engine. No torch.

"auto" is resolved once, by `planner.py`, and shown. Nothing here changes after it was built.
Errors: ConfigError names the field and says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baltoro.errors import ConfigError

Auto = Literal["auto"]
DTYPES = ("auto", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine.

    page_size         positions per KV page: a power of two up to 64
    max_batch_tokens  tokens of one step, decodes and pieces of prompts together
    max_running       requests that hold memory at once
    max_waiting       requests that may wait; the next one is refused with QueueFull
    max_context       prompt and output of one request; auto: what the model allows and the pool holds
    memory_bytes      arena; auto: a share of the machine, and not more than max_running requests can use
    num_pages, num_slots   override what memory_bytes would give
    max_logit_rows    rows whose logits one step may hold for prompt logprobs (each is vocab_size values)
    retract_every     debugging: take the memory of one running request every so many steps; 0 is off
    is_poisoned       debugging: fill memory that changes hands with NaN
    """

    page_size: int = 64
    max_batch_tokens: int = 1024
    max_running: int = 64
    max_waiting: int = 4096
    max_context: int | Auto = "auto"
    memory_bytes: int | Auto = "auto"
    num_pages: int | Auto = "auto"
    num_slots: int | Auto = "auto"
    max_logit_rows: int = 256
    dtype: str = "auto"
    device: str = "cpu"
    seed: int = 0
    retract_every: int = 0
    is_poisoned: bool = False

    def __post_init__(self) -> None:
        size = self.page_size
        _need(1 <= size <= 64 and size & (size - 1) == 0, "page_size", size, "must be a power of two between 1 and 64")
        for name in ("max_batch_tokens", "max_running", "max_waiting", "max_logit_rows"):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in ("max_context", "memory_bytes", "num_pages", "num_slots"):
            value = getattr(self, name)
            _need(value == "auto" or value >= 1, name, value, 'must be "auto" or at least 1')
        _need(self.dtype in DTYPES, "dtype", self.dtype, f"must be one of {', '.join(DTYPES)}")
        _need(self.retract_every >= 0, "retract_every", self.retract_every, "must be 0 (off) or a number of steps")
        _need(self.seed >= 0, "seed", self.seed, "must not be negative")


def _need(is_good: bool, name: str, value: object, advice: str) -> None:
    if not is_good:
        raise ConfigError(f"{name} {value!r} {advice}")
