"""Which adapters clients may ask for, as the engine said, and which one a request asks for.

In: facts by name from the engine, names from bodies. Out: the adapter's name, or NotFound.
Selection: `model` as BASE:ADAPTER (or the adapter's bare name, as vLLM has it), or a field of its own.
Writer: the routes that load and unload (server/adapter_routes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from baltoro.protocol.openai_reply import ModelCard
from baltoro.server.errors import NotFound


class LoadedAdapters:
    """What the engine said is loaded: facts by name. Writer: the routes below."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts: dict[str, Any] = dict(facts)

    def select(self, asked: str | None, base: str) -> str | None:
        """The adapter that `model` names; None is the base. Errors: NotFound."""
        if asked is None or asked == base:
            return None
        name = asked.removeprefix(f"{base}:")
        if name not in self.facts:
            others = "".join(f", {base}:{known}" for known in sorted(self.facts))
            raise NotFound(
                f"the model {asked} is not here; this server has {base}{others}", param="model", code="model_not_found"
            )
        return name

    def check(self, name: str | None, param: str) -> str | None:
        """An adapter named by itself. Errors: NotFound."""
        if name is not None and name not in self.facts:
            known = ", ".join(sorted(self.facts)) or "none"
            raise NotFound(f"the adapter {name} is not loaded; loaded: {known}", param=param, code="adapter_not_found")
        return name

    def cards(self, base: ModelCard) -> list[ModelCard]:
        """Entries of /v1/models beside the base's."""
        return [
            structs.replace(base, id=f"{base.id}:{name}", root=fact["path"] or name, parent=base.id)
            for name, fact in sorted(self.facts.items())
        ]
