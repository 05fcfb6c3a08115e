"""TrainConfig: what a training run was asked to do. No torch.

In: a recipe (TOML, see recipes/) through `baltoro.config.load_config`. Out: frozen dataclasses.
Invariants: a recipe that cannot run says which key and why before anything is allocated; what a number means is in the
field's comment, with its unit; fractions are of the whole run.
Source: spec/training.md C.7 (Muon, QK-clip), C.8 (balancing).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from baltoro.errors import ConfigError
from baltoro.model.config import K3Config


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where the corpora lie, and the script that writes them when they are missing."""

    folder: Path
    builder: Path | None = None  # run as `python BUILDER --out FOLDER` by `baltoro train` if the folder is missing
    prefetch: bool = True  # pack the next step while this one runs; changes no number


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """A part of the run: from the end of the stage before it until `until`."""

    until: float  # fraction of all steps, 1.0 for the last stage
    max_length: int  # tokens of the longest piece of prose; dialogues are never cut
    mix: dict[str, float]  # corpus -> share of tokens; normalised
    quantise_weights: bool = False  # fake MXFP4 on expert weights
    quantise_inputs: bool = False  # fake MXFP8 on expert inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Tokens per optimizer step, and per forward and backward."""

    tokens: int = 4096
    micro_tokens: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Per-head Muon on matrices, AdamW on the rest; one learning rate, since Muon's update is RMS-matched to Adam's."""

    lr: float = 2e-3
    adam_lr: float | None = None  # None: lr
    warmup: float = 0.01  # fraction of the steps
    final_lr: float = 0.0  # fraction of lr at the last step
    weight_decay: float = 0.1
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    adam_betas: tuple[float, ...] = (0.9, 0.95)
    adam_eps: float = 1e-10
    max_grad_norm: float | None = 1.0
    qk_clip: float | None = 100.0  # tau, the largest attention logit; None: off


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Weights of the auxiliary losses next to the cross entropy of the next token."""

    mtp: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """How the router's selection bias follows the load."""

    method: Literal["quantile", "sign", "none"] = "quantile"
    bins: int = 1000
    sign_rate: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """How often training state is written, and how many of the last ones stay."""

    every_s: float = 60.0
    keep: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """How often the numbers of steps are read and logged; reading waits for the device. Every step has its line."""

    every_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Loss on the held-out part of the corpora."""

    every_steps: int = 100
    tokens: int = 16384  # per corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run: model, data, stages, optimizer."""

    name: str
    model: K3Config
    data: DataConfig
    stages: tuple[StageConfig, ...]
    steps: int
    seed: int = 1
    device: str = "cpu"
    # of weights, activations and optimizer state; bfloat16 computes on a copy and keeps float32 masters
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    threads: int | None = None  # torch threads; None: leave torch's choice
    init_std: float = 0.02
    init_from: str | None = None  # a model folder whose weights the run starts from; None: drawn from the seed
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        _check(self)

    def stage_index(self, step: int) -> int:
        """Which stage step `step` (from 0) belongs to."""
        for index, stage in enumerate(self.stages):
            if step < round(stage.until * self.steps):
                return index
        return len(self.stages) - 1

    def stage(self, step: int) -> StageConfig:
        """The stage of step `step` (from 0)."""
        return self.stages[self.stage_index(step)]


def _check(config: TrainConfig) -> None:
    """Errors: ConfigError naming the key."""

    def need(is_good: bool, message: str) -> None:
        if not is_good:
            raise ConfigError(message)

    need(config.steps >= 1, f"steps must be at least 1, not {config.steps}")
    need(len(config.stages) > 0, "a recipe needs at least one [[stages]] section")
    need(config.log.every_steps >= 1, f"log.every_steps must be at least 1, not {config.log.every_steps}")
    ends = [stage.until for stage in config.stages]
    need(ends == sorted(set(ends)) and ends[-1] == 1.0, f"stages.until must rise and end with 1.0, not {ends}")
    micro = config.batch.micro_tokens
    need(0 < micro <= config.batch.tokens, f"batch.micro_tokens {micro} must lie in 1..batch.tokens")
    for index, stage in enumerate(config.stages):
        need(1 < stage.max_length <= micro, f"stages[{index}].max_length must lie in 2..batch.micro_tokens {micro}")
        need(bool(stage.mix), f"stages[{index}].mix names no corpus")
        need(all(share > 0 for share in stage.mix.values()), f"stages[{index}].mix has a share that is not positive")
    need(0.0 <= config.optim.warmup < 1.0, f"optim.warmup {config.optim.warmup} must lie in [0, 1)")
    need(len(config.optim.adam_betas) == 2, "optim.adam_betas needs two numbers")
    is_quantised = any(s.quantise_weights or s.quantise_inputs for s in config.stages)
    widths = (config.model.expert_width, config.model.expert_intermediate_size)
    need(
        not is_quantised or all(width % 32 == 0 for width in widths),
        f"a quantised stage needs expert widths in multiples of 32, not {widths}",
    )
    need(
        config.balance.method != "quantile" or config.model.num_expert_groups == 1,
        "balance.method quantile needs num_expert_groups 1; use sign",
    )
