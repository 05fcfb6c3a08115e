"""From the fields of a body to what the engine is asked: sampling parameters, ids, the room in the context.

In: a parsed body, the server's settings. Out: `SamplingParams`, ids, limits.
Errors: RequestError with the field as the client spells it; ContextLengthError with code context_length_exceeded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from baltoro.errors import ContextLengthError, RequestError
from baltoro.protocol.openai import SamplingBody
from baltoro.protocol.sampling import SamplingParams
from baltoro.server.config import ServerConfig

_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)
MAX_STOPS = 64
MAX_STOP_CHARS = 1024


def new_id(prefix: str) -> str:
    """prefix-<24 hex digits>: seconds, then random, so that ids sort by time."""
    return f"{prefix}-{int(time.time()):08x}{secrets.token_hex(8)}"


def request_ids(rid: str, count: int) -> list[str]:
    """The engine's ids of the parts of one request: its own id, or that with a number behind it."""
    return [rid] if count == 1 else [f"{rid}:{i}" for i in range(count)]


def sampling_params(
    body: SamplingBody,
    config: ServerConfig,
    *,
    vocab_size: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """What the body asks, with the server's defaults where it is silent."""
    fields: dict[str, Any] = dict(config.default_sampling)
    fields.update({name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None})
    if fields.get("top_k") == 0:
        fields["top_k"] = -1
    return SamplingParams(
        **fields,
        max_tokens=max_tokens,
        logit_bias=logit_bias(body.logit_bias or {}, vocab_size),
        stop=stop_strings(body.stop),
        stop_token_ids=ids_in_range(body.stop_token_ids or [], vocab_size, "stop_token_ids"),
        seed=None if body.seed is None else body.seed % (1 << 63),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings of a body."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not s or len(s) > MAX_STOP_CHARS for s in stops) or len(stops) > MAX_STOPS:
        raise RequestError(
            f"stop must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters", param="stop"
        )
    return stops


def num_choices(body: SamplingBody, config: ServerConfig) -> int:
    """`n`, checked."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= config.max_choices:
        raise RequestError(f"n must lie between 1 and {config.max_choices}", param="n")
    return n


def output_room(num_prompt: int, asked: int | None, config: ServerConfig, *, prompt_field: str) -> int:
    """Most tokens that may still come after the prompt. `asked` None: as many as fit."""
    room = config.max_context_tokens - num_prompt
    limit = f"this model's context is {config.max_context_tokens} tokens"
    if room < 1:
        raise ContextLengthError(
            f"{limit}, the prompt has {num_prompt}; send less", param=prompt_field, code="context_length_exceeded"
        )
    if asked is not None and asked > room:
        raise ContextLengthError(
            f"{limit}, the prompt has {num_prompt} and max_tokens is {asked}; ask for at most {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return room if asked is None else asked


def checked_ids(ids: list[int], vocab_size: int, field: str) -> tuple[int, ...]:
    """Prompt ids of a client. Errors: RequestError when there are none or one is no id."""
    if not ids:
        raise RequestError(f"{field} must not be empty", param=field)
    return ids_in_range(ids, vocab_size, field)


def ids_in_range(ids: Sequence[int], vocab_size: int, field: str) -> tuple[int, ...]:
    """Ids of a client. Errors: RequestError when one is no id."""
    if any(not 0 <= i < vocab_size for i in ids):
        raise RequestError(f"{field} must hold ids from 0 to {vocab_size - 1}", param=field)
    return tuple(ids)


def logit_bias(bias: Mapping[str, float], vocab_size: int, field: str = "logit_bias") -> dict[int, float]:
    """Biases by id. Errors: RequestError when a key is no id."""
    if any(not key.isdecimal() or int(key) >= vocab_size for key in bias):
        raise RequestError(f"{field} must map ids from 0 to {vocab_size - 1} to numbers", param=field)
    return {int(key): value for key, value in bias.items()}
