"""The dry run: arithmetic that is that of the real thing, and refusals that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baltoro.errors import ConfigError
from baltoro.rl.parts import engine_config
from baltoro.rl.plan import choices, make_plan
from baltoro.rl.recipe import RLConfig, host_and_port
from baltoro.rl.sync import export
from baltoro.trainer.first_adapter import first_adapter
from tests.rl.runs import MODEL, recipe

THERE: dict[str, Any] = {"is_deterministic": False, "engine": {"place": "tcp://10.0.0.2:7400"}}
IN_PROCESS: dict[str, Any] = {"is_deterministic": False, "engine": {"place": "process"}}


def plan_of(config: RLConfig):  # type: ignore[no-untyped-def]
    return make_plan(config, MODEL, engine_config(config))


def test_bytes_of_a_publication_are_those_that_are_sent() -> None:
    config = recipe(Path("x"))
    found = plan_of(config)
    tensors = export(first_adapter(MODEL, rank=3, alpha=6.0, dtype=torch.float32), MODEL)
    assert found.sync_bytes == sum(raw.data.nbytes for raw in tensors.values())
    assert found.sync_tensors == len(tensors)
    assert found.slot_bytes == 2 * found.adapter_bytes and found.optimizer_bytes == 2 * found.adapter_bytes
    assert found.attempts == 8 and found.most_tokens == 96 and found.num_bases == 2


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"optim": {"micro_tokens": 12}}, "optim.micro_tokens"),
        ({"engine": {"options": {"max_lora_rank": 2}}}, "max_lora_rank"),
        ({"engine": {"options": {"max_loras": 1}}}, "max_loras"),
        ({"engine": {"options": {"lora_experts": False}}}, "lora_experts"),
        ({"engine": {"options": {"max_context": 8}}}, "max_context"),
        ({"engine": {"sleeps": True}}, "engine.sleeps"),
        ({"engine": {"options": {"device": "cuda"}}}, "engine.place"),
        ({"partial": {"resume": "carry"}}, "engine.place process"),
        ({**IN_PROCESS, "partial": {"resume": "carry"}}, "retract_to host"),
        ({**THERE, "partial": {"resume": "carry"}}, "retract_to host"),
        ({"engine": {"place": "tcp://10.0.0.2:7400"}}, "is_deterministic needs engine.place inline"),
        ({"partial": {"share": 0.5, "max_staleness": 0}}, "max_staleness"),
        ({"partial": {"max_tokens": 4096}, "optim": {"micro_tokens": 9000}}, "max_tokens 4096"),
        ({"rollout": {"judge_threads": 2}}, "is_deterministic"),
        ({"shaping": {"tau": 2.0}, "rollout": {"pool": 4}}, "shaping.counted"),
        ({"shaping": {"overlong_buffer": 12}}, "overlong_buffer 12"),
        ({"rollout": {"thinking": True, "efforts": ["hihg"]}}, "rollout.efforts"),
        ({"tasks": [{"family": "arithmetics"}]}, "tasks.family"),
        ({"tasks": [{"family": "arithmetic", "options": {"lo": 3}}]}, "tasks.options.lo"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        plan_of(recipe(Path("x"), **changes))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"algorithm": "ppo"}, "algorithm"),
        ({"rollout": {"group_size": 1}}, "group_size"),
        ({"rollout": {"efforts": ["high"]}}, "efforts"),
        ({"policy": {"clip_lo": 0.1}}, "did you mean policy.clip_low"),
        ({"policy": {"tis_high": 2.0}}, "correct for the engine twice"),
        ({"shaping": {"tau": 2.0}}, "rollout.pool"),
        ({"tau_stages": [{"until": 0.5, "tau": 2.0}]}, "rollout.pool"),
        ({"steps": 0}, "steps"),
        ({"tasks": []}, "tasks"),
        ({"tasks": [{"family": "arithmetic", "share": 0.0}]}, "tasks.share"),
        ({"rollout": {"groups": 0}}, "rollout.groups"),
        ({"rollout": {"retries": -1}}, "rollout.retries"),
        ({"rollout": {"pool": 0}}, "rollout.pool"),
        ({"adapter": {"rank": 0}}, "adapter.rank"),
        ({"engine": {"place": "proces"}}, "engine.place must be process, inline or tcp://HOST:PORT"),
        ({"engine": {"place": "tcp://10.0.0.2"}}, "engine.place must be"),
        ({"engine": {"place": "http://10.0.0.2:7400"}}, "engine.place must be"),
        ({"optim": {"micro_tokens": 1}}, "optim.micro_tokens"),
        ({"optim": {"lr": -1.0}}, "optim.lr"),
        ({"optim": {"betas": [0.9]}}, "optim.betas"),
        ({"eval": {"tasks": 0}}, "eval.tasks"),
        ({"save": {"keep": 0}}, "save.keep"),
        ({"rollout": {"pool": 2}, "tau_stages": [{"until": 0.5, "tau": 2.0}]}, "tau_stages.until"),
        ({"rollout": {"pool": 2}, "tau_stages": [{"until": 1.0, "tau": 0.0}]}, "tau_stages.tau"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        recipe(Path("x"), **changes)


def test_an_engine_elsewhere_takes_nothing_of_this_machine() -> None:
    """One base here, whatever shares_base says; slots are over there; it may sleep."""
    here = plan_of(recipe(Path("x"), is_deterministic=False, engine={"place": "process", "shares_base": False}))
    there = plan_of(recipe(Path("x"), is_deterministic=False, engine={**THERE["engine"], "sleeps": True}))
    assert (here.num_bases, there.num_bases) == (2, 1) and there.slot_bytes == here.slot_bytes
    assert here.resident_bytes - there.resident_bytes == here.base_bytes + here.slot_bytes


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("tcp://10.0.0.2:7400", ("10.0.0.2", 7400)),
        ("tcp://gpu-host:0", ("gpu-host", 0)),
        ("tcp://[::1]:7400", ("::1", 7400)),
        ("tcp://host:port", None),
        ("tcp://host:7400/path", None),
        ("tcp://:7400", None),
        ("process", None),
    ],
)
def test_an_address_is_a_host_and_a_port(place: str, found: tuple[str, int] | None) -> None:
    assert host_and_port(place) == found


def test_a_name_stands_for_its_settings_and_single_keys_may_differ() -> None:
    config = recipe(Path("x"), algorithm="dr_grpo", policy={"clip_high": 0.4})
    assert config.policy_loss.fixed_length == 12 and config.policy_loss.clip_high == 0.4
    assert not config.advantages.is_normalised
    assert any(one.name == "aggregation" and one.value == "fixed_length 12" for one in choices(config))
