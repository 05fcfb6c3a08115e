"""Adapters over HTTP: load, replace, unload.

In: bodies in SGLang's and vLLM's form. Out: what is loaded, by name; 4xx with the engine's reason when it refuses.
Invariants: a load under a name that is taken is a new version, and nothing cached before is used for it; an unload is
answered once the adapter's running requests have ended; tensors come as a safetensors file, never as a pickle.
Limits: a path is one on the engine's machine; `pinned` and added tokens are refused.
Source: SGLang's /load_lora_adapter, /load_lora_adapter_from_tensors, /unload_lora_adapter; vLLM's /v1 forms of them.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from baltoro.errors import RequestError
from baltoro.server.http import json_reply, read_body, takes
from baltoro.server.native import decode
from baltoro.server.service import Service


class LoadAdapterBody(msgspec.Struct):
    """Body of /load_lora_adapter and /v1/load_lora_adapter. `lora_path`: a folder on the engine's machine."""

    lora_name: str
    lora_path: str
    pinned: bool = False
    load_inplace: bool = True


class LoadTensorsBody(msgspec.Struct):
    """Body of /load_lora_adapter_from_tensors. `serialized_tensors`: base64 of a safetensors file, names without PEFT's
    prefix; `config_dict`: the fields of its adapter_config.json."""

    lora_name: str
    config_dict: dict[str, Any]
    serialized_tensors: str
    added_tokens_config: dict[str, Any] | None = None
    pinned: bool = False


class UnloadAdapterBody(msgspec.Struct):
    """Body of /unload_lora_adapter and /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


BODIES = (LoadAdapterBody, LoadTensorsBody, UnloadAdapterBody)


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    limit = service.config.max_body_bytes

    async def load(request: Request) -> LoadAdapterBody:
        body = decode(LoadAdapterBody, await read_body(request, limit))
        _no_pin(body.pinned)
        if not body.load_inplace and body.lora_name in service.adapters.facts:
            raise RequestError(f"{body.lora_name} is loaded already, and load_inplace is false", param="lora_name")
        service.adapters.facts = await service.worker.load_adapter(body.lora_name, path=body.lora_path)
        return body

    async def unload(request: Request) -> UnloadAdapterBody:
        body = decode(UnloadAdapterBody, await read_body(request, limit))
        service.adapters.check(body.lora_name, "lora_name")
        service.adapters.facts.pop(body.lora_name)  # nobody selects it while it waits for its users
        service.adapters.facts = await service.worker.unload_adapter(body.lora_name)
        return body

    @routes.post("/load_lora_adapter", openapi_extra=takes(LoadAdapterBody))
    async def load_lora_adapter(request: Request) -> Response:
        """Load an adapter from a folder, or a new version of it."""
        await load(request)
        return _listing(service)

    @routes.post("/load_lora_adapter_from_tensors", openapi_extra=takes(LoadTensorsBody))
    async def load_lora_adapter_from_tensors(request: Request) -> Response:
        """Load an adapter that the body itself holds, or a new version of it."""
        body = decode(LoadTensorsBody, await read_body(request, limit))
        _no_pin(body.pinned)
        if body.added_tokens_config:
            raise RequestError("adapters with tokens of their own are not supported", param="added_tokens_config")
        tensors = _decoded(body.serialized_tensors)
        facts = await service.worker.load_adapter(body.lora_name, tensors=tensors, config=body.config_dict)
        service.adapters.facts = facts
        return _listing(service)

    @routes.post("/unload_lora_adapter", openapi_extra=takes(UnloadAdapterBody))
    async def unload_lora_adapter(request: Request) -> Response:
        """Refuse an adapter from now on; answers when its running requests have ended."""
        await unload(request)
        return _listing(service)

    @routes.post("/v1/load_lora_adapter", openapi_extra=takes(LoadAdapterBody))
    async def load_v1(request: Request) -> Response:
        """As /load_lora_adapter, answered in vLLM's words."""
        name = (await load(request)).lora_name
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

    @routes.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadAdapterBody))
    async def unload_v1(request: Request) -> Response:
        """As /unload_lora_adapter, answered in vLLM's words."""
        name = (await unload(request)).lora_name
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")

    return routes


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        words = f"serialized_tensors must be base64 of a safetensors file: {error}"
        raise RequestError(words, param="serialized_tensors") from error


def _no_pin(pinned: bool) -> None:
    if pinned:
        raise RequestError("pinned adapters are not supported; give the server more --max-loras", param="pinned")


def _listing(service: Service) -> Response:
    facts = service.adapters.facts
    return json_reply({"success": True, "loaded_adapters": {n: f["path"] for n, f in facts.items()}, "facts": facts})
