"""How one request is sampled and when it stops: words that every room understands.

In: what a user asked. Out: frozen structs that travel from the server to the engine (msgspec, so they pack themselves).
Invariants: a `SamplingParams` that was built is valid; what is invalid never leaves `__post_init__`.
Source: field names follow vLLM and SGLang where they agree.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import msgspec

from baltoro.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request. temperature 0 is greedy; top_k -1 and top_p 1 are off.

    Errors: RequestError names the field that cannot be used.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # None: none; 0: of the chosen token; k: also the k best
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must lie between 0 and max_tokens")
        _check(0.0 <= self.temperature <= 100.0, "temperature", "must lie between 0 and 100")
        _check(0.0 < self.top_p <= 1.0, "top_p", "must lie in (0, 1]")
        _check(self.top_k == -1 or self.top_k >= 1, "top_k", "must be -1 (off) or at least 1")
        _check(0.0 <= self.min_p <= 1.0, "min_p", "must lie in [0, 1]")
        _check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must lie between -2 and 2")
        _check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must lie between -2 and 2")
        _check(self.repetition_penalty > 0.0, "repetition_penalty", "must be positive")
        _check(all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()), "logit_bias", "-100 to 100")
        _check(self.seed is None or 0 <= self.seed < 2**63, "seed", "must lie in [0, 2^63)")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(count is None or 0 <= count <= 20, name, "must lie between 0 and 20")


def _check(is_good: bool, param: str, advice: str) -> None:
    if not is_good:
        raise RequestError(f"{param} {advice}", param=param)


@runtime_checkable
class StopRule(Protocol):
    """Decides from ids where a completion ends. One object per request, made by `chat`; the engine only calls it."""

    def push(self, token: int) -> int | None:
        """Take the next id. None: go on. n >= 0: stop, and the last n tokens belong to the stop string."""
        ...


@runtime_checkable
class TokenMask(Protocol):
    """Which ids may come next. One object per request, made by `chat.grammar`; the engine only calls it."""

    def allowed(self) -> bytes:
        """Bitmask over the vocabulary, little-endian bits, one bit an id; an empty value allows every id."""
        ...

    def push(self, token: int) -> None:
        """Tell which id was taken."""
        ...
