"""How many threads torch uses for a model on a CPU, decided once, before the model is loaded.

In: a model folder, or the model's width. Out: a number; `set_threads` sets it for this process.
A step of a narrow model is hundreds of operations of some 10 to 100 us. A second thread can gain little on such an
operation, and loses a time slice of the scheduler (8 to 16 ms) whenever somebody else has the other core at that
moment: the HTTP process, a client, a browser. Only where single operations take about a millisecond is that a fair bet.
Limit: the width stands for the size of the operations; the batch, which matters too, is not known yet.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from baltoro.config import environment
from baltoro.errors import ConfigError
from baltoro.model.config import K3Config

MIN_WIDTH = 1024
"""Narrower models get one thread. Measured 2026-11-30 on 2 cores with other work on them, [1, D] x [D, 4D] in FP32:
at 768 one thread takes 0.45 ms a product and two take 8 to 16 ms; at 1024 one takes 0.8 ms, two 0.4 ms when both cores
happen to be free and 12 ms when not."""


def num_threads(hidden_size: int) -> int:
    """What BALTORO_THREADS says, else one for a narrow model and all cores this process may use for a wide one.

    Errors: ConfigError if BALTORO_THREADS is not a positive number.
    """
    wanted = environment("BALTORO_THREADS")
    if not wanted:
        return 1 if hidden_size < MIN_WIDTH else len(os.sched_getaffinity(0))
    if not wanted.isdigit() or int(wanted) < 1:
        raise ConfigError(f"BALTORO_THREADS {wanted!r} must be a positive number")
    return int(wanted)


def set_threads(folder: str | Path) -> int:
    """Tell torch, for the whole process, what the model of `folder` wants; the number. Errors: ConfigError."""
    count = num_threads(K3Config.load(folder).hidden_size)
    torch.set_num_threads(count)
    return count
