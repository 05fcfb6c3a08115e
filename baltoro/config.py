"""Settings: TOML file + dotted overrides -> a frozen dataclass; and the one table of environment variables.

In: a TOML file, `--set a.b=value` overrides, a dataclass type. Out: an instance of it, and `dump` of what was resolved.
Invariants: an unknown key fails, with the nearest known one in the message; a value of the wrong type fails; nothing is
guessed. Environment variables are for debugging, tests and secrets only, and are all named in ENVIRONMENT.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from baltoro.errors import ConfigError

T = TypeVar("T")

# name -> what it does; the reference page is made from this table
ENVIRONMENT = {
    "BALTORO_K3_DATA": "folder of the published config.json, index and tiktoken.model; tests on them skip without",
    "BALTORO_MODEL": "model folder that serve, chat and generate use when none is given",
    "BALTORO_REFERENCE": "operations, with commas, or `all`, that run their reference; see `baltoro explain`",
    "BALTORO_RL_TOKEN": "the secret of `baltoro rl` and a `baltoro rl-engine` on another host; @FILE: its first line",
    "BALTORO_THREADS": "torch threads of an engine; default: 1 for models narrower than 1024, else its cores",
    "TRITON_INTERPRET": "1: Triton runs kernels on a CPU, for tests; set before they are imported",
}


def environment(name: str) -> str | None:
    """Value of a variable of the table; anything else is a bug."""
    if name not in ENVIRONMENT:
        raise KeyError(f"{name} is not in baltoro.config.ENVIRONMENT")
    return os.environ.get(name)


@contextmanager
def set_environment(name: str, value: str) -> Iterator[None]:
    """Another value of a variable of the table within, for measurements that compare."""
    before = environment(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def load_config(kind: type[T], file: str | Path | None = None, overrides: Sequence[str] = ()) -> T:
    """Read `file` (TOML), apply `a.b=value` overrides (TOML values; a bare word is a string), build `kind`."""
    data: dict[str, Any] = {}
    if file is not None:
        path = Path(file)
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; recipes lie in recipes/")
        try:
            data = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply(data, override)
    return build(kind, data)


def build(kind: type[T], data: dict[str, Any], where: str = "") -> T:
    """A dataclass from nested dicts. Errors: ConfigError with the dotted path of the key at fault."""
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind} is not a dataclass")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            advice = f"; did you mean {where}{near[0]}?" if near else f"; known keys: {', '.join(sorted(fields))}"
            raise ConfigError(f"unknown key {where}{key}{advice}")
    values = {key: _convert(hints[key], value, f"{where}{key}") for key, value in data.items()}
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing key {where}{missing[0]}")
    return typing.cast(T, kind(**values))


def dump(config: Any) -> dict[str, Any]:
    """What was resolved, as plain nested dicts."""
    return dataclasses.asdict(config)


def _apply(data: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override!r} is not of the form a.b=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    data[last] = value


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [h for h in typing.get_args(hint) if h is not type(None)]
        return _first_that_fits(options, value, where)
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(f"{where} must be one of {', '.join(map(str, typing.get_args(hint)))}, not {value!r}")
        return value
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list")
        return tuple(_convert(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        inner = typing.get_args(hint)[1]
        return {key: _convert(inner, item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a section")
        return build(hint, value, f"{where}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    is_bool_for_int = hint is int and isinstance(value, bool)
    if hint is Any or (isinstance(hint, type) and isinstance(value, hint) and not is_bool_for_int):
        return value
    raise ConfigError(f"{where} must be {getattr(hint, '__name__', hint)}, not {value!r}")


def _first_that_fits(options: list[Any], value: Any, where: str) -> Any:
    errors = []
    for option in options:
        try:
            return _convert(option, value, where)
        except ConfigError as error:
            errors.append(str(error))
    raise ConfigError(errors[0])
