from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.server.conftest import Lab, MakeLab

BODY = {"prompt": "a", "max_tokens": 2}


def test_the_server_imports_no_torch() -> None:
    code = "import sys, baltoro.server.app, baltoro.server.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/health_generate"])
async def test_a_living_engine_is_healthy(lab: Lab, path: str) -> None:
    assert (await lab.http.get(path)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/server_info"])
async def test_a_lost_engine_is_503_with_the_reason(lab: Lab, path: str) -> None:
    lab.worker.lose("exit code -9")
    reply = await lab.http.get(path)
    assert reply.status_code == 503
    assert "exit code -9" in reply.json()["error"]["message"]
    assert reply.headers["retry-after"]
    status, error = await lab.error("/v1/completions", BODY)
    assert (status, error["type"]) == (503, "service_unavailable")


async def test_an_engine_that_makes_no_token_fails_the_probe_and_is_told_to_stop(lab: Lab) -> None:
    lab.say("a", stall_at=0)
    assert (await lab.http.get("/health_generate")).status_code == 503
    await lab.engine.until(lambda: len(lab.engine.aborted) == 1)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)]
)
async def test_unknown_paths_and_methods_have_the_error_shape(lab: Lab, method: str, path: str, status: int) -> None:
    reply = await lab.http.request(method, path)
    assert reply.status_code == status
    assert path in reply.json()["error"]["message"]


async def test_a_bug_is_500_and_tells_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(lab.worker, "submit", broken)
    status, error = await lab.error("/v1/completions", BODY)
    assert (status, error["type"]) == (500, "server_error")
    assert "secret" not in error["message"]


async def test_every_route_but_health_and_metrics_asks_for_the_key(make_lab: MakeLab) -> None:
    lab = await make_lab(api_key="sesame")
    paths = (await lab.http.get("/openapi.json")).json()["paths"]
    routes = [(path.replace("{name}", "x"), method) for path, methods in paths.items() for method in methods]
    guarded = [(path, method) for path, method in routes if path not in ("/health", "/metrics")]
    assert len(guarded) > 8
    for path, method in guarded:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}, {"x-api-key": "x"}):
            reply = await lab.http.request(method, path, headers=headers, content=b"{}")
            assert reply.status_code == 401, path
            assert reply.json()["error"]["code"] == "invalid_api_key"
    assert (await lab.http.get("/health")).status_code == 200
    assert (await lab.http.get("/metrics")).status_code == 200


@pytest.mark.parametrize("headers", [{"authorization": "Bearer sesame"}, {"authorization": "bearer sesame"}])
async def test_the_key_opens(make_lab: MakeLab, headers: dict[str, str]) -> None:
    lab = await make_lab(api_key="sesame")
    assert (await lab.http.get("/v1/models", headers=headers)).status_code == 200
    assert (await lab.http.get("/v1/models", headers={"x-api-key": "sesame"})).status_code == 200


async def test_the_description_of_the_api_names_every_body_it_refers_to(lab: Lab) -> None:
    text = (await lab.http.get("/openapi.json")).text
    schemas = json.loads(text)["components"]["schemas"]
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert {"ChatRequest", "CompletionRequest", "GenerateBody", "AbortBody"} <= referred <= set(schemas)
    assert "messages" in schemas["ChatRequest"]["properties"]


async def test_a_body_over_the_limit_is_413(make_lab: MakeLab) -> None:
    lab = await make_lab(max_body_bytes=100)
    status, error = await lab.error("/v1/completions", {"prompt": "x" * 200})
    assert (status, error["type"]) == (413, "invalid_request_error")

    async def chunks() -> Any:
        for _ in range(10):
            yield b" " * 20

    reply = await lab.http.post("/v1/completions", content=chunks())
    assert reply.status_code == 413
    await lab.post("/v1/completions", BODY)


async def test_metrics_count_what_was_done(lab: Lab) -> None:
    lab.engine.info = {"num_running_reqs": 3, "token_usage": 0.25, "irrelevant": "x"}
    lab.engine.num_cached = 1
    lab.say("hello")
    await lab.post("/v1/completions", {"prompt": "abc"})
    page = (await lab.http.get("/metrics")).text
    for line in (
        'baltoro:num_running_reqs{model_name="tiny"} 3.0',
        'baltoro:token_usage{model_name="tiny"} 0.25',
        'baltoro:prompt_tokens_total{model_name="tiny"} 3.0',
        'baltoro:cached_tokens_total{model_name="tiny"} 1.0',
        'baltoro:generation_tokens_total{model_name="tiny"} 6.0',
        'baltoro:num_requests_total{model_name="tiny"} 1.0',
        'baltoro:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'baltoro:inter_token_latency_seconds_count{model_name="tiny"} 5.0',
        'baltoro:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
    ):
        assert line in page.splitlines()


async def test_metrics_work_without_an_engine(lab: Lab) -> None:
    lab.worker.lose("gone")
    assert (await lab.http.get("/metrics")).status_code == 200


async def test_models_lists_the_one_model(lab: Lab) -> None:
    card = (await lab.http.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 4096)
    assert (await lab.http.get("/v1/models/tiny")).json() == card
    assert (await lab.http.get("/v1/models/other")).status_code == 404
