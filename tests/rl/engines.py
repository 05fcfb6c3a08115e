"""A tiny model in a folder, adapters for it as RL publishes them, and engines on it: in a process, and in this one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine, load_engine
from baltoro.model.adapter import Adapter
from baltoro.model.build import new_model
from baltoro.model.weights import save_model
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from baltoro.rl.engine_process import EnginePolicy, PolicyOptions
from baltoro.transfer.manifest import Kind, Raw
from baltoro.transfer.tensors import to_raws
from tests.model.adapters import random_adapter
from tests.tiny import tiny_k3

CONFIG = tiny_k3(
    vision=None,
    media_token_id=None,
    num_layers=4,
    mla_layers=(3,),
    hidden_size=48,
    are_experts_packed=True,
    has_language_prefix=False,
)
RANK = 2
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
EXPERTS = "model.layers.2.block_sparse_moe.experts.w1.lora_B.weight"


def make_folder(folder: Path) -> Path:
    """The model, in float32 files with MXFP4 experts."""
    save_model(new_model(CONFIG, std=0.15, seed=3, decay="slow"), folder)
    return folder


@functools.cache
def adapter(version: int) -> Adapter:
    """A different one for each version."""
    return random_adapter(CONFIG, RANK, seed=version, std=0.12)


def tensors(version: int) -> dict[str, Raw]:
    return to_raws(adapter(version).tensors(CONFIG))


FIELDS: Mapping[str, Any] = adapter(1).settings.to_json([])
KINDS: dict[str, Kind] = {name: (raw.dtype, raw.shape) for name, raw in tensors(1).items()}


def engine_config(**changes: Any) -> EngineConfig:
    options: dict[str, Any] = {
        "max_loras": 2,
        "max_lora_rank": 4,
        "max_context": 400,
        "max_running": 8,
        "page_size": 16,
    }
    return EngineConfig(**(options | {"hash_endpoint": 64} | changes))


def start(folder: Path, *, config: EngineConfig | None = None, entry: Any = None, **options: Any) -> EnginePolicy:
    """A policy in a process."""
    chosen = {"fields": FIELDS, "expected": KINDS, "bucket_bytes": 16 << 10, "transfer_s": 20.0} | options
    more = {} if entry is None else {"entry": entry}
    return EnginePolicy(folder, config or engine_config(), PolicyOptions(**chosen), **more)


def ask(name: str, prompt: Sequence[int] = PROMPT, **params: Any) -> Submit:
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0} | params))
    return Submit(request_id=name, token_ids=tuple(prompt), params=sampling)


def finish(policy: EnginePolicy, *names: str, limit: int = 2000) -> dict[str, list[TokenDelta]]:
    """Deltas of these requests up to their ends; those of others come along."""
    found: dict[str, list[TokenDelta]] = {name: [] for name in names}
    for _ in range(limit):
        if all(found[name] and found[name][-1].finish_reason for name in names):
            return found
        for delta in policy.poll(1.0):
            found.setdefault(delta.request_id, []).append(delta)
    raise AssertionError(f"not all ended: {found}")


def tokens(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


class Here:
    """The same engine in this process, for comparison."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.engine: Engine = load_engine(folder, engine_config(**changes))
        self.count = 0

    def load(self, version: int) -> None:
        self.engine.load_adapter(f"v{version}", adapter(version))

    def generate(self, version: int, prompt: Sequence[int] = PROMPT, **params: Any) -> list[int]:
        """Greedy tokens of a version; 0 is the base."""
        self.count += 1
        one = ask(f"h{self.count}", prompt, **params)
        name = f"v{version}" if version else None
        if name is not None and name not in self.engine.adapters.facts():
            self.load(version)
        self.engine.add(Submit(request_id=one.request_id, token_ids=one.token_ids, params=one.params, adapter=name))
        found: list[TokenDelta] = []
        while self.engine.has_work:
            found += self.engine.step()
        return tokens(found)


def forgetful_main(*arguments: Any) -> None:
    """An engine that keeps one namespace for all versions of a name: what a skipped cache flush is here."""
    from baltoro.engine.adapter_version import AdapterVersion
    from baltoro.llm.engine_process import engine_main

    AdapterVersion.namespace = property(lambda self: self.name)  # type: ignore[method-assign, assignment]
    engine_main(*arguments)


def broken_main(*arguments: Any) -> None:
    """An engine with a bug of its own, found in the middle of a change of versions."""
    from baltoro.engine.adapters import AdapterBook
    from baltoro.errors import LeakError
    from baltoro.llm.engine_process import engine_main

    def fail(*_: Any, **__: Any) -> None:
        raise LeakError("pages [7]: leaked")

    AdapterBook.carry = fail  # type: ignore[method-assign, assignment]
    engine_main(*arguments)
