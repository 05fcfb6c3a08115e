"""POST /v1/completions: plain text or ids in, plain text out, streamed or whole.

In: a body. Out: a reply or events, in OpenAI's form; choice i * n + j is the j-th answer to prompt i.
Invariants: text of a client is tokenised as plain text, never as control ids; whole and streamed replies come from the
same increments.
Limits: `suffix` and `best_of` above n are refused.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from baltoro.chat.tokenizer import Tokenizer
from baltoro.errors import RequestError
from baltoro.protocol import sse
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.openai import CompletionRequest, parse
from baltoro.protocol.openai_reply import TextChoice, TextCompletion, TextLogprobs, Usage, to_json, usage
from baltoro.protocol.worker import Submit
from baltoro.server.http import EventStream, first_of, json_reply, read_body, takes, while_connected
from baltoro.server.sampling import checked_ids, new_id, num_choices, output_room, request_ids, sampling_params
from baltoro.server.service import Service
from baltoro.server.stream import Counts, Increment, TextStream, run
from baltoro.server.tokens import Token, prompt_tokens, spell


def router(service: Service) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Complete text, as OpenAI's endpoint of that name."""
        body = parse(CompletionRequest, await read_body(request, service.config.max_body_bytes))
        job = Job(service, body)
        if not body.stream:
            return json_reply(await while_connected(request, job.whole()))
        events = job.events()
        return EventStream(await while_connected(request, first_of(events)), events)

    return routes


class Job:
    """One body on its way. Errors at construction: RequestError, NotFound. Single writer: its handler."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        self._adapter = service.select(body.model)
        if body.suffix:
            raise RequestError("suffix is not supported; leave it out", param="suffix")
        self._n = num_choices(body, service.config)
        if body.best_of is not None and body.best_of != self._n:
            raise RequestError("best_of other than n is not supported; leave it out", param="best_of")
        self._service = service
        self._body = body
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._counts = Counts()
        prompts = prompt_ids(body.prompt, service)
        rids = request_ids(body.rid or self._id, len(prompts))
        self._submits = [self._submit(ids, rid) for ids, rid in zip(prompts, rids, strict=True)]
        self._place = {submit.request_id: i for i, submit in enumerate(self._submits)}
        self._streams = [TextStream(service.tokenizer, submit) for submit in self._submits for _ in range(self._n)]
        self._echoes: dict[int, list[Token]] = {}

    def _submit(self, ids: tuple[int, ...], request_id: str) -> Submit:
        body, config, tokenizer = self._body, self._service.config, self._service.tokenizer
        room = output_room(len(ids), body.max_tokens, config, prompt_field="prompt")
        params = sampling_params(
            body,
            config,
            vocab_size=tokenizer.vocab_size,
            max_tokens=min(room, config.default_max_tokens) if body.max_tokens is None else room,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        return Submit(
            request_id=request_id,
            token_ids=ids,
            params=params,
            n=self._n,
            priority=body.priority or 0,
            adapter=self._adapter,
            cache_salt=body.cache_salt or "",
        )

    async def _increments(self) -> AsyncGenerator[tuple[int, Increment], None]:
        """(choice, what is new of it), in the order in which the engine tells it."""
        deltas = run(self._service, self._submits)
        started: set[int] = set()
        try:
            async for delta in deltas:
                self._counts.add(delta)
                at = self._place[delta.request_id] * self._n + delta.index
                more = self._streams[at].push(delta)
                if self._body.echo and at not in started:
                    more = self._echo(at // self._n, delta, more)
                if more.text or more.tokens or more.ending or at not in started:
                    started.add(at)
                    yield at, more
        finally:
            await deltas.aclose()

    def _echo(self, place: int, delta: TokenDelta, more: Increment) -> Increment:
        """The first increment of a choice with the prompt before it; its logprobs come once for all n."""
        submit = self._submits[place]
        if delta.prompt_logprobs is not None or place not in self._echoes:
            self._echoes[place] = prompt_tokens(submit, delta)
        text = self._service.tokenizer.decode(submit.token_ids)
        return Increment(text + more.text, self._echoes[place] + more.tokens, more.ending)

    def _choice(self, at: int, more: Increment, offset: int = 0) -> TextChoice:
        num_top, ending = self._body.logprobs, more.ending
        stop_reason = ending.stop_reason if ending is not None else None
        return TextChoice(
            index=at,
            text=more.text,
            logprobs=None if num_top is None else text_logprobs(self._service.tokenizer, more.tokens, offset, num_top),
            finish_reason=ending.reason if ending is not None else None,
            stop_reason=UNSET if stop_reason is None else stop_reason,
        )

    def _reply(self, choices: list[TextChoice], total: Usage | UnsetType = UNSET) -> TextCompletion:
        model = self._service.label(self._adapter)
        return TextCompletion(id=self._id, created=self._created, model=model, choices=choices, usage=total)

    def _usage(self) -> Usage:
        return usage(self._counts.num_prompt, self._counts.num_output, cached=self._counts.num_cached)

    async def whole(self) -> TextCompletion:
        """The reply when all choices have ended."""
        wholes = [Increment("", []) for _ in self._streams]
        async for at, more in self._increments():
            before = wholes[at]
            wholes[at] = Increment(before.text + more.text, before.tokens + more.tokens, more.ending)
        return self._reply([self._choice(at, whole) for at, whole in enumerate(wholes)], self._usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events."""
        options = self._body.stream_options
        offsets = [0 for _ in self._streams]
        increments = self._increments()
        try:
            async for at, more in increments:
                yield sse.encode(to_json(self._reply([self._choice(at, more, offsets[at])])))
                offsets[at] += len(more.text)
        finally:
            await increments.aclose()
        if options is not None and options.include_usage:
            yield sse.encode(to_json(self._reply([], self._usage())))
        yield sse.DONE


def prompt_ids(prompt: str | list[str] | list[int] | list[list[int]], service: Service) -> list[tuple[int, ...]]:
    """The prompts of a body as ids. Errors: RequestError for none, too many, an empty one, or an id that is none."""
    tokenizer, limit = service.tokenizer, service.config.max_prompts
    items: list[str | list[int]] = []
    if isinstance(prompt, str):
        items = [prompt]
    elif prompt and isinstance(prompt[0], int):
        items = [[i for i in prompt if isinstance(i, int)]]
    else:
        items = [item for item in prompt if not isinstance(item, int)]
    if not 1 <= len(items) <= limit:
        raise RequestError(f"prompt must hold 1 to {limit} prompts", param="prompt")
    ids = [tokenizer.encode(item) if isinstance(item, str) else item for item in items]
    return [checked_ids(one, tokenizer.vocab_size, "prompt") for one in ids]


def text_logprobs(tokenizer: Tokenizer, tokens: list[Token], offset: int, num_top: int) -> TextLogprobs:
    """OpenAI's parallel lists for `tokens`, whose text begins at character `offset`."""
    out = TextLogprobs([], [], [], [])
    for token in tokens:
        text, _ = spell(tokenizer, token.id)
        top = {spell(tokenizer, t.token)[0]: t.logprob for t in token.top}
        out.tokens.append(text)
        out.token_logprobs.append(token.logprob)
        out.top_logprobs.append(top if num_top and token.logprob is not None else None)
        out.text_offset.append(offset)
        offset += len(text)
    return out
