"""The ASGI application: routes put together, the key in front of them, errors in one shape.

In: settings, a worker, a tokenizer. Out: an application for uvicorn, or for a test.
Invariants: imports no torch; everything but /health, /metrics and the documentation asks for the key; unknown paths,
wrong methods and bugs are answered with OpenAI's error object.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response

from baltoro.chat.tokenizer import Tokenizer
from baltoro.errors import BaltoroError, WorkerLost
from baltoro.protocol.openai import json_schemas
from baltoro.protocol.openai_reply import ModelCard, ModelList
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from baltoro.server import adapter_routes, chat, completions, errors, generate, native
from baltoro.server.adapters import LoadedAdapters
from baltoro.server.config import ServerConfig
from baltoro.server.health import CONTENT_TYPE, Metrics
from baltoro.server.http import SCHEMA_REF, check_key, json_reply
from baltoro.server.sampling import new_id
from baltoro.server.service import Service
from baltoro.server.stream import run
from baltoro.server.worker import Worker

METRICS_TIMEOUT_S = 2.0


def create_app(config: ServerConfig, worker: Worker, tokenizer: Tokenizer) -> FastAPI:
    """An application. The worker must be ready."""
    loaded = LoadedAdapters(worker.info.get("adapters", {}))
    service = Service(config, worker, tokenizer, Metrics(config.model_name), int(time.time()), loaded)
    app = _Described(title="baltoro", description="A model of the Kimi K3 architecture over the OpenAI API.")
    errors.install(app)
    app.include_router(_open_routes(service))

    async def needs_key(request: Request) -> None:
        check_key(request, config.api_key)

    for module in (chat, completions, generate, native, adapter_routes):
        app.include_router(module.router(service), dependencies=[Depends(needs_key)])
    app.include_router(_models(service), dependencies=[Depends(needs_key)])
    return app


class _Described(FastAPI):
    """Adds the bodies that our routes read themselves to the description of the API."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schemas: dict[str, Any] = super().openapi().setdefault("components", {}).setdefault("schemas", {})
            schemas.update(json_schemas(SCHEMA_REF))
            own = (generate.GenerateBody, native.AbortBody, *adapter_routes.BODIES)
            _, components = msgspec.json.schema_components(own, ref_template=SCHEMA_REF.replace("model", "name"))
            schemas.update(components)
        return super().openapi()


def _open_routes(service: Service) -> APIRouter:
    """What a load balancer and a metrics collector ask, without a key."""
    routes = APIRouter()

    @routes.get("/health")
    @routes.get("/ready", include_in_schema=False)
    @routes.get("/ping", include_in_schema=False)
    async def health() -> Response:
        """200 while the engine lives, 503 once it is gone."""
        service.check_alive()
        return json_reply({"status": "ok"})

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        numbers = {}
        if service.worker.failure is None:
            try:
                numbers = await asyncio.wait_for(service.worker.query(), METRICS_TIMEOUT_S)
            except (WorkerLost, TimeoutError):
                numbers = {}
        return Response(service.metrics.page(numbers), media_type=CONTENT_TYPE)

    return routes


def _models(service: Service) -> APIRouter:
    """The model list, and the probe that makes a token."""
    routes = APIRouter()
    config = service.config
    card = ModelCard(id=config.model_name, created=service.started_s, max_model_len=config.max_context_tokens)

    @routes.get("/v1/models")
    async def models() -> Response:
        """The model of this server, and its adapters."""
        return json_reply(ModelList(data=[card, *service.adapters.cards(card)]))

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Facts of the model."""
        wanted = service.label(service.select(name))
        cards = (card, *service.adapters.cards(card))
        return json_reply(next(one for one in cards if one.id == wanted))

    @routes.get("/health_generate")
    async def health_generate() -> Response:
        """200 if the engine makes a token in time, 503 if not."""
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        ids = (service.tokenizer.eos_ids[0],)
        probe = Submit(request_id=new_id("health"), token_ids=ids, params=params, priority=1 << 20)
        try:
            async with asyncio.timeout(config.call_timeout_s):
                async for _ in run(service, [probe]):
                    pass
        except TimeoutError as error:
            raise WorkerLost(f"the engine made no token within {config.call_timeout_s:g} s") from error
        except WorkerLost:
            raise
        except BaltoroError as error:
            raise WorkerLost(f"the engine makes no tokens: {error}") from error
        return json_reply({"status": "ok"})

    return routes
