"""The base that an engine owns and others map: written once, and the engine itself works on the written bytes.

In: a loaded model on the CPU, a path, a device. Out: the same model on the shared bytes, and the base they lie in: on
a CPU a `SharedBase`, mapped read-only; on a GPU a `DeviceBase`, one allocation that others map through CUDA IPC.
The dtype is settled before: what the writer computes with is what every reader computes with. Packed experts stay
packed, in the order of the files: an order that kernels of the engine like better is a copy of the engine's own.
Merged projections are written as they lie, so that every reader joins them as views.
Invariants: the model that comes back holds nothing of the base but the map; the files go with `SharedBase.remove`, and
who has them mapped keeps them; a trainer that dies takes nothing along.
Limits: while it is written the base exists twice, on a CPU; a GPU holds it once at any time.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from baltoro.errors import ConfigError
from baltoro.model.decoder import K3Model
from baltoro.model.mapped import in_memory_order, model_on
from baltoro.transfer.device_base import DeviceBase, Sharing, write_device_base
from baltoro.transfer.shared_base import SharedBase, write_base
from baltoro.transfer.tensors import to_raws, views_of

Base = SharedBase | DeviceBase


def share_model(
    model: K3Model, path: str | Path, device: str = "cpu", sharing: Sharing | None = None
) -> tuple[K3Model, Base]:
    """Write the base of `model` to `path` (on a GPU: to the device, and the way to it to `path`), and put a model on
    it; `model` itself can then go. `sharing`: of a device; CUDA IPC.

    Errors: ConfigError for a model that is not on the CPU, a path that is taken, or too little room.
    """
    if model.device.type != "cpu":
        raise ConfigError(f"a base is shared from the CPU, and this model is on {model.device}: load it there first")
    tensors = to_raws(in_memory_order(model.merge()))
    base: Base
    if device == "cpu" and sharing is None:
        base = write_base(path, tensors)
        views = views_of(base.manifest, base.content)
    else:
        base = write_device_base(path, tensors, device, sharing)
        views = base.views()
    mapped = model_on(model.config, views, model.dtype, device)
    return mapped.merge(may_copy=False), base


def trim_heap() -> None:
    """Give freed heap pages back to the machine: glibc keeps them, and a model that was just replaced left many."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def base_facts(base: Base) -> dict[str, object]:
    """What a reader has to be told."""
    return {"path": str(base.path), "digest": base.digest, "num_bytes": base.manifest.num_bytes}
