"""Routes that are not OpenAI's: tokenize, detokenize, flush, abort, and what model and server this is.

In: bodies. Out: JSON.
Invariants: nothing here starts a generation (`server.generate`) or tells the API key.
Source: the route names and shapes of SGLang and vLLM.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from baltoro.chat.xtml import render
from baltoro.errors import RequestError
from baltoro.protocol.openai import DetokenizeRequest, TokenizeRequest, parse
from baltoro.server.http import json_reply, read_body, takes
from baltoro.server.sampling import checked_ids
from baltoro.server.service import Service

Struct = TypeVar("Struct", bound=msgspec.Struct)


class AbortBody(msgspec.Struct):
    """Which request to end: one by its id, or all."""

    rid: str | None = None
    abort_all: bool = False


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    limit = service.config.max_body_bytes

    @routes.post("/v1/tokenize", openapi_extra=takes(TokenizeRequest))
    @routes.post("/tokenize", include_in_schema=False)
    async def tokenize(request: Request) -> Response:
        """Ids of a text, or of a conversation as the model is shown it."""
        return json_reply(_tokenize(service, parse(TokenizeRequest, await read_body(request, limit))))

    @routes.post("/v1/detokenize", openapi_extra=takes(DetokenizeRequest))
    @routes.post("/detokenize", include_in_schema=False)
    async def detokenize(request: Request) -> Response:
        """Text of ids."""
        body = parse(DetokenizeRequest, await read_body(request, limit))
        ids = checked_ids(body.tokens, service.tokenizer.vocab_size, "tokens") if body.tokens else ()
        text = service.tokenizer.decode(ids)
        return json_reply({"prompt": text, "text": text})

    @routes.post("/flush_cache")
    @routes.get("/flush_cache")
    async def flush_cache() -> Response:
        """Forget cached prefixes; running requests are not touched."""
        await service.worker.flush()
        return json_reply({"success": True})

    @routes.post("/abort_request", openapi_extra=takes(AbortBody))
    async def abort_request(request: Request) -> Response:
        """End a request by its id (`rid`), or all (`abort_all`). Unknown ids are no error: it may have just ended."""
        body = decode(AbortBody, await read_body(request, limit))
        if not body.abort_all and not body.rid:
            raise RequestError("give rid, or set abort_all", param="rid")
        for request_id in service.worker.running:
            if body.abort_all or request_id == body.rid or request_id.startswith(f"{body.rid}:"):
                service.worker.abort(request_id)
        return json_reply({"success": True})

    @routes.get("/model_info")
    @routes.get("/get_model_info", include_in_schema=False)
    async def model_info() -> Response:
        """What model this is."""
        config, info = service.config, service.worker.info
        facts = {
            "model": config.model_name,
            "max_model_len": config.max_context_tokens,
            "has_vision": config.patch_size is not None,
        }
        return json_reply({**facts, "vocab_size": service.tokenizer.vocab_size, **info.get("model", {})})

    @routes.get("/server_info")
    @routes.get("/get_server_info", include_in_schema=False)
    async def server_info() -> Response:
        """What this server was told, what the engine decided, and its numbers now."""
        service.check_alive()
        settings = msgspec.to_builtins(service.config)
        settings["api_key"] = None if service.config.api_key is None else "set"
        numbers = await service.worker.query()
        return json_reply({"server": settings, "engine": service.worker.info, "state": numbers})

    return routes


def decode(kind: type[Struct], body: bytes) -> Struct:
    """A body of a route that is ours alone. Errors: RequestError with the field msgspec complains of."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        param = path.strip(".`") or None
        raise RequestError(f"{param or 'the body'}: {text[:1].lower()}{text[1:]}", param=param) from error
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    text = body.prompt if body.prompt is not None else body.text
    if (text is None) == (body.messages is None):
        raise RequestError("give prompt (or text), or messages", param="prompt")
    if text is not None:
        ids = service.tokenizer.encode(text)
    else:
        assert body.messages is not None
        options = body.chat_template_kwargs
        thinking = options is None or (options.thinking is not False and options.enable_thinking is not False)
        messages = [m.model_dump(exclude_unset=True) for m in body.messages]
        ids = render(messages, tokenizer=service.tokenizer, tools=body.tools, thinking=thinking).ids
    return {"tokens": ids, "count": len(ids), "max_model_len": service.config.max_context_tokens}
