"""Options of `baltoro serve` about adapters.

In: what a user typed. Out: fields of an EngineConfig.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from baltoro.cli.memory import takes_options

PANEL = "Adapters (LoRA)"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """One field an option; the name of the option is the field's, with dashes."""

    lora_modules: Annotated[
        list[str] | None,
        typer.Option(help="An adapter to load, NAME=PATH; may be given again.", rich_help_panel=PANEL),
    ] = None
    max_loras: Annotated[
        int,
        typer.Option(
            help="Adapters in one step. 0: as many as --lora-modules; without any, none can be loaded later either.",
            rich_help_panel=PANEL,
        ),
    ] = 0
    max_lora_rank: Annotated[int, typer.Option(help="Largest rank of an adapter.", rich_help_panel=PANEL)] = 32
    max_loaded_loras: Annotated[
        int, typer.Option(help="Adapters kept in host memory. 0: no limit.", rich_help_panel=PANEL)
    ] = 0
    lora_experts: Annotated[
        bool,
        typer.Option(
            "--lora-experts/--no-lora-experts", help="Room for adapters of routed experts.", rich_help_panel=PANEL
        ),
    ] = True

    def engine_fields(self) -> dict[str, Any]:
        """Keywords for EngineConfig, which checks them."""
        modules = tuple(self.lora_modules or ())
        return {
            "max_loras": self.max_loras or len(modules),
            "max_lora_rank": self.max_lora_rank,
            "max_loaded_loras": self.max_loaded_loras,
            "lora_experts": self.lora_experts,
            "lora_modules": modules,
        }


def takes_adapter_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options above; it is handed them as one AdapterOptions, its keyword `adapters`."""
    return takes_options(verb, AdapterOptions, "adapters")
