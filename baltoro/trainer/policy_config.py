"""PolicyConfig: which policy loss, over which rows, averaged how; FactorOptim: its optimizer. No torch.

In: a recipe's `[policy]`. Out: a frozen dataclass; ALGORITHMS holds one for each name that people use.
Invariants: a setting that the form does not read is still what it says in the table, and a combination that corrects
twice or cannot be computed is refused.
Source: spec/training.md C.1, C.2; docs/ideas/policy-losses.md for the choice of each default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from baltoro.errors import ConfigError

Form = Literal["clipped", "by_trajectory", "capped", "mirror"]
Aggregation = Literal["token_mean", "trajectory_mean", "fixed_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorOptim:
    """AdamW on the factors, see `rl.recipe.AdamConfig`."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float | None = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """One policy loss. Ratios are of the policy now to `old`."""

    form: Form = "clipped"
    aggregation: Aggregation = "trajectory_mean"
    fixed_length: int | None = None  # tokens that a trajectory counts for, with aggregation fixed_length
    old: Literal["engine", "trainer"] = "engine"  # whose logprobs of the sampled ids the ratio is taken to
    clip_low: float = 0.2  # clipped, by_trajectory: the ratio's range is 1 - clip_low .. 1 + clip_high
    clip_high: float = 0.28
    dual_clip: float | None = None  # clipped: loss at most this times |A| where A < 0; None: off
    max_ratio: float = 5.0  # capped: the ratio itself, not its distance from 1
    gate_low: float = math.log(0.8)  # mirror: log-ratios, the same range as the clip's
    gate_high: float = math.log(1.28)
    tau: float = 1e-3  # mirror: weight of the squared log-ratio
    tis_high: float | None = None  # truncate exp(trainer - engine) here and weigh losses by it; None: off
    tis_low: float = 0.0
    reference_kl: float = 0.0  # beta of k3 to the base without the adapter

    def __post_init__(self) -> None:
        def need(is_good: bool, message: str) -> None:
            if not is_good:
                raise ConfigError(message)

        need(0.0 < self.clip_low < 1.0, f"policy.clip_low {self.clip_low} must lie in (0, 1)")
        need(self.clip_high > 0.0, f"policy.clip_high {self.clip_high} must be positive")
        need(self.dual_clip is None or self.dual_clip > 1.0, f"policy.dual_clip {self.dual_clip} must be above 1")
        need(
            self.dual_clip is None or self.form == "clipped",
            f"policy.dual_clip belongs to form clipped, not {self.form}; leave it out",
        )
        need(self.max_ratio >= 1.0, f"policy.max_ratio {self.max_ratio} must be at least 1")
        need(self.gate_low < 0.0 < self.gate_high, "policy.gate_low must be negative and policy.gate_high positive")
        need(self.tau >= 0.0, f"policy.tau {self.tau} must not be negative")
        need(self.reference_kl >= 0.0, f"policy.reference_kl {self.reference_kl} must not be negative")
        is_fixed = self.aggregation == "fixed_length"
        need(
            is_fixed == (self.fixed_length is not None),
            "policy.fixed_length and aggregation fixed_length need each other",
        )
        need(self.fixed_length is None or self.fixed_length >= 1, "policy.fixed_length must be at least 1")
        need(
            self.form != "by_trajectory" or self.aggregation == "trajectory_mean",
            "policy.form by_trajectory (GSPO) is defined with aggregation trajectory_mean",
        )
        need(
            self.tis_high is None or self.old == "trainer",
            "policy.tis_high with old engine would correct for the engine twice; set policy.old to trainer",
        )
        need(
            self.tis_high is None or 0.0 <= self.tis_low < 1.0 < self.tis_high,
            "TIS needs 0 <= policy.tis_low < 1 < policy.tis_high",
        )


# What each name means here. Whether advantages are divided by the deviation is part of a name too: `rl.config`.
ALGORITHMS: dict[str, PolicyConfig] = {
    "grpo": PolicyConfig(),
    "dapo": PolicyConfig(aggregation="token_mean"),
    "dr_grpo": PolicyConfig(aggregation="fixed_length", fixed_length=4096, clip_high=0.2),
    "gspo": PolicyConfig(form="by_trajectory", clip_low=3e-4, clip_high=4e-4),
    "cispo": PolicyConfig(form="capped", aggregation="token_mean"),
    "kimi": PolicyConfig(form="mirror", aggregation="token_mean"),
}
