"""Settings of the pure half of RL: advantages, shaping, partial rollout, throttle. No torch.

In: a recipe's sections. Out: frozen dataclasses; `resolved` lists every default on which other stacks disagree.
Invariants: a default that people trip over is a key with a name, never a constant in a formula.
Source: spec/training.md A.2, B.1, C.1-C.4, C.15; docs/ideas/policy-losses.md for the choice of each default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baltoro.errors import ConfigError
from baltoro.trainer.policy_config import PolicyConfig


def _need(is_good: bool, message: str) -> None:
    if not is_good:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """Rewards of a group -> advantages."""

    is_normalised: bool = True  # divide by the group's standard deviation
    eps: float = 1e-6  # added to the deviation; it also keeps differences of rounding from looking like signal
    is_unbiased: bool = True  # deviation over K - 1, not K
    zero_std: Literal["keep", "drop"] = "keep"  # groups of equal rewards: in the loss's denominator, or out of it
    right_above: float = 0.0  # a reward above this counts as right, for telling all-right from all-wrong

    def __post_init__(self) -> None:
        _need(self.eps > 0.0, f"advantage.eps {self.eps} must be positive; 1e-8 is next to nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingConfig:
    """Scores -> rewards, before advantages."""

    # a trajectory that its budget cut off: keep its score, hide it from the loss and its group, or -1
    truncated: Literal["train", "mask", "penalise"] = "train"
    overlong_buffer: int | None = None  # tokens before the budget in which the penalty grows to -1; None: off
    tau: float | None = None  # -1 for more than tau * b0 tokens; None: off
    counted: Literal["thinking", "output"] = "thinking"  # which tokens b0 and tau are about
    b0_statistic: Literal["mean", "median", "quantile"] = "mean"
    b0_quantile: float = 0.5  # with b0_statistic quantile
    b0_over: Literal["all", "correct"] = "correct"

    def __post_init__(self) -> None:
        _need(self.overlong_buffer is None or self.overlong_buffer >= 1, "shaping.overlong_buffer must be at least 1")
        _need(self.tau is None or self.tau > 0.0, f"shaping.tau {self.tau} must be positive")
        _need(0.0 <= self.b0_quantile <= 1.0, f"shaping.b0_quantile {self.b0_quantile} must lie in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialConfig:
    """Partial rollout: when a round ends, and what becomes of what is not at its end."""

    share: float = 1.0  # lambda: a round ends when this share of its trajectories is complete; 1: all, strictly
    max_tokens: int = 4096  # sampled tokens of one trajectory, over all its rounds
    max_staleness: int = 4  # versions between a trajectory's oldest token and the policy that trains on it
    stale: Literal["finish_first", "drop"] = "finish_first"  # a round goes on for those that would pass the cap
    resume: Literal["reprefill", "carry"] = "reprefill"  # compute KV and state anew, or go on with an older policy's

    def __post_init__(self) -> None:
        _need(0.0 < self.share <= 1.0, f"partial.share {self.share} must lie in (0, 1]")
        _need(self.max_tokens >= 1, f"partial.max_tokens {self.max_tokens} must be at least 1")
        _need(self.max_staleness >= 0, f"partial.max_staleness {self.max_staleness} must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleConfig:
    """How many trajectories may run at once, from the engine's pressure. Shares are of its pool."""

    low: float = 0.6  # grow while the pool is emptier than this and nobody waits
    soft: float = 0.8  # above it, come down to `target`, once a turnover
    target: float = 0.7
    hard: float = 0.9  # above it, come down at once, and pause the youngest
    growth: float = 1.25  # a turnover: as many trajectories ended as were allowed
    cut: float = 0.8  # after a retraction
    queue_cut: float = 0.9  # after `patience` looks at a line longer than half of what runs
    patience: int = 3
    least: int = 1
    most: int = 1024

    def __post_init__(self) -> None:
        shares = (0.0, self.low, self.target, self.soft, self.hard, 1.0)
        _need(list(shares) == sorted(shares), f"throttle: low <= target <= soft <= hard, within 0..1, not {shares}")
        _need(self.growth > 1.0, f"throttle.growth {self.growth} must be above 1")
        _need(0.0 < self.cut < 1.0 and 0.0 < self.queue_cut < 1.0, "throttle.cut and queue_cut must lie in (0, 1)")
        _need(1 <= self.least <= self.most, "throttle: 1 <= least <= most")
        _need(self.patience >= 1, "throttle.patience must be at least 1")


# Advantages that belong to the names of `trainer.policy_config.ALGORITHMS`
ADVANTAGES: dict[str, AdvantageConfig] = {
    "grpo": AdvantageConfig(),
    "dapo": AdvantageConfig(zero_std="drop"),
    "dr_grpo": AdvantageConfig(is_normalised=False),
    "gspo": AdvantageConfig(),
    "cispo": AdvantageConfig(),
    "kimi": AdvantageConfig(is_normalised=False),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of the start-up table: what was decided, where others decide otherwise."""

    name: str
    value: str
    elsewhere: str


def resolved(
    policy: PolicyConfig, advantage: AdvantageConfig, shaping: ShapingConfig, partial: PartialConfig
) -> list[Choice]:
    """Every default on which stacks disagree, as this run has it. To be printed at the start and kept with the run."""
    std = f"/ (std + {advantage.eps:g}), over K{' - 1' * advantage.is_unbiased}" if advantage.is_normalised else "off"
    tis = f"cut to {policy.tis_low:g}..{policy.tis_high:g}" if policy.tis_high is not None else "off"
    fixed = f" {policy.fixed_length}" if policy.fixed_length is not None else ""
    overlong = f"the last {shaping.overlong_buffer} tokens" if shaping.overlong_buffer is not None else "off"
    effort = "off"
    if shaping.tau is not None:
        statistic = f"{shaping.b0_statistic} {shaping.b0_quantile:g}" * (shaping.b0_statistic == "quantile")
        statistic = statistic or shaping.b0_statistic
        effort = f"-1 above {shaping.tau:g} x {statistic} of {shaping.b0_over}, {shaping.counted} tokens"
    return [
        Choice("loss", _loss(policy), "GRPO clip 0.2/0.2, 0.2/0.28; GSPO 3e-4/4e-4; CISPO cap 5"),
        Choice("aggregation", policy.aggregation + fixed, "token mean, trajectory mean, fixed length"),
        Choice("standard deviation", std, "on or off; 1e-4, 1e-6, 1e-8; over K or K - 1"),
        Choice("groups of equal rewards", advantage.zero_std, "kept in the denominator, dropped, sampled again"),
        Choice("truncated trajectories", shaping.truncated, "trained, masked, -1"),
        Choice("overlong penalty", overlong, "off; DAPO: the last 4096 tokens"),
        Choice("effort budget", effort, "K3: tau by stage, b0 not published"),
        Choice("old logprobs", policy.old, "recorded by the engine, or a second forward of the trainer"),
        Choice("TIS", tis, "off; 2.0 a token; 3.0 a trajectory, masked"),
        Choice("reference KL", f"{policy.reference_kl:g}" if policy.reference_kl else "off", "0, 1e-3, 0.04"),
        Choice("staleness", f"at most {partial.max_staleness}, {partial.stale}", "not bounded, bounded when queued"),
        Choice("partial rollout", f"share {partial.share:g}, {partial.resume}", "off; abort; carry old state"),
        Choice("prefix cache at an update", "a namespace a version", "flushed; salted by version; by adapter name"),
    ]


def _loss(policy: PolicyConfig) -> str:
    match policy.form:
        case "capped":
            return f"CISPO, ratio capped at {policy.max_ratio:g}"
        case "mirror":
            return f"mirror descent, gate {policy.gate_low:.3f}..{policy.gate_high:.3f}, tau {policy.tau:g}"
        case _:
            dual = f", dual {policy.dual_clip:g}" if policy.dual_clip is not None else ""
            name = "GSPO" if policy.form == "by_trajectory" else "GRPO"
            return f"{name}, ratio {1 - policy.clip_low:g}..{1 + policy.clip_high:g}{dual}"


def table(choices: list[Choice]) -> str:
    """The choices in aligned columns."""
    rows = [Choice("choice", "here", "elsewhere"), *choices]
    first, second = max(len(r.name) for r in rows), max(len(r.value) for r in rows)
    return "\n".join(f"{r.name:{first}}  {r.value:{second}}  {r.elsewhere}" for r in rows)
