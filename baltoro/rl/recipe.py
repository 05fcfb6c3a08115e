"""RLConfig: one RL run, as its recipe says. No torch.

In: a TOML file through `baltoro.config.load_config`. Out: frozen dataclasses; `policy_loss` and `advantages` are the
named algorithm's defaults with the recipe's changes to them.
Invariants: a recipe that cannot run says which key and why before anything is allocated; what a number means stands
beside it, with its unit.
Source: spec/training.md A.1, A.2, C.1-C.4.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from baltoro.config import build
from baltoro.errors import ConfigError
from baltoro.rl.config import ADVANTAGES, AdvantageConfig, PartialConfig, ShapingConfig, ThrottleConfig
from baltoro.trainer.policy_config import ALGORITHMS, PolicyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyConfig:
    """One kind of task. `family`: arithmetic, calculator, or gym.NAME; `options`: of its dataclass in envs/tasks."""

    family: str
    share: float = 1.0  # of the groups
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What one round collects. Sampling is at temperature 1 without cuts: the policy itself."""

    groups: int = 8  # new tasks a round
    group_size: int = 8  # attempts on each
    pool: int | None = None  # different tasks, taken in turn again and again; None: always new ones
    b0_attempts: int = 4  # on each task of the pool before the first step, where shaping.tau or tau_stages is set
    thinking: bool = True
    efforts: tuple[str, ...] = ()  # levels that prompts ask for, one a group in turn; empty: none is asked for
    retries: int = 1  # of an attempt that something of ours took: engine, sandbox, judge
    judge_threads: int = 0  # envs step and judge in these; 0: in the loop itself, which makes a run repeatable
    judge_processes: int = 1  # of the pool that runs foreign scorers
    judge_timeout_s: float = 10.0
    replays_routes: bool = False  # the trainer's routers take the experts that the engine's took (routing replay, R3)
    stall_s: float = 120.0  # no token for so long: the round ends with an error that names who is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The adapter that is trained."""

    rank: int = 8
    alpha: float = 16.0
    targets: Literal["all", "attention", "no_experts"] = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamConfig:
    """AdamW on the factors; the rate is constant after a linear warm-up."""

    lr: float = 1e-3
    warmup_steps: int = 0
    betas: tuple[float, ...] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    micro_tokens: int = 4096  # rows of one forward and backward; changes nothing but memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceConfig:
    """Where the engine runs, and its options.

    place     process: a process of its own, on the base that both map; inline: in this one (small runs and tests);
              tcp://HOST:PORT: the engine that `baltoro rl-engine`, with this recipe, runs on that host
    sleeps    give the engine's pool back while the trainer works
    shares_base   with place process: one base for both; off, each loads its own (machines without CUDA IPC), as two
              hosts always do: there this key says nothing
    options   fields of engine.config.EngineConfig. With tcp the engine has those that its command was given: where
              they decide a token they must be the same here (docs/rl.md), and `device` here is the trainer's
    """

    place: str = "process"
    sleeps: bool = False
    shares_base: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_remote(self) -> bool:
        """Whether the engine runs on another host, or as if it did."""
        return host_and_port(self.place) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutConfig:
    """Evaluation on a fixed set: tasks that training never draws."""

    every_steps: int = 10  # also before the first step and after the last
    tasks: int = 64  # of each family
    draws: int = 4  # sampled attempts on each; besides, one greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig:
    """Checks that run always, and where they stop the run."""

    max_k3: float = 1e-2  # mean k3 of one step between engine and trainer
    canary_floor: float = 3.0  # below this ratio of effect to disagreement the canary can prove nothing yet
    has_start_test: bool = True  # perturb B, withhold it, publish it, take it back
    perturbation: float = 0.05  # deviation of the B of that test
    canary_tokens: int = 256  # at most, of the pinned trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveConfig:
    """What is written, and how often."""

    every_steps: int = 10
    keep: int = 2
    plot_every_steps: int = 50  # 0: at the end alone
    has_rollouts: bool = True  # dump each step's groups for --replay and --rescore


@dataclass(frozen=True, slots=True, kw_only=True)
class TauConfig:
    """A stage of the effort budget: from the end of the one before until `until`, a fraction of the steps."""

    until: float
    tau: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RLConfig:
    """One run. `algorithm` names the loss and its advantages; [policy] and [advantage] change single keys of it."""

    name: str
    model: Path
    tasks: tuple[FamilyConfig, ...]
    steps: int
    seed: int = 1
    threads: int | None = None  # torch threads of the trainer; None: leave torch's choice
    is_deterministic: bool = False  # torch's deterministic algorithms; with place inline the same run twice is equal
    algorithm: str = "grpo"
    policy: dict[str, Any] = field(default_factory=dict)
    advantage: dict[str, Any] = field(default_factory=dict)
    reward: Literal["task", "random"] = "task"  # random: a control, which must not rise
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    partial: PartialConfig = field(default_factory=lambda: PartialConfig(max_tokens=256))
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    tau_stages: tuple[TauConfig, ...] = ()  # shaping.tau by stage; empty: shaping.tau all along
    throttle: ThrottleConfig = field(default_factory=ThrottleConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optim: AdamConfig = field(default_factory=AdamConfig)
    engine: PlaceConfig = field(default_factory=PlaceConfig)
    eval: HeldOutConfig = field(default_factory=HeldOutConfig)
    checks: CheckConfig = field(default_factory=CheckConfig)
    save: SaveConfig = field(default_factory=SaveConfig)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def policy_loss(self) -> PolicyConfig:
        """The algorithm's loss with the recipe's changes."""
        defaults = asdict(ALGORITHMS[self.algorithm])
        if self.algorithm == "dr_grpo":
            defaults["fixed_length"] = self.partial.max_tokens
        return build(PolicyConfig, given(defaults) | self.policy, "policy.")

    def shaping_at(self, step: int) -> ShapingConfig:
        """With the tau of step `step` (from 0)."""
        for stage in self.tau_stages:
            if step < round(stage.until * self.steps):
                return replace(self.shaping, tau=stage.tau)
        return self.shaping

    @property
    def has_effort_budget(self) -> bool:
        return self.shaping.tau is not None or bool(self.tau_stages)

    @property
    def advantages(self) -> AdvantageConfig:
        """The algorithm's advantages with the recipe's changes."""
        defaults = given(asdict(ADVANTAGES[self.algorithm]))
        return build(AdvantageConfig, defaults | self.advantage, "advantage.")


def host_and_port(place: str) -> tuple[str, int] | None:
    """Of tcp://HOST:PORT; None for anything else."""
    try:
        parts = urlsplit(place)
        port = parts.port
    except ValueError:  # of a port
        return None
    is_one = parts.scheme == "tcp" and parts.hostname and port is not None and not (parts.path or parts.query)
    return (str(parts.hostname), int(port or 0)) if is_one else None


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Those that are set: TOML has no word for None."""
    return {key: value for key, value in fields.items() if value is not None}


def _check(config: RLConfig) -> None:
    """Errors: ConfigError naming the key."""

    def need(is_good: bool, message: str) -> None:
        if not is_good:
            raise ConfigError(message)

    need(config.steps >= 1, f"steps must be at least 1, not {config.steps}")
    need(len(config.tasks) > 0, "a recipe needs at least one [[tasks]] section")
    need(all(one.share > 0 for one in config.tasks), "tasks.share must be positive")
    known = ", ".join(ALGORITHMS)
    need(config.algorithm in ALGORITHMS, f"algorithm {config.algorithm!r} is not known; use one of {known}")
    _ = config.policy_loss, config.advantages  # their own checks
    rollout = config.rollout
    need(rollout.groups >= 1, "rollout.groups must be at least 1")
    need(
        rollout.group_size >= 2,
        f"rollout.group_size {rollout.group_size}: an attempt alone has advantage 0 and teaches nothing; use 2 or more",
    )
    need(not rollout.efforts or rollout.thinking, "rollout.efforts ask for thinking; set rollout.thinking on")
    need(min(rollout.retries, rollout.judge_threads) >= 0, "rollout.retries and judge_threads must not be negative")
    place = config.engine.place
    need(
        place in ("process", "inline") or config.engine.is_remote,
        f"engine.place must be process, inline or tcp://HOST:PORT, not {place!r}",
    )
    need(config.adapter.rank >= 1, "adapter.rank must be at least 1")
    need(config.optim.micro_tokens >= 2, "optim.micro_tokens must be at least 2")
    need(config.optim.lr >= 0.0, "optim.lr must not be negative (0 is a control)")
    need(len(config.optim.betas) == 2, "optim.betas needs two numbers")
    need(config.eval.draws >= 1 and config.eval.tasks >= 1, "eval.draws and eval.tasks must be at least 1")
    every = (config.eval.every_steps, config.save.every_steps, config.save.keep)
    need(min(every) >= 1, "eval.every_steps, save.every_steps and save.keep must be at least 1")
    need(rollout.pool is None or rollout.pool >= 1, "rollout.pool must be at least 1")
    need(
        not config.has_effort_budget or rollout.pool is not None,
        "shaping.tau is about b0 of each task, which is measured first: set rollout.pool, the number of tasks",
    )
    ends = [stage.until for stage in config.tau_stages]
    need(not ends or (ends == sorted(set(ends)) and ends[-1] == 1.0), f"tau_stages.until must rise to 1.0, not {ends}")
    need(all(stage.tau > 0 for stage in config.tau_stages), "tau_stages.tau must be positive")
