"""Options about memory: the same ones for each verb, with the engine's defaults, refused in words."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from baltoro.cli import app
from baltoro.cli.memory import CacheOptions, takes_cache_options
from baltoro.cli.serve import serve
from baltoro.engine.config import EngineConfig
from baltoro.errors import ConfigError, UserError
from tests.tiny import tiny_k3

VERBS = ("serve", "chat", "generate")


def options_of(verb: str) -> dict[str, Any]:
    group: Any = get_command(app)
    return {name: option for option in group.get_command(None, verb).params for name in option.opts}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_every_option_and_says_what_it_does(verb: str) -> None:
    found = options_of(verb)
    for field in fields(CacheOptions):
        option = found[f"--{field.name.replace('_', '-')}"]
        assert option.default == field.default and len(option.help.split()) > 6
    help_page = CliRunner().invoke(app, [verb, "--help"]).output
    assert "Prefix cache" in help_page and "--no-prefix-cache" in help_page


def test_defaults_are_those_of_the_engine() -> None:
    given = CacheOptions().engine_fields()
    assert EngineConfig(**given) == EngineConfig()
    assert CacheOptions().arguments() == []


def test_values_reach_the_engine_in_its_units() -> None:
    options = CacheOptions(
        prefix_cache=True,
        hash_endpoint="128",
        track_interval="256",
        retention="second_hit",
        host_cache="1.5MiB",
        disk_cache_dir="prefixes",
        disk_cache="2GB",
        retract_to="host",
        pool="fixed",
        overlap="on",
        long_prompt_tokens=1000,
        long_share=0.25,
    )
    config = EngineConfig(**options.engine_fields())
    assert (config.hash_endpoint, config.track_interval, config.overlap) == (128, 256, True)
    assert (config.host_cache_bytes, config.disk_cache_bytes) == (1_572_864, 2_000_000_000)
    assert (config.retract_to, config.pool, config.long_share) == ("host", "fixed", 0.25)


def test_options_for_another_server_are_those_that_were_given() -> None:
    given = CacheOptions(prefix_cache=False, overlap="off", long_prompt_tokens=9)
    assert given.arguments() == ["--no-prefix-cache", "--overlap", "off", "--long-prompt-tokens", "9"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hash_endpoint": "many"}, "--hash-endpoint.*number of tokens"),
        ({"track_interval": "0"}, "--track-interval.*number of tokens"),
        ({"overlap": "yes"}, "--overlap.*on, off or auto"),
        ({"host_cache": "lots"}, "--host-cache.*80G"),
        ({"disk_cache": "-1"}, "--disk-cache"),
        ({"retention": "everything"}, "turns, interval, prompt_end, second_hit"),
        ({"pool": "big"}, "unified or fixed"),
        ({"retract_to": "disk"}, "host or recompute"),
        ({"retract_to": "host"}, "give host_cache_bytes"),
        ({"disk_cache_dir": "x"}, "give host_cache_bytes"),
        ({"host_cache": "1GiB", "prefix_cache": False}, "switch it on"),
        ({"long_share": 0.0}, "long_share"),
        ({"long_prompt_tokens": -1}, "long_prompt_tokens"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_k3().to_json()))
    with pytest.raises(UserError, match=words):
        serve(tmp_path, **options)


def test_a_server_elsewhere_has_its_own_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--no-prefix-cache.*baltoro serve"):
        CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:9", "--no-prefix-cache"], catch_exceptions=False)


def test_a_verb_is_handed_one_object() -> None:
    seen: list[tuple[int, CacheOptions]] = []

    @takes_cache_options
    def verb(count: int = 1, *, cache: CacheOptions) -> None:
        seen.append((count, cache))

    verb(3, pool="fixed")
    assert seen == [(3, CacheOptions(pool="fixed"))]
