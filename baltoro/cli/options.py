"""Values of command-line options: sizes, keys, addresses, and what a model folder says about serving it.

In: texts and paths of a user. Out: checked values. Errors: ConfigError names the option.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

from baltoro.cli.units import parse_bytes
from baltoro.errors import ConfigError
from baltoro.model.config import K3Config

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def size_bytes(text: str, option: str) -> int:
    """Bytes of a size such as 4GiB, 500M or 1048576."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def read_key(given: str | None) -> str | None:
    """An API key, or the first line of the file that @FILE names."""
    if given is None or not given.startswith("@"):
        key = given
    else:
        path = Path(given[1:])
        if not path.is_file():
            raise ConfigError(f"--api-key: {path} does not exist")
        key = path.read_text().partition("\n")[0].strip()
    if key == "":
        raise ConfigError("--api-key must not be empty; leave it out to ask for none")
    return key


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens soon. Bound before the model is loaded, so that a taken port is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another --port or --host") from error
    return listener


def default_sampling(model_dir: Path) -> dict[str, float]:
    """Sampling defaults of a model: what its generation_config.json says, if it has one."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        said = json.loads(path.read_text())
        return {name: said[name] for name in _SAMPLING if isinstance(said.get(name), int | float)}
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is no JSON object: {error}") from error


def vision_patch_size(model_dir: Path) -> int | None:
    """Side of a patch of the model's vision tower; None if it has none."""
    vision = K3Config.load(model_dir).vision
    return None if vision is None else vision.patch_size
