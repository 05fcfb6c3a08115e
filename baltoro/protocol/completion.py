"""What comes back: token deltas while a request runs, a completion when it has ended.

Invariants: ids, logprobs and top logprobs of one delta have equal length; text is made of ids by `chat`, never here.
"""

from __future__ import annotations

import msgspec

from baltoro.protocol.sampling import FinishReason


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative at a position: id and natural-log probability."""

    token: int
    logprob: float


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that one step added to one request (or why it ended).

    `index` tells the n completions of one request apart. `num_trimmed` is how many tokens at the end of everything
    sent so far belong to a stop (id or string) and are to be dropped from text, ids and logprobs alike.
    Prompt logprobs come once, with the first token of index 0; their first entry is None. `version` is that of the
    adapter which sampled the tokens, 0 without one. `error_status` is the HTTP status of the error's class.
    `routed_experts`, with the last delta of a request that asked for it: which experts the routers took for each token
    from the first of the prompt on, as far as they were computed (not the last one that was sampled); int16,
    little-endian, [tokens, layers with experts, active experts], best first.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[tuple[TopLogprob, ...] | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_trimmed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    version: int = 0
    error: str | None = None
    error_status: int | None = None
    routed_experts: bytes | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer of `LLM.generate` and `LLM.chat`. `error` says why, when finish_reason is error."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[tuple[TopLogprob, ...] | None, ...] | None = None
    num_cached_tokens: int = 0
    policy_version: int = 0
    reasoning: str | None = None
    tool_calls: tuple[dict[str, object], ...] = ()
    error: str | None = None
