"""`baltoro rl-engine`: the engine of an RL run on this host, for a trainer on another one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import socket

    from baltoro.engine.engine import Engine
    from baltoro.engine.line import HostLine
    from baltoro.rl.recipe import RLConfig

# The first words of the line that says that a trainer may come.
READY = "baltoro: engine of"


def rl_engine(
    recipe: Annotated[Path, typer.Argument(help="The recipe of the run, as the trainer has it.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key: --set engine.options.device=cuda."),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="tcp://HOST:PORT",
            help="Where to listen; PORT + 1 is for publications. 0.0.0.0: every interface; port 0: any two free ones.",
        ),
    ] = "tcp://127.0.0.1:7400",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="One JSON object per log line.")] = False,
) -> None:
    """Run the engine of an RL recipe on this host, until Ctrl-C. The trainer runs on another host, with the same recipe
    and `engine.place` set to this one.

    Both hosts need the model folder that the recipe names, and one secret in BALTORO_RL_TOKEN. One trainer at a time;
    when it ends, however it ends, the engine waits for the next one. Requests and tokens are encrypted on their way;
    the adapters that are published are not: they can be read on the way, but not changed or forged (docs/rl.md).

    Examples:

        openssl rand -hex 32 > rl.token && export BALTORO_RL_TOKEN=@rl.token

        baltoro rl-engine recipes/rl-mini.toml --listen tcp://0.0.0.0:7400

        baltoro rl-engine recipes/rl-tiny.toml --listen tcp://10.0.0.2:7400 --set engine.options.device=cuda:1

        baltoro rl recipes/rl-mini.toml --set engine.place=tcp://10.0.0.2:7400
    """
    from baltoro.cli.engine_process import LogOptions
    from baltoro.config import load_config
    from baltoro.engine.line import HostLine
    from baltoro.engine.planner import check_device
    from baltoro.engine.worker import serve_trainers
    from baltoro.errors import ConfigError
    from baltoro.model.digest import weights_digest
    from baltoro.rl.engine_remote import read_token
    from baltoro.rl.parts import engine_config
    from baltoro.rl.recipe import RLConfig, host_and_port
    from baltoro.transfer.socket import open_door

    began = time.monotonic()
    LogOptions(log_level, log_json).apply()
    config = load_config(RLConfig, recipe, overrides or ())
    place, options = host_and_port(listen), engine_config(config)
    if place is None:
        raise ConfigError(f"--listen {listen!r}: write tcp://HOST:PORT")
    check_device(options.device)
    host, port = place
    token = read_token()
    door = open_door(host, port + 1 if port else 0)  # both before the model is loaded: a taken port is known at once
    number = door.getsockname()[0]  # of the host: pyzmq binds to no name
    line = HostLine(f"tcp://[{number}]:{port}" if ":" in number else f"tcp://{number}:{port}", token)
    facts = {"weights": {"path": str(config.model), "digest": weights_digest(config.model)}}

    def tell(described: Mapping[str, Any]) -> None:
        _tell_ready(line, door, recipe, config, described, time.monotonic() - began)

    serve_trainers(line, door, lambda: _build(config), facts, tell)


def _build(config: RLConfig) -> Engine:
    """As the engine of a run on one host is built. A model folder without a tokenizer has no stop strings."""
    from baltoro.chat.factories import Factories
    from baltoro.chat.tokenizer import VOCAB_FILE, Tokenizer
    from baltoro.cli.engine_process import capture_bar
    from baltoro.engine.engine import load_engine
    from baltoro.engine.threads import set_threads
    from baltoro.rl.parts import engine_config

    set_threads(config.model)
    made = Factories(Tokenizer.load(config.model)) if (config.model / VOCAB_FILE).is_file() else None
    return load_engine(
        config.model,
        engine_config(config),
        eos_ids=None if made is None else made.eos_ids,
        stop_rules=None if made is None else made.stop_rule,
        masks=None if made is None else made.mask,
        report=capture_bar(),
    )


def _tell_ready(
    line: HostLine, door: socket.socket, recipe: Path, config: RLConfig, described: Mapping[str, Any], seconds: float
) -> None:
    """Print that a trainer may come, and how."""
    from baltoro.rl.recipe import host_and_port

    host, port = host_and_port(line.address) or ("", 0)
    name = {"0.0.0.0": "THIS-HOST", "::": "THIS-HOST"}.get(host, f"[{host}]" if ":" in host else host)
    print(
        f"{READY} {config.name} ({config.model}, {described['model']['dtype']}) at {line.address} and port "
        f"{door.getsockname()[1]} after {seconds:.1f} s. On the trainer's host, with the same BALTORO_RL_TOKEN:\n"
        f"  baltoro rl {recipe} --set engine.place=tcp://{name}:{port}",
        flush=True,
    )
