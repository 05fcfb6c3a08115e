"""The dry run: what an RL run will need and do, before a weight is loaded; and what cannot work, refused.

In: an RLConfig, the model's config. Out: a Plan in numbers: memory of each phase, bytes of a publication, tokens of a
step; the table of disputed choices. All from arithmetic on shapes; what is an estimate says so.
Source: spec/training.md B.1, B.3; `model/sizes.py` for the model's own bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from baltoro.chat.messages import EFFORTS
from baltoro.engine.config import EngineConfig
from baltoro.engine.planner import resolve_dtype
from baltoro.errors import ConfigError
from baltoro.model.adapter_names import SIDES, adapter_sites
from baltoro.model.config import K3Config
from baltoro.model.routes import bytes_per_token
from baltoro.model.sizes import measure
from baltoro.rl.config import Choice, resolved
from baltoro.rl.recipe import RLConfig
from baltoro.rl.tasks import GYM, make_family
from baltoro.trainer.first_adapter import wants_site

SAVED_ROWS = 40  # activations of about so many widths are kept a layer and token: KDA, MLA, MLP and norms; an estimate


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes, and tokens. activation_bytes is an estimate, the rest is exact up to padding. num_bases is this machine's;
    with is_remote the engine's slots and pool, and another base, are the other host's."""

    base_bytes: int
    num_bases: int
    adapter_bytes: int
    adapter_parameters: int
    slot_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    activation_bytes: int
    pool_bytes: int | None
    attempts: int
    most_tokens: int
    sync_bytes: int
    sync_tensors: int
    is_remote: bool = False
    route_bytes: int = 0  # of a token, with rollout.replays_routes

    @property
    def resident_bytes(self) -> int:
        """In every phase, on this machine."""
        slots = 0 if self.is_remote else self.slot_bytes
        return self.num_bases * self.base_bytes + self.adapter_bytes + slots + self.optimizer_bytes


def make_plan(config: RLConfig, model: K3Config, engine: EngineConfig) -> Plan:
    """Errors: ConfigError for what cannot work, with the key to change."""
    refuse(config, model, engine)
    dtype_bytes = resolve_dtype(engine).itemsize
    sites = [s for m, s in adapter_sites(model).items() if wants_site(m, config.adapter.targets)]
    parameters = sum(prod(site.shape(side, config.adapter.rank)) for site in sites for side in SIDES)
    every = [s for s in adapter_sites(model).values() if engine.lora_experts or s.num_experts is None]
    slots = sum(prod(site.shape(side, engine.max_lora_rank)) for site in every for side in SIDES)
    master_bytes = max(4, dtype_bytes)
    attempts = config.rollout.groups * config.rollout.group_size
    rows = config.optim.micro_tokens
    kept = rows * model.hidden_size * SAVED_ROWS * model.num_layers + rows * model.vocab_size * 2
    pool = engine.memory_bytes
    is_shared = config.engine.place == "process" and config.engine.shares_base
    return Plan(
        base_bytes=measure(model).file_bytes,
        num_bases=1 if config.engine.is_remote or is_shared else 2,
        adapter_bytes=parameters * dtype_bytes,
        adapter_parameters=parameters,
        slot_bytes=slots * dtype_bytes * engine.max_loras,
        is_remote=config.engine.is_remote,
        optimizer_bytes=parameters * (2 * master_bytes + (master_bytes if dtype_bytes < 4 else 0)),
        gradient_bytes=parameters * master_bytes,
        activation_bytes=kept * dtype_bytes,
        pool_bytes=None if pool == "auto" else pool,
        attempts=attempts,
        most_tokens=attempts * config.partial.max_tokens,
        sync_bytes=parameters * dtype_bytes,
        sync_tensors=2 * len(sites),
        route_bytes=bytes_per_token(model) if config.rollout.replays_routes else 0,
    )


def refuse(config: RLConfig, model: K3Config, engine: EngineConfig) -> None:
    """Combinations that cannot work. Errors: ConfigError with the key to change."""
    _refuse_words(config)
    _refuse_sizes(config, model, engine)
    _refuse_routes(config, model, engine)
    _refuse_places(config, engine)


def need(is_good: bool, message: str) -> None:
    """Errors: ConfigError unless it is good."""
    if not is_good:
        raise ConfigError(message)


def _refuse_words(config: RLConfig) -> None:
    """Names of tasks and efforts, and what they count."""
    for one in config.tasks:
        if not one.family.startswith(GYM):  # which needs its extra, and judges, to be made
            make_family(one)
    unknown = sorted(set(config.rollout.efforts) - set(EFFORTS))
    need(not unknown, f"rollout.efforts {unknown} are not known; use some of {', '.join(EFFORTS)}")
    if config.has_effort_budget:
        need(
            config.shaping.counted == "output" or config.rollout.thinking,
            "shaping.counted thinking with rollout.thinking off counts nothing: set it to output",
        )


def _refuse_sizes(config: RLConfig, model: K3Config, engine: EngineConfig) -> None:
    """Budgets, context, slots."""
    budget, rows = config.partial.max_tokens, config.optim.micro_tokens
    need(
        budget < rows,
        f"partial.max_tokens {budget} and a prompt do not fit into optim.micro_tokens {rows}: raise the latter",
    )
    buffer = config.shaping.overlong_buffer
    need(
        buffer is None or buffer < budget,
        f"shaping.overlong_buffer {buffer} must be below partial.max_tokens {budget}, or every answer is too long",
    )
    limit = model.max_position_embeddings
    need(budget < limit, f"partial.max_tokens {budget} is over what the model was made for, {limit}")
    if engine.max_context != "auto":
        need(
            budget < engine.max_context,
            f"engine.options.max_context {engine.max_context} is within the budget {budget}",
        )
    need(engine.max_lora_rank >= config.adapter.rank, "engine.options.max_lora_rank is below adapter.rank")
    need(
        engine.max_loras >= 2 or config.partial.resume == "carry",
        "engine.options.max_loras must be 2: while a version is published, requests of the one before may still run",
    )
    is_split = config.adapter.targets == "all" and not engine.lora_experts
    need(not is_split, "adapter.targets all trains routed experts, and engine.options.lora_experts is off")


def _refuse_routes(config: RLConfig, model: K3Config, engine: EngineConfig) -> None:
    """Routing replay needs routers, and an engine that keeps what they took."""
    if config.rollout.replays_routes:
        need(bool(model.expert_layers), "rollout.replays_routes: this model has no experts, leave it out")
        need(engine.keeps_routed_experts, "rollout.replays_routes needs engine.options.keeps_routed_experts")


def _refuse_places(config: RLConfig, engine: EngineConfig) -> None:
    """Processes, devices, what becomes of paused trajectories."""
    need(
        config.partial.resume == "reprefill" or config.engine.place != "inline",
        "partial.resume carry needs engine.place process or tcp: the inline engine keeps running requests' version",
    )
    need(
        config.partial.resume == "reprefill" or engine.retract_to == "host",
        "partial.resume carry needs engine.options.retract_to host and host_cache_bytes: between two rounds "
        "the engine gives its pool back, and what is not copied is computed anew, as with reprefill",
    )
    need(
        config.partial.share == 1.0 or config.partial.max_staleness >= 1,
        "partial.share below 1 trains on tokens of older versions: set partial.max_staleness to at least 1",
    )
    need(
        not config.is_deterministic or (config.engine.place == "inline" and config.rollout.judge_threads == 0),
        "is_deterministic needs engine.place inline and rollout.judge_threads 0: processes and threads are not in step",
    )
    need(not config.engine.sleeps or config.engine.place != "inline", "engine.sleeps needs engine.place process or tcp")
    need(
        engine.device == "cpu" or config.engine.place != "inline",
        "an inline engine on a GPU would hold the base twice: set engine.place to process",
    )


def choices(config: RLConfig) -> list[Choice]:
    """The table of disputed defaults, as this run has them."""
    return resolved(config.policy_loss, config.advantages, config.shaping, config.partial)
