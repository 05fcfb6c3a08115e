"""Do engine and trainer speak of one policy? Canary, start-up test, and the limit on the step's drift.

In: a policy (the engine), the trainer with its adapter, a pinned trajectory. Out: CanaryRecords; errors where the two
do not agree. The step's own drift (k3 in float64 through expm1, mean and max |dlogp|) comes from `trainer.ratio` with
the forward that the step takes anyway.
Canary: the ids of one early trajectory, scored by the engine with the version that serves, by the trainer with its
adapter, and without. It proves something only where the adapter's effect is well above their disagreement: below
`canary_floor` times, the record says "not yet testable". The trainer's effect is taken with the experts of the base:
at first an adapter moves logprobs less than rounding does, but a router that it tips over moves them by much more, and
an engine that was not tipped would look deaf. In bf16 rounding alone moves a short trajectory by up to 0.03, most of it
in a few uncertain tokens, so an honest engine may look deaf once; a deaf one does so at every look.
Start-up test: a synthetic B. The trainer's score must move; while the publication is withheld the engine's must not;
once it is published the engine's must move with it; afterwards all is as before. No training is needed for it.
Source: spec/training.md A.3, A.8, F.2 (4), G.6; the test after NovaSky-AI/SkyRL#2182.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from baltoro.errors import InvariantError
from baltoro.model.adapter import Adapter, SiteFactors
from baltoro.rl.policy import Policy
from baltoro.rl.sync import Sync
from baltoro.trainer.policy_step import PolicyTrainer
from baltoro.trainer.ratio import Drift

LEAST_EFFECT = 1e-3  # mean |dlogp| that a synthetic B must have to be told from rounding, in any dtype of ours
TIMES = 3.0  # and so many times the disagreement
LOOKS = 3  # in a row that must find an engine deaf where rounding can be as large as an adapter's first effect


@dataclass(frozen=True, slots=True)
class CanaryRecord:
    """Scores of the pinned ids: mean logprobs of engine, trainer and base, and how far apart they are.

    gap, max_gap  |engine - trainer|, mean and largest; effect: mean |engine - base|; own_effect: of the adapter in the
                  trainer, through the base's experts
    """

    engine: float
    trainer: float
    base: float
    gap: float
    max_gap: float
    effect: float
    own_effect: float

    @property
    def ratio(self) -> float:
        """The adapter's effect in the trainer over the disagreement."""
        return self.own_effect / max(self.gap, 1e-12)


class Canary:
    """One pinned trajectory. Single writer: the loop."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int], *, floor: float, most: int) -> None:
        if not prompt or not output:
            raise InvariantError("a canary needs a prompt and an output: nothing would be compared")
        self.prompt, self.output = tuple(prompt), tuple(output[:most])
        self._floor = floor
        self._suspicions = 0

    def look(self, policy: Policy, trainer: PolicyTrainer) -> CanaryRecord:
        """Score. Errors: InvariantError where the trainer's adapter has an effect and the engine's does not: in 16 bits
        where that is so LOOKS times in a row."""
        engine = policy.score(self.prompt, self.output)
        with_adapter = trainer.score(self.prompt, self.output)
        base, steady = trainer.effect(self.prompt, self.output)
        found = compare(engine, with_adapter, base, steady)
        is_suspect = found.own_effect > LEAST_EFFECT and found.own_effect > self._floor * found.effect
        self._suspicions = self._suspicions + 1 if is_suspect else 0
        looks = LOOKS if trainer.model.dtype.itemsize < 4 else 1
        if self._suspicions >= looks:
            raise InvariantError(
                f"the adapter moves the canary by {found.own_effect:.2g} in the trainer and by {found.effect:.2g} in "
                f"the engine ({looks} looks in a row): the engine does not use the adapter that was published"
            )
        return found

    def word(self, record: CanaryRecord) -> str:
        """For the table."""
        return f"x{record.ratio:.3g}" if record.ratio >= self._floor else "not yet testable"


def compare(
    engine: Sequence[float], trainer: Sequence[float], base: Sequence[float], steady: Sequence[float]
) -> CanaryRecord:
    """`steady`: the trainer's, through the base's experts.

    Errors: InvariantError for lengths that differ, or nothing to compare.
    """
    sizes = [len(scores) for scores in (engine, trainer, base, steady)]
    if not engine or len(set(sizes)) > 1:
        raise InvariantError(f"{sizes} scores cannot be compared")
    gaps = distances(engine, trainer)
    return CanaryRecord(
        fmean(engine),
        fmean(trainer),
        fmean(base),
        fmean(gaps),
        max(gaps),
        fmean(distances(engine, base)),
        fmean(distances(steady, base)),
    )


def distances(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """|a - b|, one by one."""
    return [abs(x - y) for x, y in zip(a, b, strict=True)]


def perturbed(adapter: Adapter, std: float, seed: int = 0) -> Adapter:
    """The same A, and a synthetic B of deviation `std`, drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for module, one in adapter.factors.items():
        b = torch.randn(one.b.shape, generator=generator, dtype=torch.float64) * std
        factors[module] = SiteFactors(one.a, b.to(one.b), one.scale)
    return Adapter(adapter.settings, factors)


@dataclass(frozen=True, slots=True)
class StartRecord:
    """What the start-up test saw: mean |dlogp|. zero_gap: engine to trainer with the first adapter; effect: of the
    synthetic B in the trainer; withheld: change of the engine meanwhile; gap: engine to trainer once it is published.
    """

    zero_gap: float
    effect: float
    withheld: float
    gap: float


def start_test(
    policy: Policy,
    trainer: PolicyTrainer,
    sync: Sync,
    ids: Sequence[int],
    *,
    version: int,
    std: float,
    is_first: bool,
) -> StartRecord:
    """Publish the adapter as `version - 2`, the test's as `version - 1`, the adapter again as `version`.

    Errors: InvariantError that says which of the four facts is not so.
    """
    adapter, split = trainer.adapter(), max(1, len(ids) // 4)
    prompt, output = ids[:split], ids[split:]
    sync.publish(version - 2, adapter, is_first=is_first)
    engine, own = policy.score(prompt, output), trainer.score(prompt, output)
    zero_gap = fmean(distances(engine, own))
    trial = perturbed(adapter, std)
    trainer.install(trial)
    try:
        moved = trainer.score(prompt, output)
        withheld = fmean(distances(policy.score(prompt, output), engine))
        effect = fmean(distances(moved, own))
        sync.publish(version - 1, trial)
        after = policy.score(prompt, output)
    finally:
        trainer.install(adapter)
    sync.publish(version, adapter)
    record = StartRecord(zero_gap, effect, withheld, fmean(distances(after, moved)))
    is_back = fmean(distances(policy.score(prompt, output), engine))
    floor = max(LEAST_EFFECT, TIMES * zero_gap)
    complaints = [
        (effect > floor, f"a synthetic B moves the trainer by {effect:.2g} alone: raise checks.perturbation"),
        (withheld <= effect / TIMES, f"the engine moved by {withheld:.2g} although nothing was published"),
        (record.gap <= effect / TIMES, f"the engine is {record.gap:.2g} off after publication: it ignores the adapter"),
        (is_back <= effect / TIMES, f"the engine is {is_back:.2g} off after the adapter was taken back"),
    ]
    for is_good, why in complaints:
        if not is_good:
            raise InvariantError(f"start-up test: {why} (effect {effect:.2g}, first gap {zero_gap:.2g})")
    return record


def check_drift(found: Drift, limit: float) -> None:
    """Errors: InvariantError above the limit, or where it is no number."""
    if not found.k3 <= limit:
        raise InvariantError(
            f"k3 between engine and trainer is {found.k3:.3g}, above checks.max_k3 {limit:g}: mean |dlogp| "
            f"{found.mean_abs:.3g}, max {found.abs_max:.3g}"
        )
