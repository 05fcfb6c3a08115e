"""POST /v1/chat/completions: render -> submit -> stream or collect.

In: a body. Out: a `ChatCompletion`, or events in the exact shape that Moonshot's stream specification asks of K3:
    {role, content ""}  then increments, one kind each, in one choice each
    {reasoning_content ""} marks the end of thinking; a call starts with id, type, name and arguments ""
    {} with finish_reason and the choice's usage; with include_usage a last event without choices
Invariants: a key that says nothing is absent; id, created and model are those of the first event; a stream and a whole
reply are made of the same pieces; ids of calls are NAME_k, k counting all calls of the conversation from 0.
Limit: when a model skips its think channel, a stream has called the answer reasoning by then and sends it once more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from baltoro.chat.events import (
    ContentDelta,
    ReasoningDelta,
    ReasoningWasContent,
    ToolCallArguments,
    ToolCallBegin,
    collect,
)
from baltoro.protocol import sse
from baltoro.protocol.openai import ChatRequest, parse
from baltoro.protocol.openai_reply import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatFinish,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    FunctionOut,
    InternalContent,
    MessageOut,
    ToolCallOut,
    Usage,
    to_json,
    usage,
)
from baltoro.server.chat_plan import ChatPlan, plan_chat
from baltoro.server.chat_stream import ChatStream, Piece
from baltoro.server.http import EventStream, first_of, json_reply, read_body, takes, while_connected
from baltoro.server.service import Service
from baltoro.server.stream import Counts, run
from baltoro.server.tokens import logprob_entry

# A body this large, or one with a grammar to compile, is prepared in a thread, so that others do not wait for it.
THREAD_FROM_BYTES = 16 << 10


def router(service: Service) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, as OpenAI's endpoint of that name."""
        raw = await read_body(request, service.config.max_body_bytes)
        body = parse(ChatRequest, raw)
        adapter = service.select(body.model)
        service.check_alive()
        has_grammar = body.response_format is not None or body.tool_choice is not None
        if len(raw) < THREAD_FROM_BYTES and not has_grammar:
            plan = plan_chat(body, service.config, service.tokenizer)
        else:
            plan = await asyncio.to_thread(plan_chat, body, service.config, service.tokenizer)
        job = Job(service, body, plan.with_adapter(adapter))
        if not body.stream:
            reply = await while_connected(request, job.whole())
            return json_reply(reply, job.usage_headers())
        events = job.events()
        first = await while_connected(request, first_of(events))
        return EventStream(first, events, job.usage_headers())

    return routes


class _Choice:
    """One answer as far as it has come. Single writer: its job."""

    def __init__(self, index: int, stream: ChatStream) -> None:
        self.index = index
        self.stream = stream
        self.pieces: list[Piece] = []
        self.num_output = 0
        self.is_open = False
        self.is_reasoning = False


class Job:
    """One chat request on its way. Single writer: its handler."""

    def __init__(self, service: Service, body: ChatRequest, plan: ChatPlan) -> None:
        options = body.stream_options
        self._service = service
        self._plan = plan
        self._has_usage = options is not None and bool(options.include_usage)
        self._has_internal = options is not None and bool(options.include_internal_content)
        self._created = int(time.time())
        self._counts = Counts()
        self._choices = [_Choice(i, ChatStream(service.tokenizer, plan)) for i in range(plan.submit.n)]

    def usage_headers(self) -> dict[str, str]:
        """What is known of the prompt once the first delta is here."""
        told = self._usage(0, 0)
        return {
            "x-msh-usage-prompt-tokens": str(told.prompt_tokens),
            "x-msh-usage-cached-tokens": str(told.prompt_tokens_details.cached_tokens),
        }

    async def whole(self) -> ChatCompletion:
        """The reply when all choices have ended."""
        async for choice, pieces in self._steps():
            choice.pieces += pieces
        return ChatCompletion(
            id=self._plan.id,
            created=self._created,
            model=self._service.label(self._plan.submit.adapter),
            choices=[self._whole_choice(choice) for choice in self._choices],
            usage=self._total(),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events."""
        steps = self._steps()
        try:
            async for choice, pieces in steps:
                for out in self._chunk_choices(choice, pieces):
                    yield self._event([out])
        finally:
            await steps.aclose()
        if self._has_usage:
            yield self._event([], self._total())
        yield sse.DONE

    async def _steps(self) -> AsyncGenerator[tuple[_Choice, list[Piece]], None]:
        deltas = run(self._service, [self._plan.submit])
        try:
            async for delta in deltas:
                self._counts.add(delta)
                choice = self._choices[delta.index]
                choice.num_output += len(delta.token_ids)
                yield choice, choice.stream.push(delta)
        finally:
            await deltas.aclose()

    def _chunk_choices(self, choice: _Choice, pieces: list[Piece]) -> Iterator[ChunkChoice]:
        """The frames of one step of one choice."""
        if not choice.is_open:
            choice.is_open = True
            yield ChunkChoice(index=choice.index, delta=Delta(role="assistant", content=""))
        for piece in pieces:
            if isinstance(piece.event, ReasoningDelta):
                choice.is_reasoning = True
            elif choice.is_reasoning:
                choice.is_reasoning = False
                yield ChunkChoice(index=choice.index, delta=Delta(reasoning_content=""))
            delta = self._delta(piece)
            if delta is not None:
                is_content = isinstance(piece.event, ContentDelta) and self._plan.has_logprobs and piece.tokens
                logprobs = self._logprobs([piece]) if is_content else UNSET
                yield ChunkChoice(index=choice.index, delta=delta, logprobs=logprobs)
        if choice.stream.ending is not None:
            yield ChunkChoice(
                index=choice.index,
                delta=Delta(),
                finish_reason=_finish(choice.stream),
                stop_reason=_stop_reason(choice.stream),
                usage=self._usage(choice.num_output, choice.stream.num_reasoning),
            )

    def _delta(self, piece: Piece) -> Delta | None:
        """What a piece adds to a stream; None if nothing."""
        internal: InternalContent | UnsetType = UNSET
        if self._has_internal and piece.token_ids:
            internal = InternalContent(piece.token_ids)
        match piece.event:
            case ReasoningDelta(text):
                return Delta(reasoning_content=text, internal_content=internal)
            case ContentDelta(text) | ReasoningWasContent(text):
                return Delta(content=text, internal_content=internal)
            case ToolCallBegin(index, _, name):
                call = ToolCallOut(
                    index=index, id=self._call_id(name, index), type="function", function=FunctionOut("", name)
                )
                return Delta(tool_calls=[call], internal_content=internal)
            case ToolCallArguments(index, fragment):
                more = ToolCallOut(index=index, function=FunctionOut(fragment))
                return Delta(tool_calls=[more], internal_content=internal)
        return None

    def _whole_choice(self, choice: _Choice) -> ChatChoice:
        parsed = collect(piece.event for piece in choice.pieces)
        calls = [
            ToolCallOut(
                id=self._call_id(call.name, i), type="function", function=FunctionOut(call.arguments, call.name)
            )
            for i, call in enumerate(parsed.tool_calls)
        ]
        content = [piece for piece in choice.pieces if isinstance(piece.event, ContentDelta)]
        return ChatChoice(
            index=choice.index,
            message=MessageOut(
                content=parsed.content if parsed.content or not calls else None,
                reasoning_content=UNSET if parsed.reasoning is None else parsed.reasoning,
                tool_calls=calls or UNSET,
            ),
            logprobs=self._logprobs(content) if self._plan.has_logprobs else None,
            finish_reason=_finish(choice.stream),
            stop_reason=_stop_reason(choice.stream),
        )

    def _call_id(self, name: str, index: int) -> str:
        return f"{name}_{self._plan.num_past_calls + index}"

    def _logprobs(self, pieces: list[Piece]) -> ChatLogprobs:
        tokenizer = self._service.tokenizer
        return ChatLogprobs([logprob_entry(tokenizer, token) for piece in pieces for token in piece.tokens])

    def _event(self, choices: list[ChunkChoice], total: Usage | UnsetType = UNSET) -> bytes:
        model = self._service.label(self._plan.submit.adapter)
        chunk = ChatChunk(id=self._plan.id, created=self._created, model=model, choices=choices, usage=total)
        return sse.encode(to_json(chunk))

    def _total(self) -> Usage:
        return self._usage(self._counts.num_output, sum(choice.stream.num_reasoning for choice in self._choices))

    def _usage(self, num_output: int, num_reasoning: int) -> Usage:
        """The opening of the first channel is not the client's, in the prompt as little as in the cache."""
        num_prompt = len(self._plan.submit.token_ids) - self._plan.num_hidden
        cached = min(self._counts.num_cached, num_prompt)
        return usage(num_prompt, num_output, cached=cached, reasoning=num_reasoning)


def _finish(stream: ChatStream) -> ChatFinish:
    assert stream.ending is not None
    if stream.ending.reason == "stop" and stream.num_calls:
        return "tool_calls"
    return stream.ending.reason


def _stop_reason(stream: ChatStream) -> int | str | UnsetType:
    assert stream.ending is not None
    return UNSET if stream.ending.stop_reason is None else stream.ending.stop_reason
