"""Start a run from a model folder: its weights instead of drawn ones, packed experts as ordinary masters.

In: a model just built, a folder in the published layout (of the same shape). Out: the model's tensors, filled.
Invariants: every tensor of the model is filled or the folder is refused. Packed experts become the values that they
stand for, so a quantised stage that goes on rounds them to themselves.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from baltoro.errors import ConfigError
from baltoro.model.config import K3Config
from baltoro.model.decoder import K3Model
from baltoro.model.weights import load_model

FREE = ("are_experts_packed", "dtype")  # how weights are kept, not what model it is


@torch.no_grad()
def fill_from(model: K3Model, folder: str | Path) -> None:
    """Overwrite the weights of `model`. Errors: ConfigError names the keys in which the folder's model differs."""
    found = load_model(folder, dtype=torch.float32, device=model.device).unpack_experts()
    differing = _differing(model.config, found.config)
    if differing:
        raise ConfigError(f"init_from: {folder} is another model than the recipe's, in {', '.join(differing)}")
    stored = found.tensors()
    for name, tensor in model.tensors().items():
        tensor.copy_(stored[name])


def _differing(one: K3Config, other: K3Config) -> list[str]:
    names = [field.name for field in fields(one) if field.name not in FREE]
    return [name for name in names if getattr(one, name) != getattr(other, name)]
