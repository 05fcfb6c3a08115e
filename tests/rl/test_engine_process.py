"""A policy whose engine is another process: versions, requests that go on, sleep, scoring, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baltoro.errors import ConfigError, TransferError, WorkerLost
from baltoro.model.context import train_context
from baltoro.model.lora import add_adapters
from baltoro.observe import resident_bytes
from baltoro.rl.engine_process import EnginePolicy
from baltoro.rl.policy import Policy
from baltoro.transfer.tensors import to_raws
from tests.model.adapters import without_b
from tests.rl.engines import (
    CONFIG,
    PROMPT,
    Here,
    adapter,
    ask,
    engine_config,
    finish,
    start,
    tensors,
    tokens,
)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[EnginePolicy]:
    """One engine for all tests that leave it as it was; versions go up from test to test."""
    with start(folder) as made:
        yield made


def next_version(policy: EnginePolicy) -> int:
    return policy.version + 1


def test_it_is_a_policy(policy: EnginePolicy) -> None:
    one: Policy = policy
    assert one.version == policy.version


def test_base_zero_adapter_and_versions_in_turn(folder: Path, here: Here) -> None:
    """Version 0 is the base; B = 0 at version 1 changes no token; every version answers as itself, without an old
    prefix, and says who it is."""
    prompt = tuple(range(70))
    with start(folder) as policy:
        zero = to_raws(without_b(adapter(1)).tensors(CONFIG))
        for version, content in ((0, None), (1, zero), (2, tensors(2)), (7, tensors(7))):
            if content is not None:
                assert policy.publish(version, content).manifest.version == version
            for again in (False, True):
                policy.submit(ask(f"r{version}{again}", prompt))
                found = finish(policy, f"r{version}{again}")[f"r{version}{again}"]
                assert tokens(found) == here.generate(0 if version == 1 else version, prompt)
                assert {delta.version for delta in found} == {version} == {policy.version}
                assert found[0].num_cached_tokens == (64 if again else 0)


def test_several_at_once_are_each_as_alone(policy: EnginePolicy, here: Here) -> None:
    version = next_version(policy)
    policy.publish(version, tensors(version))
    prompts = {f"m{n}": tuple(range(n, 2 * n + 3)) for n in range(6)}
    for name, prompt in prompts.items():
        policy.submit(ask(name, prompt))
    found = finish(policy, *prompts)
    for name, prompt in prompts.items():
        assert tokens(found[name]) == here.generate(version, prompt)


def running(policy: EnginePolicy, *names: str, **params: object) -> dict[str, list]:  # type: ignore[type-arg]
    """Long requests that have begun to answer."""
    for name in names:
        policy.submit(ask(name, (*PROMPT, len(name)), **{"max_tokens": 60, **params}))
    found: dict[str, list] = {name: [] for name in names}  # type: ignore[type-arg]
    while not all(found.values()):
        for delta in policy.poll(5.0):
            found[delta.request_id].append(delta)
    return found


@pytest.mark.parametrize(
    ("overlap", "mode"),
    [
        (False, "keep"),
        (True, "carry"),
        pytest.param(False, "carry", marks=pytest.mark.nightly),
        pytest.param(True, "keep", marks=pytest.mark.nightly),
    ],
)
def test_an_update_aborts_nothing(folder: Path, here: Here, mode: str, overlap: bool) -> None:
    """Kept: the old version to the end. Carried: from some token on the new one."""
    with start(folder, config=engine_config(overlap=overlap, max_loras=3), running=mode) as policy:
        policy.publish(1, tensors(1))
        begun = running(policy, "a", "bb")
        policy.publish(2, tensors(2))
        rest = finish(policy, "a", "bb")
        for name in ("a", "bb"):
            deltas = [*begun[name], *rest[name]]
            versions = [delta.version for delta in deltas if delta.token_ids]
            assert deltas[-1].finish_reason == "length" and len(tokens(deltas)) == 60
            old = here.generate(1, (*PROMPT, len(name)), max_tokens=60)
            if mode == "keep":
                assert set(versions) == {1} and tokens(deltas) == old
            else:
                first = versions.index(2)
                assert versions == [1] * first + [2] * (60 - first) and 0 < first < 60
                assert tokens(deltas)[:first] == old[:first] and tokens(deltas) != old
        policy.submit(ask("c", (*PROMPT, 1)))
        assert tokens(finish(policy, "c")["c"]) == here.generate(2, (*PROMPT, 1))
        numbers = policy.stats()
        assert numbers["num_aborted_reqs"] == 0 and numbers["num_retracted_reqs"] == 0


def test_scores_are_those_of_the_trainer_on_the_same_bytes(policy: EnginePolicy) -> None:
    version = next_version(policy)
    policy.publish(version, tensors(version))
    model = policy.trainer_model()
    bank = add_adapters(model, 1, 2)
    bank.install(1, adapter(version))
    output = (7, 8, 9, 10)
    ids = torch.tensor((*PROMPT, *output))
    with torch.inference_mode():
        logits = model(train_context(ids, (len(ids),), adapters=(1,)))
    logps = torch.log_softmax(logits.double(), -1)[torch.arange(7, 11), ids[8:]]
    assert policy.score(PROMPT, output) == pytest.approx(logps.tolist(), abs=1e-5)
    assert policy.score(PROMPT, output) != pytest.approx(policy.score(PROMPT, (7, 8, 9, 11)), abs=1e-5)


def test_an_abort_and_a_look(policy: EnginePolicy) -> None:
    begun = running(policy, "gone", max_tokens=300)
    assert begun["gone"]
    look = policy.pressure()
    assert (look.active, look.queued, look.retractions) == (1, 0, 0) and 0 < look.pool_share < 1
    policy.abort("gone")
    assert finish(policy, "gone")["gone"][-1].finish_reason == "abort"
    assert policy.pressure().active == 0 and policy.poll(0.0) == []


def test_what_cannot_be_is_refused(policy: EnginePolicy, folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_loras"):
        start(folder, config=engine_config(max_loras=0))
    with pytest.raises(ConfigError, match="device cuda:99"):
        start(folder, config=engine_config(device="cuda:99"))
    policy.submit(ask("bad", (1, 10**6)))
    assert finish(policy, "bad")["bad"][-1].error_status == 400


# ---- sleep ---------------------------------------------------------------------------------------------------------
def test_asleep_the_pool_is_given_back_and_everything_goes_on_afterwards(folder: Path, here: Here) -> None:
    """Memory drops and comes back; what ran, what came meanwhile and what was published meanwhile are all right."""
    size = 256 << 20  # the arena a fifth of the process: what else it takes or leaves meanwhile is not 5 % of it
    config = engine_config(memory_bytes=size, num_slots=8, num_pages=size // 4 // 16 // 80, is_poisoned=True)
    with start(folder, config=config) as policy:
        policy.publish(1, tensors(1))
        arena = policy.info["memory"]["arena_bytes"]
        for cycle in range(3):
            begun = running(policy, "a", "bb")
            awake = resident_bytes(policy.process_id)
            policy.sleep()
            asleep = resident_bytes(policy.process_id)
            assert policy.given_back["given_back_bytes"] == arena > 20 << 20
            assert awake - asleep > 0.95 * arena, cycle
            policy.sleep()
            with pytest.raises(ConfigError, match="sleeps"):
                policy.score(PROMPT, (1,))
            policy.submit(ask("late"))
            look = policy.pressure()
            assert (look.active, look.queued, look.retractions) == (0, 3, 0)
            assert all(delta.request_id != "late" for delta in collect(policy, begun))
            if cycle == 1:
                policy.publish(2, tensors(2))
            policy.wake()
            policy.wake()
            rest = finish(policy, "a", "bb", "late")
            version = 2 if cycle == 2 else 1
            for name in ("a", "bb"):
                assert tokens([*begun[name], *rest[name]]) == here.generate(
                    version, (*PROMPT, len(name)), max_tokens=60
                )
            assert tokens(rest["late"]) == here.generate(version, PROMPT)
            assert abs(resident_bytes(policy.process_id) - awake) < 0.1 * arena


def collect(policy: EnginePolicy, begun: dict[str, list]) -> list:  # type: ignore[type-arg]
    """What was told before it slept, noted where it belongs."""
    found = policy.poll(0.05)
    for delta in found:
        if delta.request_id in begun:
            begun[delta.request_id].append(delta)
    return found


# ---- ends ----------------------------------------------------------------------------------------------------------
def test_an_engine_that_is_killed_is_noticed_by_every_call(folder: Path) -> None:
    policy = start(folder)
    place = policy.folder
    running(policy, "a", max_tokens=300)
    os.kill(policy.process_id, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="exit code -9"):
        for _ in range(1000):
            policy.poll(5.0)
    for call in (policy.pressure, policy.sleep, lambda: policy.submit(ask("b")), lambda: policy.score((1,), (2,))):
        with pytest.raises(WorkerLost, match="exit code -9"):
            call()
    with pytest.raises((WorkerLost, TransferError)):
        policy.publish(1, tensors(1))
    policy.close()
    policy.close()
    assert not place.exists()


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match=r"config\.json"):
        start(tmp_path)


DRIVER = """
import sys
from pathlib import Path
from tests.rl.engines import start
if __name__ == "__main__":
    policy = start(Path(sys.argv[1]))
    print(policy.process_id, policy.folder, flush=True)
    sys.stdin.readline()
"""


def test_a_driver_that_is_killed_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(folder)]
    driver = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    process_id, place = driver.stdout.readline().split()
    descriptor = os.pidfd_open(int(process_id))
    assert Path(place, "base").exists()
    driver.kill()
    driver.communicate()
    import select

    assert select.select([descriptor], [], [], 20)[0], "the engine is still there"
    os.close(descriptor)
    assert not Path(place).exists()
