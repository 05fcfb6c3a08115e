"""A trained model -> a model folder in the published layout, experts packed as MXFP4, the rest in the config's dtype.

In: the float weights of a run. Out: config.json and safetensors under the published names, and the tokenizer's files.
Invariants: experts are packed from the float weights by the quantiser that training faked, so what is served is what
the quantised stage's loss was measured on, up to the rounding of the other weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from baltoro.errors import ConfigError
from baltoro.kernels.quant import mxfp4
from baltoro.model.config import K3Config
from baltoro.model.decoder import K3Model
from baltoro.model.weights import save_params

EXPERT_MATRICES = (".experts.w1", ".experts.w2", ".experts.w3")
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")


def packed_params(model: K3Model) -> tuple[dict[str, Tensor], K3Config]:
    """Parameters by state_dict key with experts packed, and the config that fits them."""
    params: dict[str, Tensor] = {}
    for name, tensor in model.tensors().items():
        if name.endswith(EXPERT_MATRICES):
            params[f"{name}_packed"], params[f"{name}_scale"] = mxfp4.quantise(tensor)
        else:
            params[name] = tensor
    return params, model.config.with_(are_experts_packed=model.config.num_experts > 0)


def export(model: K3Model, folder: Path, *, tokenizer: Path, dtype: str = "bfloat16") -> None:
    """Write the model folder. Errors: ConfigError if the tokenizer's files are not in `tokenizer`."""
    for name in TOKENIZER_FILES:
        if not (tokenizer / name).is_file():
            raise ConfigError(f"{tokenizer / name} does not exist; a model folder needs its tokenizer")
    params, config = packed_params(model)
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        save_params(params, config.with_(dtype=dtype), folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
