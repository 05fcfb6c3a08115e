"""The learning rate of a step: linear warm-up, then a cosine to the final rate.

In: step (from 0), number of steps, OptimConfig. Out: a factor of the peak learning rate.
Invariants: the first step moves (its factor is not 0); a run of any length reaches 1 after the warm-up.
"""

from __future__ import annotations

import math

from baltoro.trainer.config import OptimConfig


def lr_factor(step: int, num_steps: int, optim: OptimConfig) -> float:
    """Factor of the peak learning rate at `step` of `num_steps`."""
    warmup = max(1, round(optim.warmup * num_steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return optim.final_lr + (1.0 - optim.final_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
