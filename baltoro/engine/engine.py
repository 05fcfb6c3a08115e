"""Engine: requests in, token deltas out. Speaks ids only; the caller drives it by calling `step`.

In: Submits. Out: TokenDeltas. What stops a request by text and what a grammar allows are objects made elsewhere
(`chat`) and handed in through factories, one object per completion.
Invariants: an error of one request never stops the others; an InvariantError stops the engine.
Not thread-safe: one thread owns an engine.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from baltoro.cache.pages import pages_for
from baltoro.engine.adapter_version import AdapterVersion
from baltoro.engine.adapters import AdapterBook, parse_modules
from baltoro.engine.assemble import add_bank, build_memory, num_fixed_slots, window_records
from baltoro.engine.base import Base, base_facts, share_model, trim_heap
from baltoro.engine.config import EngineConfig
from baltoro.engine.graphs import CudaBackend, Report
from baltoro.engine.intake import Intake, Masks, StopRules
from baltoro.engine.loop import Loop
from baltoro.engine.numbers import engine_numbers
from baltoro.engine.planner import are_experts_dense, check_device, free_bytes, plan_memory, resolve_dtype
from baltoro.engine.runner import Model, Runner
from baltoro.engine.scheduler import Scheduler
from baltoro.kernels.dispatch import expert_order
from baltoro.model.adapter import Adapter, load_adapter
from baltoro.model.context import FakeQuant
from baltoro.observe import resident_bytes
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.worker import Submit


class Engine:
    """One model, one arena, one step loop."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        dtype: torch.dtype | None = None,
        eos_ids: Collection[int] | None = None,
        stop_rules: StopRules | None = None,
        masks: Masks | None = None,
        base: Base | None = None,
        report: Report | None = None,
    ) -> None:
        """`dtype`: of the activations, default as the config resolves it. `eos_ids`: default the model config's.
        `base`: what the model is mapped from, if it is; its files go with the engine. `report`: told how many CUDA
        graphs are captured, of how many."""
        self.config = config
        self.base = base
        self.model_config = model.config
        self.dtype = dtype = dtype or resolve_dtype(config)
        self.bank = add_bank(model, config)  # before memory is planned: it takes some, and so do records of windows
        records = window_records(model, config, dtype)
        free = free_bytes(config.device)
        self.plan = plan_memory(config, model.config, dtype, free, chunk=model.state_chunk)
        self.pool, memory, host = build_memory(config, model, self.plan, dtype)
        self.adapters = AdapterBook(config.max_loras, max_loaded=config.max_loaded_loras)
        self.scheduler = Scheduler(config, memory, max_running=self.plan.max_running, adapters=self.adapters)
        fixed = num_fixed_slots(model, config) if self.bank is not None else 0
        self.runner = Runner(
            model, self.pool, config.device, host=host, bank=self.bank, fixed_slots=fixed,
            quant=FakeQuant(activations=config.expert_inputs == "mxfp8"),
        )  # fmt: skip
        if records is not None:
            self.runner.prepare_verify(
                records, pages_for(self.plan.max_context + config.verify_window, config.page_size)
            )
        if config.graph_batch:
            largest = min(config.graph_batch, self.plan.max_running)
            most = pages_for(self.plan.max_context, config.page_size)
            self.runner.capture(largest, most, CudaBackend(), report)
        self.loop = Loop(self.scheduler, self.runner, is_overlapped=self.plan.is_overlapped)
        self.intake = Intake(
            config, model.config, self.scheduler.roster, self.adapters, self.plan.max_context,
            eos_ids=eos_ids, stop_rules=stop_rules, masks=masks,
        )  # fmt: skip
        for name, path in parse_modules(config.lora_modules):
            self.load_adapter(name, path)

    # ---- requests ------------------------------------------------------------------------------------------------
    def add(self, submit: Submit) -> None:
        """Queue a request. Errors: RequestError, ContextLengthError (the caller's fault), QueueFull (later)."""
        self.scheduler.submit(self.intake.requests(submit, self.scheduler.policy_version))

    def abort(self, request_id: str = "") -> None:
        """End a request wherever it is; an empty id ends all. Its last delta comes with the next step."""
        for one in (request_id,) if request_id else self.scheduler.roster.ids():
            self.scheduler.abort(one)

    def check(self, submit: Submit) -> None:
        """Whether a request can be served at all. Errors: RequestError, ContextLengthError."""
        self.intake.check(submit)

    # ---- adapters ------------------------------------------------------------------------------------------------
    def load_adapter(self, name: str, source: str | Path | Adapter) -> AdapterVersion:
        """Load a folder, or an adapter that is in memory already, under a name. A name that is taken gets a new
        version: running requests keep the old one, later ones get the new one and find no prefix of the old.

        Errors: ConfigError without adapter slots, WeightsError that names the tensor, RequestError for a bad name.
        """
        self.adapters.check_open()
        weights = source if isinstance(source, Adapter) else load_adapter(source, self.model_config)
        self.check_adapter(weights)
        return self.adapters.load(name, weights, "" if isinstance(source, Adapter) else str(source))

    def publish(self, name: str, number: int, weights: Adapter, digest: str, *, is_carrying: bool) -> AdapterVersion:
        """Version `number` of `name`, from now on; nothing is aborted. Running requests keep the old one, or, with
        `is_carrying`, go on with the new one from their next token. Weights that `check_adapter` let pass.

        Errors: as `load_adapter`, with the old version untouched; DigestMismatch where somebody wrote to the base.
        """
        if self.base is not None:
            self.base.check()
        old = self.adapters.latest(name)
        if is_carrying:
            self.loop.settle()  # the step in flight is the old version's
        new = self.adapters.load(name, weights, "published", number=number, digest=digest)
        if is_carrying:
            self.scheduler.carry(old, new)
        return new

    def check_adapter(self, weights: Adapter) -> None:
        """Whether there are slots, and whether it fits into one. Errors: ConfigError, WeightsError."""
        self.adapters.check_open()
        assert self.bank is not None
        self.bank.check(weights)

    def unload_adapter(self, name: str) -> AdapterVersion:
        """Refuse it from now on; `is_gone` of what comes back says when its running users have ended. Errors:
        RequestError."""
        return self.adapters.unload(name)

    # ---- work ----------------------------------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return self.scheduler.has_work

    def step(self) -> list[TokenDelta]:
        """Advance by one step. Errors: InvariantError."""
        return self.loop.step()

    @property
    def is_asleep(self) -> bool:
        return self.scheduler.is_asleep

    def sleep(self) -> dict[str, int]:
        """Give the arena's memory back until `wake`. Running requests go back to the line and are computed again;
        prefixes on the device are forgotten, those of the host tier kept; weights and adapters stay. Requests may come,
        and wait. Captured graphs remember addresses: with them an arena that cannot keep its own is not given back.
        Out: bytes given back (0 if it slept already), and how much less is resident."""
        before = resident_bytes()
        if not self.is_asleep:
            self.loop.settle()
            plan = self.scheduler.sleep()
            self.scheduler.commit(plan, self.runner.run(plan))
        memory = self.pool.memory
        can_go = memory is not None and (memory.keeps_address or self.runner.graphs is None)
        given = memory.give_back() if memory is not None and can_go else 0
        return {"given_back_bytes": given, "resident_bytes": before - resident_bytes() if given else 0}

    def wake(self) -> dict[str, int]:
        """Have the arena again, at the same addresses on a CPU, and go on. Out: bytes taken (0 if it was awake)."""
        taken = self.pool.memory.take() if self.pool.memory is not None else 0
        if taken and self.config.is_poisoned:
            self.pool.poison()
        self.scheduler.wake()
        return {"taken_bytes": taken}

    def close(self) -> None:
        """Let go of the tiers and of the base's name; nothing may be stepped afterwards."""
        self.scheduler.memory.close()
        if self.base is not None:
            self.base.remove()

    def flush(self) -> None:
        """Forget cached prefixes in every tier. What running requests stand on stays theirs, and can be found, until
        they end."""
        self.loop.settle()  # what is on its way into a tier would be found when it arrives
        self.scheduler.flush()

    def audit(self) -> None:
        """Add everything up. Errors: LeakError."""
        self.scheduler.audit()

    def stats(self) -> dict[str, object]:
        """Numbers of now and totals since the start; the names are those of `/metrics`."""
        numbers: dict[str, object] = dict(engine_numbers(self.scheduler, self.plan))
        if self.bank is not None:
            numbers |= {"num_adapters": len(self.adapters.facts()), "adapter_bytes": self.bank.num_bytes}
        return numbers

    def describe(self) -> dict[str, object]:
        """What this engine is, for people and for a server's Hello."""
        model = self.model_config
        facts = {
            "vocab_size": model.vocab_size,
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "has_vision": model.vision is not None,
            "max_context": self.plan.max_context,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        described = {"model": facts, "memory": self.plan.describe(), "config": asdict(self.config)}
        base = {} if self.base is None else {"base": base_facts(self.base)}
        return described | {"adapters": self.adapters.facts(), **base}


def load_engine(
    model_dir: str | Path,
    config: EngineConfig,
    *,
    eos_ids: Collection[int] | None = None,
    stop_rules: StopRules | None = None,
    masks: Masks | None = None,
    report: Report | None = None,
) -> Engine:
    """An engine on the model of a folder. Errors: ConfigError, WeightsError."""
    from baltoro.model.weights import load_model

    check_device(config.device)
    dtype, base = resolve_dtype(config), None
    # what is shared goes from the host to its one place; what is not is read straight to the device
    model = load_model(model_dir, dtype=dtype, device="cpu" if config.base_path else config.device)
    if are_experts_dense(config, model.config, dtype):
        model.unpack_experts()
    elif expert_order(torch.device(config.device), dtype) == "tiled":
        model.tile_experts()
        torch.cuda.empty_cache()  # a layer was there twice; what is free is counted next
    model.merge()
    with ExitStack() as undo:
        if config.base_path:
            model, base = share_model(model, config.base_path, config.device)
            undo.callback(base.remove)
            trim_heap()
        engine = Engine(
            model, config, dtype=dtype, eos_ids=eos_ids, stop_rules=stop_rules, masks=masks, base=base, report=report
        )
        undo.pop_all()
    return engine
