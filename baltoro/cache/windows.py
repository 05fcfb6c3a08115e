"""Records of draft windows: the inputs of every KDA layer that a verify step leaves, until the fold has read them.

A record is small beside a state (at K3's widths 2 KiB a token and head, a state 64 KiB), so a window costs a fraction
of a snapshot of each of its tokens. Records belong to the step, not to a request: the next verify step overwrites them.
In: shapes. Out: a `Window` of the first so many requests, for the layers to fill and the fold to read.
Invariants: one block of memory, at one address for as long as the engine lives, so captured steps may name it; the
records of N requests lie end to end, layer behind layer, whatever N is, as the one-launch fold wants them.
Source: spec/kernels.md B.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.kda.fused_reference import Window


class WindowRecords:
    """Room for windows of `width` tokens of up to `max_requests` requests, all `layers` KDA layers."""

    def __init__(
        self, layers: int, max_requests: int, width: int, *, heads: int, dim: int, dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:  # fmt: skip
        """`dim`: of a head's keys, which is also that of its values."""
        self.max_requests, self.width = max_requests, width
        self._whole = Window.empty(
            max_requests, width, heads=heads, keys=dim, values=dim, dtype=dtype, device=device, layers=layers
        )

    def of(self, num_requests: int) -> Window:
        """[L, num_requests, W, ..]: views; those of another number of requests share their memory."""

        def first(every: Tensor) -> Tensor:
            layers, _, *rest = every.shape
            size = every.numel() // self.max_requests * num_requests
            return every.flatten()[:size].view(layers, num_requests, *rest)

        whole = self._whole
        return Window(first(whole.x), first(whole.k), first(whole.v), first(whole.decay), first(whole.beta))

    @property
    def num_bytes(self) -> int:
        whole = self._whole
        return sum(each.nbytes for each in (whole.x, whole.k, whole.v, whole.decay, whole.beta))
