"""The step loop: plan -> run -> commit.

Plain: one plan at a time. Overlap will plan the next step while this one is on the device; what that needs is written
in `batch.py` and `scheduler.py` (a plan names tokens by position; memory of what is in flight is given back at commit).
"""

from __future__ import annotations

from baltoro.engine.runner import Runner
from baltoro.engine.scheduler import Scheduler
from baltoro.protocol.completion import TokenDelta


def step(scheduler: Scheduler, runner: Runner) -> list[TokenDelta]:
    """One step; returns all there is to tell, which may be only what was aborted since the last."""
    plan = scheduler.plan()
    if plan is not None:
        scheduler.commit(plan, runner.run(plan))
    return scheduler.take_deltas()
