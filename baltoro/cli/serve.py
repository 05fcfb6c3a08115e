"""`baltoro serve`: a model over the OpenAI API."""

from __future__ import annotations

import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baltoro.cli.adapters import AdapterOptions, takes_adapter_options
from baltoro.cli.memory import CacheOptions, takes_cache_options

if TYPE_CHECKING:
    from baltoro.server.config import ServerConfig

# The first words of the line that says that clients may come; `baltoro chat` waits for it.
READY = "baltoro: serving"

Model = Annotated[Path | None, typer.Argument(help="Model folder. Default: BALTORO_MODEL, else the one in models/.")]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")]
Port = Annotated[int, typer.Option(help="Port; 0 picks a free one.")]
ApiKey = Annotated[
    str | None, typer.Option(help="Ask clients for this key. @FILE reads it from a file.", show_default=False)
]
Name = Annotated[str | None, typer.Option(help="Model name that clients use. Default: the folder's.")]
MaxRunning = Annotated[int, typer.Option(help="Requests that run at once.")]
MaxWaiting = Annotated[int, typer.Option(help="Requests that may wait; the next one gets 429.")]
MaxContext = Annotated[int, typer.Option(help="Tokens of prompt and answer. 0: what model and memory allow.")]
MaxBatchTokens = Annotated[int, typer.Option(help="Tokens of one step.")]
PageSize = Annotated[
    int, typer.Option(help="Tokens of a KV page: a power of two up to 64, or a multiple of --hash-endpoint.")
]
Memory = Annotated[str, typer.Option(help="Bytes for KV and state, such as 4GiB. auto: a share of what is free.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float32 or float64.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Graphs = Annotated[
    int, typer.Option(help="On a GPU: capture steps of up to so many decodes as CUDA graphs; 0 runs them one by one.")
]
Seed = Annotated[int, typer.Option(help="Seed of requests that bring none.")]
Thinking = Annotated[
    bool, typer.Option("--thinking/--no-thinking", help="Whether answers are thought out unless a client says.")
]
Effort = Annotated[
    str | None,
    typer.Option(help="Effort of requests that name none: low, high or max. Default: not shown to the model."),
]
MaxBody = Annotated[str, typer.Option(help="Largest request body.")]
Drain = Annotated[float, typer.Option(help="Seconds that running requests get to end after a signal.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="One JSON object per log line.")]


@takes_cache_options
@takes_adapter_options
def serve(
    model: Model = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    name: Name = None,
    max_running: MaxRunning = 64,
    max_waiting: MaxWaiting = 4096,
    max_context: MaxContext = 0,
    max_batch_tokens: MaxBatchTokens = 1024,
    page_size: PageSize = 64,
    memory: Memory = "auto",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    graphs: Graphs = 64,
    seed: Seed = 0,
    thinking: Thinking = True,
    effort: Effort = None,
    max_body: MaxBody = "64MiB",
    drain: Drain = 30.0,
    log_level: LogLevel = "warning",
    log_json: LogJson = False,
    *,
    cache: CacheOptions,
    adapters: AdapterOptions,
) -> None:
    """Serve a model over the OpenAI API, until Ctrl-C or SIGTERM.

    Running requests are finished first (at most --drain seconds), then both processes end with exit code 0. When the
    engine dies, clients get 503 and the exit code is 1.

    Examples:

        baltoro serve

        baltoro serve models/mini --port 8080 --api-key @key.txt

        baltoro serve models/mini --max-loras 4 --lora-modules sums=adapters/sums

        baltoro serve /data/k3 --host 0.0.0.0 --memory 64GiB --max-running 256 --max-context 131072

        baltoro serve models/mini --host-cache 512MiB --disk-cache-dir prefixes --disk-cache 4GiB
    """
    from baltoro.chat.messages import check_effort
    from baltoro.cli.box import find_model
    from baltoro.cli.engine_process import EngineProcess, LogOptions
    from baltoro.cli.options import bind, default_sampling, read_key, size_bytes, vision_patch_size
    from baltoro.engine.config import EngineConfig
    from baltoro.server.config import ServerConfig

    folder = find_model(model)
    engine = EngineConfig(
        page_size=page_size, max_batch_tokens=max_batch_tokens, max_running=max_running, max_waiting=max_waiting,
        max_context=max_context or "auto", dtype=dtype, device=device, seed=seed,
        memory_bytes="auto" if memory == "auto" else size_bytes(memory, "--memory"),
        graph_batch=graphs if device != "cpu" else 0,
        **(cache.engine_fields() | adapters.engine_fields()),
    )  # fmt: skip
    server = ServerConfig(
        model_name=name or folder.resolve().name,
        max_context_tokens=0,  # the engine says it
        api_key=read_key(api_key),
        max_body_bytes=size_bytes(max_body, "--max-body"),
        default_effort=check_effort(effort, "--effort"),
        is_thinking=thinking,
        default_sampling=default_sampling(folder),
        patch_size=vision_patch_size(folder),
    )
    tell = partial(_tell_ready, host, listener := bind(host, port), time.monotonic())
    with EngineProcess(folder, engine, LogOptions(log_level, log_json)) as process:
        from baltoro.cli.serving import serve_until_stopped  # seconds of imports, while the engine loads

        sys.exit(serve_until_stopped(process, server, listener, tell, drain_s=drain))


def _tell_ready(host: str, listener: socket.socket, start: float, config: ServerConfig) -> None:
    """Print that clients may come, and how."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    address = f"http://{name}:{listener.getsockname()[1]}"
    key = "" if config.api_key is None else " -H 'Authorization: Bearer KEY'"
    body = f'{{"model": "{config.model_name}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    print(
        f"{READY} {config.model_name} at {address} after {time.monotonic() - start:.1f} s "
        f"(context {config.max_context_tokens} tokens; API under /v1, pages under /docs). Try:\n"
        f"  curl -N {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        flush=True,
    )
