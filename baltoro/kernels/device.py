"""What this machine can do, asked once.

In: a torch device. Out: a frozen Machine that the dispatch table is matched against. Nothing here allocates on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

# capabilities that kernels in Gluon are made for
HOPPER = ((9, 0),)


@dataclass(frozen=True, slots=True)
class Machine:
    """One device as the kernels see it.

    kind          "cpu" or "cuda"
    name          for people
    capability    (major, minor) of a CUDA device, None on a CPU
    num_units     streaming multiprocessors, or the threads torch may use on a CPU
    memory_bytes  of the device; 0 where torch cannot tell (CPU)
    has_triton    whether the triton package is installed
    has_fla       whether flash-linear-attention is installed
    """

    kind: str
    name: str
    capability: tuple[int, int] | None
    num_units: int
    memory_bytes: int
    has_triton: bool
    has_fla: bool


@cache
def machine(kind: str, index: int = 0) -> Machine:
    """Describe device `kind:index`. A CUDA device that is absent is described as one that can do nothing special."""
    has_triton = find_spec("triton") is not None
    has_fla = has_triton and find_spec("fla") is not None
    if kind != "cuda":
        return Machine(
            kind, torch.backends.cpu.get_cpu_capability(), None, torch.get_num_threads(), 0, has_triton, has_fla
        )
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return Machine(kind, "no such device here", None, 0, 0, has_triton, has_fla)
    facts = torch.cuda.get_device_properties(index)
    return Machine(
        kind,
        facts.name,
        (facts.major, facts.minor),
        facts.multi_processor_count,
        facts.total_memory,
        has_triton,
        has_fla,
    )


def has_dependent_launch(tensor: torch.Tensor) -> bool:
    """Whether a kernel on its device may start before the one it waits for has ended: compute capability 9 and up."""
    capability = machine(tensor.device.type, tensor.device.index or 0).capability
    return capability is not None and capability >= (9, 0)
