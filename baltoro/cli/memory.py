"""Options about memory that several verbs take: the prefix cache, its tiers, how memory is shared.

In: what a user typed. Out: fields of an EngineConfig, or the same options for another `baltoro serve`.
Invariants: one list for all verbs; the defaults are those of EngineConfig (a test compares them).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from baltoro.cli.options import size_bytes
from baltoro.errors import ConfigError

CACHE, TIERS, SHARES = "Prefix cache", "Where prefixes go that the device gives up", "Sharing memory"
KEYWORD = "cache"
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """One field an option; the name of the option is the field's, with dashes."""

    prefix_cache: Annotated[
        bool,
        typer.Option(
            help="Keep what prompts and answers left in memory, and start from it when another prompt begins alike. "
            "Answers do not change; usage.prompt_tokens_details.cached_tokens tells what was found.",
            rich_help_panel=CACHE,
        ),
    ] = True
    hash_endpoint: Annotated[
        str,
        typer.Option(
            help="Tokens between places at which a prefix can be found. Finer finds more and keeps more states. "
            "auto: 512, for small models the chunk of KDA.",
            rich_help_panel=CACHE,
        ),
    ] = AUTO
    track_interval: Annotated[
        str,
        typer.Option(
            help="Tokens between states kept while an answer is written: a multiple of hash endpoint and KDA chunk. "
            "auto: 256 or that multiple.",
            rich_help_panel=CACHE,
        ),
    ] = AUTO
    retention: Annotated[
        str,
        typer.Option(
            help="Which states live on. turns: ends of prompts and answers, and forks; for chats and agents. interval: "
            "each track interval; most hits, most memory. prompt_end: only ends. second_hit: only where a second "
            "prompt came by; least memory.",
            rich_help_panel=CACHE,
        ),
    ] = "turns"
    host_cache: Annotated[
        str,
        typer.Option(
            help="CPU memory for prefixes that the device has to give up, such as 512MiB. 0: they are forgotten.",
            rich_help_panel=TIERS,
        ),
    ] = "0"
    disk_cache_dir: Annotated[
        str,
        typer.Option(
            help="Folder for what the host cache has to give up; needs --host-cache. It survives a restart with the "
            "same model. One server a folder.",
            rich_help_panel=TIERS,
        ),
    ] = ""
    disk_cache: Annotated[
        str, typer.Option(help="Bytes that --disk-cache-dir may hold at most.", rich_help_panel=TIERS)
    ] = "10GiB"
    retract_to: Annotated[
        str,
        typer.Option(
            help="What a request leaves that loses its memory to another one. recompute: nothing. host: a copy in the "
            "host cache, if it has room.",
            rich_help_panel=TIERS,
        ),
    ] = "recompute"
    pool: Annotated[
        str,
        typer.Option(
            help="unified: KV pages and states share one arena as they need it. fixed: split once, for comparison.",
            rich_help_panel=SHARES,
        ),
    ] = "unified"
    overlap: Annotated[
        str,
        typer.Option(
            help="Plan the next step while one is computed: on or off. auto: on with a GPU.", rich_help_panel=SHARES
        ),
    ] = AUTO
    expert_weights: Annotated[
        str,
        typer.Option(
            help="Routed experts of an MXFP4 model: packed, as the file has them, or dense, the values they stand for "
            "(faster on a CPU, up to 7.5 times their memory). auto: dense on a CPU up to 1 GiB.",
            rich_help_panel=SHARES,
        ),
    ] = AUTO
    expert_inputs: Annotated[
        str,
        typer.Option(
            help="What the routed experts read: plain, or rounded to mxfp8 (W4A8, as K3 was trained for).",
            rich_help_panel=SHARES,
        ),
    ] = "plain"
    long_prompt_tokens: Annotated[
        int,
        typer.Option(
            help="Prompts of more tokens are long: together they get --long-share while shorter ones wait. 0: off.",
            rich_help_panel=SHARES,
        ),
    ] = 0
    long_share: Annotated[
        float,
        typer.Option(help="Share of memory and of a step for long prompts, above 0 up to 1.", rich_help_panel=SHARES),
    ] = 0.5

    def engine_fields(self) -> dict[str, Any]:
        """Keywords for EngineConfig. Errors: ConfigError names the option; EngineConfig checks what is left."""
        return {
            "prefix_cache": self.prefix_cache,
            "hash_endpoint": _count(self.hash_endpoint, "--hash-endpoint"),
            "track_interval": _count(self.track_interval, "--track-interval"),
            "retention": self.retention,
            "pool": self.pool,
            "overlap": _switch(self.overlap, "--overlap"),
            "host_cache_bytes": size_bytes(self.host_cache, "--host-cache"),
            "disk_cache_dir": self.disk_cache_dir,
            "disk_cache_bytes": size_bytes(self.disk_cache, "--disk-cache"),
            "retract_to": self.retract_to,
            "expert_weights": self.expert_weights,
            "expert_inputs": self.expert_inputs,
            "long_prompt_tokens": self.long_prompt_tokens,
            "long_share": self.long_share,
        }

    def arguments(self) -> list[str]:
        """The options that differ from their defaults, as a command line has them."""
        words = []
        for field in fields(self):
            value, name = getattr(self, field.name), field.name.replace("_", "-")
            if value != field.default:
                words += (
                    [f"--{name}", str(value)] if not isinstance(value, bool) else [f"--{'' if value else 'no-'}{name}"]
                )
        return words


def takes_cache_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options above; it is handed them as one CacheOptions, its keyword `cache`."""
    return takes_options(verb, CacheOptions, KEYWORD)


def takes_options(verb: Callable[..., None], kind: type[Any], keyword: str) -> Callable[..., None]:
    """Give a verb an option for each field of the dataclass `kind`; it is handed them as one, its keyword `keyword`."""
    hints = get_type_hints(kind, include_extras=True)
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(kind)
    ]
    signature = inspect.signature(verb, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != keyword]
    names = {option.name for option in options}

    @wraps(verb)
    def with_options(*args: Any, **given: Any) -> None:
        chosen = {name: given.pop(name) for name in names & given.keys()}
        verb(*args, **given, **{keyword: kind(**chosen)})

    shown = signature.replace(parameters=[*own, *options])
    with_options.__signature__ = shown  # type: ignore[attr-defined]  # what typer reads
    with_options.__annotations__ = {name: parameter.annotation for name, parameter in shown.parameters.items()}
    return with_options


def _count(text: str, option: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{option} {text!r}: give a number of tokens, such as 64, or auto")
    return int(text)


def _switch(text: str, option: str) -> bool | str:
    if text not in ("on", "off", AUTO):
        raise ConfigError(f"{option} {text!r}: give on, off or auto")
    return AUTO if text == AUTO else text == "on"
