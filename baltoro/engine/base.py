"""The base that an engine owns and others map: written once, and the engine itself works on the written bytes.

In: a loaded model and a path. Out: the same model on the mapped, read-only bytes, and the `SharedBase` they lie in.
The dtype is settled before: what the writer computes with is what every reader computes with. Packed experts stay
packed. Merged projections are written as they lie, so that every reader joins them as views.
Invariants: the model that comes back holds nothing of the base but the map; the files go with `SharedBase.remove`, and
who has them mapped keeps them; a trainer that dies takes nothing along.
Limits: a CPU, so far: on a GPU every process has a copy of its own. While it is written the base exists twice.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from baltoro.errors import ConfigError
from baltoro.model.decoder import K3Model
from baltoro.model.mapped import in_memory_order, model_on
from baltoro.transfer.shared_base import SharedBase, write_base
from baltoro.transfer.tensors import to_raws, views_of


def share_model(model: K3Model, path: str | Path) -> tuple[K3Model, SharedBase]:
    """Write the base of `model` to `path`, and put a model on it; `model` itself can then go.

    Errors: ConfigError for a model on a GPU, a path that is taken, or too little room.
    """
    if model.device.type != "cpu":
        raise ConfigError(f"a base on {model.device} cannot be shared with another process yet: leave base_path empty")
    base = write_base(path, to_raws(in_memory_order(model.merge())))
    mapped = model_on(model.config, views_of(base.manifest, base.content), model.dtype)
    return mapped.merge(may_copy=False), base


def trim_heap() -> None:
    """Give freed heap pages back to the machine: glibc keeps them, and a model that was just replaced left many."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def base_facts(base: SharedBase) -> dict[str, object]:
    """What a reader has to be told."""
    return {"path": str(base.path), "digest": base.digest, "num_bytes": base.manifest.num_bytes}
