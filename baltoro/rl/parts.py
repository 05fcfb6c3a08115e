"""Everything of one RL run, put together: engine, trainer, tasks, book, collector. The loop moves them.

In: an RLConfig (and, for tests, families of their own). Out: `Parts`, ready for the first step or for the next one.
Invariants: version 0 is the base; `version` is what the engine serves; engine and trainer compute with the same base in
the same dtype; whatever was opened is closed by `close`, once, in the other order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import import_module

import torch

from baltoro.chat.factories import Factories
from baltoro.chat.tokenizer import Tokenizer
from baltoro.config import build
from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import load_engine
from baltoro.engine.planner import resolve_dtype
from baltoro.engine.threads import set_threads
from baltoro.envs.base import Family, Task
from baltoro.envs.pool import RewardPool
from baltoro.errors import InvariantError
from baltoro.model.adapter import Adapter
from baltoro.model.config import K3Config
from baltoro.model.context import FakeQuant
from baltoro.model.decoder import K3Model
from baltoro.model.weights import load_model
from baltoro.rl.checkpoint import Pending, Saved
from baltoro.rl.collect import Collector
from baltoro.rl.drift import Canary
from baltoro.rl.inline import InlinePolicy
from baltoro.rl.partial import Book
from baltoro.rl.policy import Policy
from baltoro.rl.recipe import RLConfig
from baltoro.rl.rollout import Talk
from baltoro.rl.sync import Sync, expected, fields
from baltoro.rl.tasks import Drawn, TaskStream, by_family, held_out, make_family
from baltoro.rl.types import Group, Trajectory
from baltoro.trainer.first_adapter import first_adapter
from baltoro.trainer.policy_config import FactorOptim
from baltoro.trainer.policy_step import PolicyTrainer

FIRST_VERSION = 3  # 1: nothing; 2: the start-up test's; 3: nothing again, and the first to sample


@dataclass(slots=True)
class Parts:
    """See the module. `step` optimizer steps are done. Single writer: `loop.run`."""

    config: RLConfig
    talk: Talk
    policy: Policy
    trainer: PolicyTrainer
    sync: Sync
    stream: TaskStream
    held_out: list[Drawn]
    book: Book
    collector: Collector
    families: dict[str, Family]
    tasks: dict[str, Drawn] = field(default_factory=dict)  # of what is pending
    canary: Canary | None = None
    pinned: Trajectory | None = None
    b0: dict[str, float] = field(default_factory=dict)
    step: int = 0
    version: int = FIRST_VERSION
    group: int = 0
    owned: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """May be called again."""
        self.owned.close()

    def fresh(self) -> list[tuple[int, Drawn]]:
        """New groups of the next round, with their numbers."""
        drawn = self.stream.take(self.config.rollout.groups)
        found = list(enumerate(drawn, start=self.group))
        self.group += len(drawn)
        self.tasks |= {one.task.id: one for one in drawn}
        return found

    def forget(self) -> None:
        """Tasks that are no longer pending."""
        pending = {t.task for t in self.book.pending()}
        self.tasks = {name: one for name, one in self.tasks.items() if name in pending}

    def pin(self, groups: Sequence[Group]) -> None:
        """The canary: the first trajectory that was sampled."""
        for t in (t for group in groups for t in group.members if t.num_sampled):
            self.pinned = t
            checks = self.config.checks
            self.canary = Canary(t.prompt, t.tokens, floor=checks.canary_floor, most=checks.canary_tokens)
            return

    # ---- checkpoint ----------------------------------------------------------------------------------------------
    def saved(self) -> Saved:
        """What a checkpoint holds."""
        pending = Pending(
            book=self.book.state(),
            tasks={name: one.task for name, one in self.tasks.items()},
            canary=self.pinned,
            b0=self.b0,
            throttle=self.collector.throttle,
        )
        return Saved(
            step=self.step,
            version=self.version,
            cursor=self.stream.cursor,
            group=self.group,
            trainer=self.trainer.state(),
            pending=pending,
        )

    def restore(self, saved: Saved) -> None:
        """Stand where the checkpoint was written. The engine gets its version from `loop.start`."""
        self.step, self.version, self.group = saved.step, saved.version, saved.group
        self.trainer.load_state(saved.trainer)
        self.stream.skip_to(saved.cursor)
        self.b0 = dict(saved.pending.b0)
        self.book = Book.restored(self.config.partial, saved.pending.book)
        self.collector.book, self.collector.throttle = self.book, saved.pending.throttle
        self.tasks = {name: self._drawn(task) for name, task in saved.pending.tasks.items()}
        self.collector.restore(self._of)
        if saved.pending.canary is not None:
            t = self.pinned = saved.pending.canary
            checks = self.config.checks
            self.canary = Canary(t.prompt, t.tokens, floor=checks.canary_floor, most=checks.canary_tokens)

    def _drawn(self, task: Task) -> Drawn:
        if task.family not in self.families:
            raise InvariantError(f"task {task.id} is of family {task.family}, which this recipe does not have")
        return Drawn(task, self.families[task.family], None)

    def _of(self, trajectory: Trajectory) -> Drawn:
        one = self.tasks[trajectory.task]
        return Drawn(one.task, one.family, trajectory.effort)


def make_families(config: RLConfig, owned: ExitStack) -> list[Family]:
    """The recipe's; the pool of judges, if one of them needs it, is closed with `owned`."""
    pool = None
    if any(one.family.startswith("gym.") for one in config.tasks):
        judges = config.rollout
        pool = owned.enter_context(RewardPool(judges.judge_processes, timeout_s=judges.judge_timeout_s))
    return [make_family(one, pool) for one in config.tasks]


def engine_config(config: RLConfig) -> EngineConfig:
    """The recipe's options with the slots that a policy needs. Old versions may still run while a new one begins."""
    has_experts = config.adapter.targets == "all"
    defaults = {"max_loras": 2, "max_lora_rank": config.adapter.rank, "lora_experts": has_experts}
    defaults["keeps_routed_experts"] = config.rollout.replays_routes
    return build(EngineConfig, defaults | config.engine.options, "engine.options.")


def open_parts(config: RLConfig, *, families: Sequence[Family] | None = None) -> Parts:
    """Load, start, put together. Errors: ConfigError, WeightsError, WorkerLost."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    else:
        set_threads(config.model)
    torch.use_deterministic_algorithms(config.is_deterministic)
    torch.manual_seed(config.seed)
    owned = ExitStack()
    with ExitStack() as guard:
        guard.callback(owned.close)
        parts = _put_together(config, owned, families)
        guard.pop_all()
    return parts


def _put_together(config: RLConfig, owned: ExitStack, families: Sequence[Family] | None) -> Parts:
    kinds = list(families) if families is not None else make_families(config, owned)
    tokenizer = Tokenizer.load(config.model)
    talk = Talk(tokenizer, config.rollout.thinking)
    policy, trainer = _engine_and_trainer(config, tokenizer, owned)
    shares = [one.share for one in config.tasks] if families is None else [1.0] * len(kinds)
    book = Book(config.partial)
    collector = Collector(policy, book, talk, config.rollout, config.throttle, seed=config.seed)
    owned.callback(collector.close)
    return Parts(
        config=config,
        talk=talk,
        policy=policy,
        trainer=trainer,
        sync=Sync(policy, trainer.model.config, must_change=config.optim.lr > 0.0),
        stream=TaskStream(kinds, shares, seed=config.seed, efforts=config.rollout.efforts, pool=config.rollout.pool),
        held_out=held_out(kinds, config.eval.tasks, config.rollout.efforts),
        book=book,
        collector=collector,
        families=dict(by_family(kinds)),
        owned=owned,
    )


def _engine_and_trainer(config: RLConfig, tokenizer: Tokenizer, owned: ExitStack) -> tuple[Policy, PolicyTrainer]:
    """Engine first: it owns the base."""
    options = engine_config(config)
    adapter = _first_adapter(config, options)
    open_one = _inline if config.engine.place == "inline" else _process
    policy, model = open_one(config, options, tokenizer, adapter)
    owned.callback(policy.close)
    trainer = _trainer(config, model, adapter)
    owned.callback(trainer.release)  # before the engine, which owns what it stands on
    return policy, trainer


def make_standalone_trainer(config: RLConfig) -> PolicyTrainer:
    """The trainer as a run has it before its first step, without an engine."""
    options = engine_config(config)
    model = load_model(config.model, dtype=resolve_dtype(options), device=options.device)
    return _trainer(config, model, _first_adapter(config, options))


def _first_adapter(config: RLConfig, options: EngineConfig) -> Adapter:
    chosen, shape = config.adapter, K3Config.load(config.model)
    dtype = resolve_dtype(options)
    return first_adapter(
        shape, rank=chosen.rank, alpha=chosen.alpha, targets=chosen.targets, seed=config.seed, dtype=dtype
    )


def _trainer(config: RLConfig, model: K3Model, adapter: Adapter) -> PolicyTrainer:
    optim = asdict(config.optim)
    micro_tokens = optim.pop("micro_tokens")
    optim["betas"] = tuple(optim["betas"])
    quant = FakeQuant(activations=engine_config(config).expert_inputs == "mxfp8")  # one key for both ends
    return PolicyTrainer(model, adapter, config.policy_loss, FactorOptim(**optim), micro_tokens, quant)


def _inline(config: RLConfig, options: EngineConfig, tokenizer: Tokenizer, adapter: Adapter) -> tuple[Policy, K3Model]:
    """Engine and trainer in this process, each with a model of its own."""
    made = Factories(tokenizer)
    engine = load_engine(config.model, options, eos_ids=made.eos_ids, stop_rules=made.stop_rule, masks=made.mask)
    policy = InlinePolicy(
        engine,
        fields(adapter),
        expected=expected(adapter, engine.model_config),
        must_change=config.optim.lr > 0.0,
    )
    return policy, load_model(config.model, dtype=resolve_dtype(options), device=options.device)


def _process(config: RLConfig, options: EngineConfig, tokenizer: Tokenizer, adapter: Adapter) -> tuple[Policy, K3Model]:
    """An engine in a process of its own, and the trainer's model on the base that both map; or an engine of another
    host, and a model of our own."""
    module = import_module("baltoro.rl.engine_process")  # sockets and shared memory, which an inline run does without
    policy = module.EnginePolicy(
        config.model,
        options,
        module.PolicyOptions(
            fields=fields(adapter),
            expected=expected(adapter, K3Config.load(config.model)),
            running="carry" if config.partial.resume == "carry" else "keep",
            must_change=config.optim.lr > 0.0,
            is_base_shared=config.engine.shares_base,
            call_s=60.0 if options.device == "cpu" else 300.0,  # a first step compiles kernels
        ),
        place=config.engine.place,
    )
    return policy, policy.trainer_model()
