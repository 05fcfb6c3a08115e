"""Copies between host and device that are queued, not waited for.

From ordinary memory a copy to a GPU waits until everything before it is done: the host would then stand still until the
step in flight has ended. From pinned memory it is queued like a kernel; torch keeps the memory until it is done.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """The same in memory that `device` copies from by itself; nothing to do for a CPU."""
    return values.pin_memory() if device.type == "cuda" else values


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """On the device, queued on its stream."""
    return pinned(values, device).to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """On the host. From a GPU into pinned memory, queued on the stream: read it behind an event only."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
