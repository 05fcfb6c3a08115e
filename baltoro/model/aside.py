"""A branch of a layer beside the main one: in a captured step on a stream of its own, elsewhere where it is called.

A replayed graph then runs both at once; in eager steps an event a branch would cost the host more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def start(work: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Start `work`; what is returned gives its result, to be called before anything that `work` reads is let go.

    `work` may read what was made before this call, and must write nothing that others read before the result is taken.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        made = work()
        return lambda: made
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        out = work()

    def join() -> Tensor:
        main.wait_stream(side)
        return out

    return join


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: branches of one step that run beside the same main one come one after the other."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
