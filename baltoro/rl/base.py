"""The trainer's view of the base: the engine's bytes, mapped read-only and compared with the digest it named.

In: the model folder's config, path and digest from the engine's Hello. Out: a frozen K3Model on these bytes.
Invariants: a base that is not the one the engine serves is refused; nobody can write to it (the process that tries
ends); the map stays whole when the engine takes the files' names away.
"""

from __future__ import annotations

from pathlib import Path

import torch

from baltoro.model.config import K3Config
from baltoro.model.decoder import K3Model
from baltoro.model.mapped import model_on
from baltoro.model.moe import TILES
from baltoro.transfer.shared_base import SharedBase, open_base
from baltoro.transfer.tensors import views_of


def open_model(
    config: K3Config, path: str | Path, digest: str, *, dtype: torch.dtype = torch.float32
) -> tuple[K3Model, SharedBase]:
    """The engine's model for a trainer: it takes an AdapterBank and gradients of that, and is itself never written.

    `dtype`: of the activations, the engine's. Projections are joined as the engine joined them, so that both take the
    same products. Errors: ConfigError where there is no base, DigestMismatch where it is another or has changed,
    ShapeError where it is of another model.
    """
    base = open_base(path, digest)
    tensors = views_of(base.manifest, base.content)
    is_packed = any(name.endswith(("experts.w1_packed", f"experts.{TILES[0]}")) for name in tensors)
    model = model_on(config.with_(are_experts_packed=is_packed), tensors, dtype)
    return model.merge(may_copy=False), base
