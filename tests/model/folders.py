"""Model folders for tests: saved, changed behind our back, compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baltoro.model.build import new_model
from baltoro.model.config import K3Config
from baltoro.model.weight_files import SINGLE_NAME
from baltoro.model.weights import save_model
from tests.tiny import tiny_k3

NORM = "language_model.model.norm.weight"
Edit = Callable[[dict[str, Tensor]], Any]


def saved(folder: Path, config: K3Config | None = None, **options: Any) -> Path:
    """A folder with a random model."""
    save_model(new_model(config or tiny_k3(), std=0.1, decay="slow"), folder, **options)
    return folder


def edited(folder: Path, edit: Edit, config: K3Config | None = None) -> Path:
    """The same, its tensors changed behind our back."""
    saved(folder, config)
    tensors = load_file(folder / SINGLE_NAME)
    edit(tensors)
    save_file(tensors, folder / SINGLE_NAME)
    return folder


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
