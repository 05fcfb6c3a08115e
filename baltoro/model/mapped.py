"""A K3Model on tensors that exist already: nothing is copied, so two processes that map the same bytes hold one base.

In: a config and tensors by the keys of `K3Model.stored()`; names say which order experts lie in. Out: a K3Model whose
parameters and buffers ARE these tensors, none of which asks for a gradient. The tensors may be read-only: nothing here
writes to them.
Invariants: names, shapes, dtypes and devices are compared before anything is put together; the model is built without
memory of its own (on the meta device), so what it holds beside the given tensors is nothing.
`in_memory_order` lists tensors as they lie: a merged model whose base is written in this order can be merged again on
the written bytes, as views (`K3Model.merge`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.model.config import K3Config
from baltoro.model.decoder import K3Model
from baltoro.model.moe import TILES, Experts
from baltoro.model.weight_files import listed


def model_on(
    config: K3Config, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: str | torch.device = "cpu"
) -> K3Model:
    """The model of a config on `tensors`, all of them on `device`. `dtype`: of the activations.

    Errors: ShapeError names what is missing, unexpected, or of another shape, dtype or device.
    """
    model = K3Model(config, dtype, "meta")
    for path, module in model.named_modules():
        if isinstance(module, Experts) and f"{path}.{TILES[0]}" in tensors:
            module.expect_tiles()
    _check(model.stored(), tensors, torch.device(device))
    parameters = list(model.named_parameters(remove_duplicate=False))
    owners = {id(parameter): name for name, parameter in parameters if name in tensors}
    shared = {name: owners[id(parameter)] for name, parameter in parameters}  # MTP layers: embedding and head
    state = {name: tensors[shared.get(name, name)] for name in model.state_dict()}
    model.load_state_dict(state, strict=True, assign=True)
    return model.requires_grad_(False)


def in_memory_order(model: K3Model) -> dict[str, Tensor]:
    """`model.stored()`, ascending by address: views of one merged matrix come one after the other."""
    return dict(sorted(model.stored().items(), key=lambda pair: pair[1].data_ptr()))


def _check(places: Mapping[str, Tensor], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    missing, unknown = [n for n in places if n not in tensors], [n for n in tensors if n not in places]
    if missing or unknown:
        raise ShapeError(
            f"these are not the tensors of the config: {len(missing)} missing ({listed(missing)}), "
            f"{len(unknown)} unexpected ({listed(unknown)})"
        )
    wrong = []
    for name, place in places.items():
        found = tensors[name]
        if (found.shape, found.dtype, found.device.type) != (place.shape, place.dtype, device.type):
            wrong.append(f"{name} {found.dtype} {list(found.shape)} on {found.device}, not {place.dtype} {place.shape}")
    if wrong:
        raise ShapeError(f"tensors of another kind than the config says: {listed(wrong)}")
