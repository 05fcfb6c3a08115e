"""TokenDelta out of a commit: what a step found for one request, in the words of the wire."""

from __future__ import annotations

from baltoro.engine.batch import Found
from baltoro.engine.request import Ending, Request
from baltoro.protocol.completion import TokenDelta, TopLogprob


def make_delta(request: Request, found: Found | None, ending: Ending | None, version: int) -> TokenDelta:
    """`found` is None when a request ends without a token, `ending` None when it goes on. Called before the next token
    is taken: the first token of a request carries the prompt's logprobs."""
    is_first = found is not None and request.num_output == 1
    logprobs, tops = _prompt_scores(request) if is_first else (None, None)
    return TokenDelta(
        request_id=request.request_id,
        index=request.index,
        token_ids=() if found is None else (found.token,),
        logprobs=None if found is None or found.logprob is None else (found.logprob,),
        top_logprobs=None if found is None or found.top is None else (found.top,),
        prompt_logprobs=logprobs,
        prompt_top_logprobs=tops,
        finish_reason=None if ending is None else ending.reason,
        stop_reason=None if ending is None else ending.stop_reason,
        num_trimmed=0 if ending is None else ending.num_trimmed,
        num_prompt_tokens=request.num_prompt,
        num_cached_tokens=request.hold.num_cached or 0,
        version=version,
        routed_experts=None if ending is None or not request.routes else bytes(request.routes),
        error=None if ending is None else ending.error,
        error_status=None if ending is None else ending.error_status,
    )


def _prompt_scores(
    request: Request,
) -> tuple[tuple[float | None, ...] | None, tuple[tuple[TopLogprob, ...] | None, ...] | None]:
    """Logprobs and alternatives of every prompt token; the first has none, nothing comes before it."""
    if request.params.prompt_logprobs is None:
        return None, None
    tops = (None, *request.prompt_tops) if request.params.prompt_logprobs else None
    return (None, *request.prompt_logprobs), tops
