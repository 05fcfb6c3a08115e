"""POST /generate: text or ids in, text and ids out, in SGLang's form.

In: a body with `text` or `input_ids` (one or a list) and `sampling_params`. Out: `{text, output_ids, meta_info}`, or a
list of them for a list or for n > 1; streamed, each event holds everything so far.
`lora_path` names an adapter that is loaded.
Invariants: channels are never parsed; `no_stop_trim` keeps what ended the text, for callers that train on the ids.
Limits: input_embeds, regex and ebnf are refused.
Source: SGLang's native API.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response

from baltoro.chat.grammar import json_grammar
from baltoro.errors import RequestError
from baltoro.protocol import sse
from baltoro.protocol.openai_reply import to_json
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from baltoro.server.http import EventStream, first_of, json_reply, read_body, takes, while_connected
from baltoro.server.native import decode
from baltoro.server.sampling import (
    checked_ids,
    ids_in_range,
    logit_bias,
    new_id,
    output_room,
    request_ids,
    stop_strings,
)
from baltoro.server.service import Service
from baltoro.server.stream import Increment, TextStream, run
from baltoro.server.tokens import Token, prompt_tokens, spell

# Whole numbers travel on to the engine in 64 bits.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class GenerateParams(msgspec.Struct):
    """`sampling_params`."""

    max_new_tokens: Int = 128
    min_new_tokens: Int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool = False
    sampling_seed: Int | None = None
    n: Int = 1
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerateBody(msgspec.Struct):
    """Body of /generate."""

    text: str | list[str] | None = None
    input_ids: list[Int | list[Int]] | None = None
    sampling_params: GenerateParams = msgspec.field(default_factory=GenerateParams)
    stream: bool = False
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: Int = -1
    top_logprobs_num: Int = 0
    return_text_in_logprobs: bool = False
    lora_path: str | list[str | None] | None = None
    priority: Int = 0
    extra_key: str = ""


def router(service: Service) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/generate", openapi_extra=takes(GenerateBody))
    async def generate(request: Request) -> Response:
        """Complete text or ids; ids, logprobs and numbers come back with the text."""
        body = decode(GenerateBody, await read_body(request, service.config.max_body_bytes))
        job = Job(service, body)
        if not body.stream:
            return json_reply(await while_connected(request, job.whole()))
        events = job.events()
        return EventStream(await while_connected(request, first_of(events)), events)

    return routes


@dataclass(slots=True)
class _Item:
    """One completion as far as it has come. Single writer: its job."""

    submit: Submit
    stream: TextStream
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    num_output: int = 0
    num_cached: int = 0
    policy_version: int = 0
    prompt: list[Token] | None = None
    finish: dict[str, Any] | None = None


class Job:
    """One body on its way. Errors at construction: RequestError. Single writer: its handler."""

    def __init__(self, service: Service, body: GenerateBody) -> None:
        self._service = service
        self._body = body
        self._start = time.monotonic()
        prompts, self._is_list = _prompts(body, service)
        self._n = body.sampling_params.n
        if not 1 <= self._n <= service.config.max_choices:
            raise RequestError(f"n must lie between 1 and {service.config.max_choices}", param="sampling_params.n")
        rids = request_ids(body.rid or new_id("gen"), len(prompts))
        adapters = _adapters(body, service, len(prompts))
        submits = [self._submit(*one) for one in zip(prompts, rids, adapters, strict=True)]
        self._items = {(s.request_id, j): _Item(s, self._text_stream(s)) for s in submits for j in range(self._n)}
        self._submits = submits

    def _text_stream(self, submit: Submit) -> TextStream:
        params = self._body.sampling_params
        return TextStream(
            self._service.tokenizer,
            submit,
            keeps_stop=params.no_stop_trim,
            shows_special=not params.skip_special_tokens,
        )

    def _submit(self, ids: tuple[int, ...], rid: str, adapter: str | None) -> Submit:
        body, asked, vocab_size = self._body, self._body.sampling_params, self._service.tokenizer.vocab_size
        if asked.regex or asked.ebnf:
            raise RequestError("regex and ebnf are not supported; use json_schema", param="sampling_params")
        room = output_room(len(ids), None, self._service.config, prompt_field="text" if body.text else "input_ids")
        max_tokens = min(asked.max_new_tokens, room)
        shared = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        params = SamplingParams(
            **{name: getattr(asked, name) for name in shared},
            top_k=asked.top_k if asked.top_k else -1,
            max_tokens=max_tokens,
            min_tokens=min(asked.min_new_tokens, max_tokens),
            stop=stop_strings(asked.stop),
            stop_token_ids=ids_in_range(asked.stop_token_ids or [], vocab_size, "sampling_params.stop_token_ids"),
            ignore_eos=asked.ignore_eos,
            seed=None if asked.sampling_seed is None else asked.sampling_seed % (1 << 63),
            logit_bias=logit_bias(asked.logit_bias or {}, vocab_size, "sampling_params.logit_bias"),
            logprobs=body.top_logprobs_num if body.return_logprob else None,
            prompt_logprobs=body.top_logprobs_num if body.return_logprob and body.logprob_start_len >= 0 else None,
        )
        return Submit(
            request_id=rid,
            token_ids=ids,
            params=params,
            n=self._n,
            priority=body.priority,
            grammar=_grammar(asked.json_schema),
            adapter=adapter,
            cache_salt=body.extra_key,
        )

    async def _changes(self) -> AsyncGenerator[_Item, None]:
        """The item that a delta changed, once it has."""
        deltas = run(self._service, self._submits)
        try:
            async for delta in deltas:
                item = self._items[delta.request_id, delta.index]
                item.num_output += len(delta.token_ids)
                item.num_cached = max(item.num_cached, delta.num_cached_tokens)
                item.policy_version = delta.version
                if delta.prompt_logprobs is not None:
                    item.prompt = prompt_tokens(item.submit, delta)
                more = item.stream.push(delta)
                item.text += more.text
                item.tokens += more.tokens
                item.finish = _finish(more, item.submit)
                yield item
        finally:
            await deltas.aclose()

    async def whole(self) -> Any:
        """The answer, or the list of answers."""
        async for _ in self._changes():
            pass
        answers = [self._answer(item) for item in self._items.values()]
        return answers if self._is_list or self._n > 1 else answers[0]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answers as events, each with everything so far; `index` tells them apart when there are several."""
        places = {id(item): i for i, item in enumerate(self._items.values())}
        changes = self._changes()
        try:
            async for item in changes:
                answer = self._answer(item)
                if len(places) > 1:
                    answer["index"] = places[id(item)]
                yield sse.encode(to_json(answer))
        finally:
            await changes.aclose()
        yield sse.DONE

    def _answer(self, item: _Item) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": item.submit.request_id,
            "finish_reason": item.finish,
            "prompt_tokens": len(item.submit.token_ids),
            "completion_tokens": item.num_output,
            "cached_tokens": item.num_cached,
            "weight_version": item.policy_version,
            "e2e_latency": time.monotonic() - self._start,
        }
        if self._body.return_logprob:
            self._add_logprobs(meta, "output", item.tokens)
            if self._body.logprob_start_len >= 0:
                self._add_logprobs(meta, "input", (item.prompt or [])[self._body.logprob_start_len :])
        return {"text": item.text, "output_ids": [t.id for t in item.tokens], "meta_info": meta}

    def _add_logprobs(self, meta: dict[str, Any], side: str, tokens: list[Token]) -> None:
        meta[f"{side}_token_logprobs"] = [self._triple(t.id, t.logprob) for t in tokens]
        if self._body.top_logprobs_num:
            tops = [[self._triple(alt.token, alt.logprob) for alt in t.top] or None for t in tokens]
            meta[f"{side}_top_logprobs"] = tops

    def _triple(self, token: int, logprob: float | None) -> list[Any]:
        text = spell(self._service.tokenizer, token)[0] if self._body.return_text_in_logprobs else None
        return [logprob, token, text]


def _grammar(schema: str | None) -> str | None:
    """The grammar of `sampling_params.json_schema`, which is JSON text."""
    if schema is None:
        return None
    try:
        return json_grammar(json.loads(schema))
    except (json.JSONDecodeError, AttributeError, TypeError) as error:
        raise RequestError(
            f"json_schema must be the text of a JSON object: {error}", param="sampling_params.json_schema"
        ) from error


def _adapters(body: GenerateBody, service: Service, count: int) -> list[str | None]:
    """The adapter of each prompt: `lora_path` names one for all, or one each (null for the base)."""
    asked = body.lora_path if isinstance(body.lora_path, list) else [body.lora_path] * count
    if len(asked) != count:
        raise RequestError(f"lora_path has {len(asked)} entries for {count} prompts", param="lora_path")
    return [service.adapters.check(name, "lora_path") for name in asked]


def _prompts(body: GenerateBody, service: Service) -> tuple[list[tuple[int, ...]], bool]:
    """The prompts as ids, and whether the answer is a list."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give text or input_ids", param="text")
    tokenizer = service.tokenizer
    if body.text is not None:
        is_list = isinstance(body.text, list)
        texts = body.text if isinstance(body.text, list) else [body.text]
        ids, param = [tokenizer.encode(text) for text in texts], "text"
    else:
        given, param = body.input_ids or [], "input_ids"
        is_list = bool(given) and isinstance(given[0], list)
        if any(isinstance(entry, list) != is_list for entry in given):
            raise RequestError("input_ids must be ids, or lists of ids", param=param)
        ids = [e for e in given if isinstance(e, list)] if is_list else [[e for e in given if isinstance(e, int)]]
    if not 1 <= len(ids) <= service.config.max_prompts:
        raise RequestError(f"{param} must hold 1 to {service.config.max_prompts} prompts", param=param)
    return [checked_ids(one, tokenizer.vocab_size, param) for one in ids], is_list


def _finish(more: Increment, submit: Submit) -> dict[str, Any] | None:
    """SGLang's finish_reason."""
    if more.ending is None:
        return None
    match more.ending.reason:
        case "length":
            return {"type": "length", "length": submit.params.max_tokens}
        case "stop":
            return {"type": "stop", "matched": more.ending.stop_reason}
        case other:
            return {"type": "abort", "message": other}
