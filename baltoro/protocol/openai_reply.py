"""What the OpenAI API sends back: completions, chunks, usage, errors, model lists.

In: values. Out: JSON bytes through `to_json`.
Invariants: an optional field that has no value is absent, not null, except where OpenAI's own replies hold a null that
clients read (`finish_reason` of a chunk, `content` of a message, `param` and `code` of an error).
Source: OpenAI API reference; Moonshot's stream specification for K3 (usage on the end frame, internal_content).
Not here: the bodies clients send (`protocol.openai`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

# OpenAI's, and abort: somebody ended the request from outside.
TextFinish = Literal["stop", "length", "abort", "error"]
ChatFinish = Literal["stop", "length", "tool_calls", "content_filter", "abort", "error"]


class PromptDetails(msgspec.Struct, frozen=True):
    """Which of the prompt's tokens came from the prefix cache."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    """Which of the completion's tokens were thought."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage(prompt: int, completion: int, *, cached: int = 0, reasoning: int = 0) -> Usage:
    """Usage with its sum."""
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached), CompletionDetails(reasoning))


class TopTokenLogprob(msgspec.Struct, frozen=True):
    """An alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the content, with the best alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopTokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a choice."""

    content: list[TokenLogprob]


class FunctionOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """Name and arguments of a call; a continuing chunk has arguments only."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallOut(msgspec.Struct, frozen=True, kw_only=True):
    """A call: whole in a message (no index), in pieces in a stream (index; id, type and name in the first piece)."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionOut


class MessageOut(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. `content` is null when there are only tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallOut] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the n answers."""

    index: int
    message: MessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish
    stop_reason: int | str | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class InternalContent(msgspec.Struct, frozen=True):
    """The ids an increment is made of."""

    token_ids: list[int]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds: the role (first), then one kind of increment, then nothing (last)."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallOut] | UnsetType = UNSET
    internal_content: InternalContent | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The one choice of a chunk. `usage` is there on the end frame only."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | UnsetType = UNSET
    finish_reason: ChatFinish | None = None
    stop_reason: int | str | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream; no choices and a usage in the summary event."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET


class TextLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of /v1/completions: parallel lists; null for the first prompt token when the prompt is echoed."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of /v1/completions, or one increment of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: TextFinish | None = None
    stop_reason: int | str | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Reply, or one event, of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of /v1/models; an adapter names its base as `parent` and where it came from as `root`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baltoro"
    max_model_len: int
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: in words, by kind, at which field, by code."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The one shape in which every error is sent."""

    error: ErrorInfo


_ENCODER = msgspec.json.Encoder()


def to_json(reply: Any) -> bytes:
    """JSON bytes of any reply, on one line."""
    return _ENCODER.encode(reply)
