"""Who sleeps and who wakes, in which order, where engine and trainer share a machine.

    rollout   the engine has its pool; the trainer holds base (shared), adapter, optimizer state, and no gradient
    training  the engine has given its pool back; requests that were under way wait
    then      the new version is published, and the engine wakes to it

In: a policy, whether it sleeps at all. Out: a context for the training phase.
Invariants: the engine is woken in a finally, whatever the step did; sleeping and waking twice is the same as once;
gradients are gone (`set_to_none`) before the engine is asked to grow again.
Source: spec/training.md A.9, B.2 (8, 13, 14).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baltoro.rl.policy import Policy
from baltoro.trainer.policy_step import PolicyTrainer


@dataclass(slots=True)
class SleepTimes:
    """Seconds that going to sleep and waking took, once. Single writer: `training`."""

    sleep_s: float = 0.0
    wake_s: float = 0.0


@contextmanager
def training(policy: Policy, trainer: PolicyTrainer, *, sleeps: bool) -> Iterator[SleepTimes]:
    """The body trains and publishes; the engine sleeps meanwhile if `sleeps`."""
    times = SleepTimes()
    began = time.monotonic()
    if sleeps:
        policy.sleep()
    times.sleep_s = time.monotonic() - began
    try:
        yield times
    finally:
        trainer.adam.zero_grad(set_to_none=True)
        began = time.monotonic()
        policy.wake()  # also where a round that was carried put it to sleep
        times.wake_s = time.monotonic() - began
