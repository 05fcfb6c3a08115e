"""An engine that `baltoro rl-engine` started, reached over TCP: a policy like that of a child process, for one trainer
after the other; who may come, what must be equal at both ends, and how the end of either is noticed."""

from __future__ import annotations

import itertools
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from baltoro.cli.rl_engine import READY
from baltoro.errors import ConfigError, TransferError, WorkerLost
from baltoro.model.build import new_model
from baltoro.model.weights import save_model
from baltoro.protocol import worker
from baltoro.rl.engine_process import EnginePolicy, PolicyOptions
from baltoro.rl.log import read_log
from baltoro.rl.policy import Policy
from baltoro.transfer.socket import call
from tests.contract.tree import ROOT
from tests.rl.engines import (
    CONFIG,
    FIELDS,
    KINDS,
    PROMPT,
    Here,
    ask,
    engine_config,
    finish,
    tensors,
    tokens,
)
from tests.rl.test_loop import PARTIAL, num_lines, verb
from tests.rl.test_publish_faults import FAULTS, Faulty

pytestmark = pytest.mark.slow
TOKEN = secrets.token_hex(32)
RECIPE = """
name = "remote"
model = "{folder}"
steps = 1
[[tasks]]
family = "arithmetic"
[engine.options]  # those of `engine_config`
max_loras = 2
max_lora_rank = 4
max_context = 400
max_running = 8
page_size = 16
hash_endpoint = 64
"""


@dataclass
class Host:
    """The command, running."""

    process: subprocess.Popen[str]
    place: str
    lines: list[str] = field(default_factory=list)

    def has_said(self, words: str) -> bool:
        return any(words in line for line in self.lines)

    def until_said(self, words: str, limit_s: float = 20.0) -> None:
        """Its log goes through a thread of ours."""
        deadline = time.monotonic() + limit_s
        while not self.has_said(words):
            assert time.monotonic() < deadline, f"{words!r} is not in {self.lines}"
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)


@contextmanager
def running_host(recipe: Path, text: str) -> Iterator[Host]:
    """`baltoro rl-engine` on two free ports of this machine; killed at the end if it still runs."""
    recipe.write_text(text)
    command = [sys.executable, "-m", "baltoro", "rl-engine", str(recipe), "--listen", "tcp://127.0.0.1:0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        host, out = Host(process, ""), process.stdout
        for line in out:
            host.lines.append(line)
            if "engine.place=" in line:
                break
        assert host.has_said(READY), host.lines
        host.place = host.lines[-1].rpartition("engine.place=")[2].strip()
        threading.Thread(target=lambda: host.lines.extend(out), daemon=True).start()
        yield host
    finally:
        process.kill()
        process.wait(20)


@pytest.fixture(autouse=True, scope="module")
def _token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BALTORO_RL_TOKEN", TOKEN)
        yield


@pytest.fixture(scope="module")
def host(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One engine for all tests, one after the other: that is what it is for. The last one kills it."""
    with running_host(tmp_path_factory.mktemp("host") / "recipe.toml", RECIPE.format(folder=folder)) as made:
        yield made


def attach(folder: Path, place: str, **options: object) -> EnginePolicy:
    chosen = {"fields": FIELDS, "expected": KINDS, "bucket_bytes": 16 << 10, "transfer_s": 20.0, "start_s": 30.0}
    return EnginePolicy(folder, engine_config(), PolicyOptions(**{**chosen, **options}), place=place)


def serves(policy: EnginePolicy, here: Here, version: int, name: str = "r") -> None:
    """It answers as this version, and says so; 0 is the base."""
    policy.submit(ask(name, (*PROMPT, 7)))
    found = finish(policy, name)[name]
    assert tokens(found) == here.generate(version, (*PROMPT, 7)) and {one.version for one in found} == {version}


# ---- what it does --------------------------------------------------------------------------------------------------
def test_it_is_a_policy_and_says_the_tokens_of_a_child(host: Host, folder: Path, here: Here) -> None:
    """Base, versions, scores, sleep and wake, pressure, stats, sampling with a seed; the base is the trainer's own."""
    with attach(folder, host.place) as remote, EnginePolicy(folder, engine_config(), child_options()) as child:
        one: Policy = remote
        answers: list[tuple[list[int], list[int], list[float]]] = []
        for policy in (one, child):
            serves(policy, here, 0)
            for version in (1, 2):
                assert policy.publish(version, tensors(version)).manifest.version == version == policy.version
                serves(policy, here, version)
            policy.sleep()
            policy.sleep()
            policy.submit(ask("late", temperature=1.0, seed=5, max_tokens=40))
            look = policy.pressure()
            assert (look.active, look.queued) == (0, 1)
            policy.publish(3, tensors(3))
            policy.wake()
            late = finish(policy, "late")["late"]
            answers.append((tokens(late), [one.version for one in late], policy.score(PROMPT, (7, 8, 9))))
            assert policy.stats()["num_running_reqs"] == 0
        assert answers[0][:2] == answers[1][:2] and len(set(answers[0][0])) > 5
        assert answers[0][2] == pytest.approx(answers[1][2], abs=1e-6)
        assert "base" not in remote.info and not any(p.requires_grad for p in remote.trainer_model().parameters())


def child_options() -> PolicyOptions:
    return PolicyOptions(fields=FIELDS, expected=KINDS, is_base_shared=False)


@pytest.mark.parametrize("name", ["a chunk is dropped", "a byte is flipped"])
def test_a_fault_of_a_publication_is_caught(host: Host, folder: Path, here: Here, name: str) -> None:
    fault = FAULTS[name]
    assert fault.change is not None
    with attach(folder, host.place) as policy:
        policy.publish(1, tensors(1))
        with pytest.MonkeyPatch.context() as patch:
            connect, change = policy._connect, fault.change(2)
            patch.setattr(policy, "_connect", lambda: Faulty(connect(), change))
            with pytest.raises(TransferError) as caught:
                policy.publish(2, tensors(2))
        assert caught.value.check == fault.check
        serves(policy, here, 1)
        policy.publish(2, tensors(2))
        serves(policy, here, 2, "again")


# ---- who comes after whom ------------------------------------------------------------------------------------------
def test_one_trainer_at_a_time_and_the_next_when_it_has_left(host: Host, folder: Path, here: Here) -> None:
    """The next one counts from 1 again, begins at the base, may send what serves already, and hears nothing of what the
    one before had asked for under the same names."""
    with attach(folder, host.place) as first:
        first.publish(1, tensors(1))
        with pytest.raises(ConfigError, match="one at a time"):
            attach(folder, host.place)
        serves(first, here, 1)
        first.submit(ask("r", max_tokens=300))
        first.sleep()
    with attach(folder, host.place) as second:
        assert second.version == 0 and second._before >= 1
        assert second.stats()["num_running_reqs"] == 0 and second.pressure().queued == 0
        serves(second, here, 0)
        second.publish(1, tensors(1))
        serves(second, here, 1)
        with pytest.raises(TransferError, match="version"):
            second.publish(0, tensors(2))


TRAINER = """
import sys
from pathlib import Path
from tests.rl.engines import ask, tensors
from tests.rl.test_remote_engine import attach

policy = attach(Path(sys.argv[1]), sys.argv[2])
policy.publish(5, tensors(5))
policy.submit(ask("r", max_tokens=380))
print("has begun", flush=True)
sys.stdin.readline()
"""


def test_a_trainer_that_is_killed_makes_room_for_the_next(host: Host, folder: Path, here: Here) -> None:
    """A run that goes on from a checkpoint has numbers below those that were served: they are accepted."""
    command = [sys.executable, "-c", TRAINER, str(folder), host.place]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None and killed.stdout.readline() == "has begun\n"
    killed.kill()
    killed.communicate()
    began = time.monotonic()
    with attach(folder, host.place) as policy:
        assert time.monotonic() - began < 10.0 and policy.pressure().active == 0
        policy.publish(4, tensors(4))
        serves(policy, here, 4)
        assert policy.version == 4 and policy._serving() == 4


# ---- who may come --------------------------------------------------------------------------------------------------
def test_who_has_another_token_is_turned_away(host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    monkeypatch.setenv("BALTORO_RL_TOKEN", secrets.token_hex(32))
    with pytest.raises(WorkerLost, match="BALTORO_RL_TOKEN must be the same"):
        attach(folder, host.place)
    assert time.monotonic() - began < 5.0
    for token, why in (("", "is not set"), ("short", "at least 32"), ("@/no/such/file", "does not exist")):
        monkeypatch.setenv("BALTORO_RL_TOKEN", token)
        with pytest.raises(ConfigError, match=why):
            attach(folder, host.place)


def test_what_is_asked_and_said_cannot_be_read_on_the_way(host: Host, folder: Path, here: Here) -> None:
    """A message has names of its fields in it, and so it would show."""
    assert b"max_tokens" in msgspec.msgpack.encode(ask("r"))
    with relay(host.place) as place, attach(folder, place.address) as policy:
        serves(policy, here, 0)
        assert len(place.seen) > 2000 and not any(word in place.seen for word in (b"max_tokens", b"token_ids", b"key"))


def test_a_stranger_at_the_door_of_publications_changes_nothing(host: Host, folder: Path, here: Here) -> None:
    """Without the key of this trainer: not a word is read, and the next publication goes through."""
    with attach(folder, host.place) as policy:
        policy.publish(1, tensors(1))
        with pytest.raises(TransferError, match=r"forged|peer"):
            call("127.0.0.1", policy.info["publish"]["port"], b"\0" * 32)
        policy.publish(2, tensors(2))
        serves(policy, here, 2)
    host.until_said("a sender was turned away why=forged")


def test_another_base_other_options_another_version_are_refused_with_the_way_out(
    host: Host, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(new_model(CONFIG, std=0.15, seed=4, decay="slow"), tmp_path)
    with pytest.raises(ConfigError, match="two checkpoints; copy one of the folders"):
        attach(tmp_path, host.place)
    for changes, why in (
        ({"expert_inputs": "mxfp8"}, r"expert_inputs is 'mxfp8' here and 'plain' at tcp"),
        ({"dtype": "bfloat16"}, "computes in float32, the trainer here in bfloat16"),
    ):
        with pytest.raises(ConfigError, match=why):
            EnginePolicy(folder, engine_config(**changes), child_options(), place=host.place)
    EnginePolicy(folder, engine_config(memory_bytes=1 << 22), child_options(), place=host.place).close()
    monkeypatch.setattr("baltoro.rl.engine_process.Attach", lambda **fields: worker.Attach(version=99, **fields))
    with pytest.raises(ConfigError, match="wire version 1, the trainer 99: run one version"):
        attach(folder, host.place)


# ---- ends ----------------------------------------------------------------------------------------------------------
def lost_within(policy: EnginePolicy, limit_s: float, why: str) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=why):
        while time.monotonic() - began < 60.0:
            policy.poll(5.0)
    assert time.monotonic() - began < limit_s
    for ask_again in (policy.pressure, policy.sleep, lambda: policy.score((1,), (2,))):
        with pytest.raises(WorkerLost, match=why):
            ask_again()
    policy.close()
    policy.close()


def test_an_engine_that_is_killed_is_noticed_at_once(host: Host, folder: Path) -> None:
    """And one that is not there, likewise."""
    policy = attach(folder, host.place)
    policy.submit(ask("a", max_tokens=300))
    host.process.kill()
    lost_within(policy, 3.0, "the connection to tcp.* ended")
    host.process.wait(10)
    with pytest.raises(WorkerLost, match=r"nobody listens at .*baltoro rl-engine"):
        attach(folder, host.place)


@pytest.mark.nightly
def test_an_engine_that_is_stopped_says_so_and_one_that_falls_silent_is_lost(folder: Path, tmp_path: Path) -> None:
    """SIGINT: a last word. SIGSTOP, as a network that is cut: no answer to a heartbeat. The trainer's end alike."""
    file, text = tmp_path / "recipe.toml", RECIPE.format(folder=folder)
    with running_host(file, text) as host:
        policy = attach(folder, host.place)
        host.process.send_signal(signal.SIGINT)
        lost_within(policy, 5.0, "it was stopped")
        assert host.process.wait(20) == 0
    with running_host(file, text) as host:
        with relay(host.place) as place:
            policy = attach(folder, place.address)
            place.is_cut.set()
            lost_within(policy, 12.0, "silent for 8 s")
            host.until_said("the trainer has left why=its connection ended")
        attach(folder, host.place).close()
        policy = attach(folder, host.place)
        host.process.send_signal(signal.SIGSTOP)
        lost_within(policy, 12.0, "silent for 8 s")


@pytest.mark.nightly
def test_a_run_that_is_killed_goes_on_against_the_same_engine(tiny_folder: Path, tmp_path: Path) -> None:
    """kill -9 of `baltoro rl` after a checkpoint; then `--resume`, whose versions lie below what was served."""
    file, out = tmp_path / "recipe.toml", tmp_path / "run"
    with running_host(file, PARTIAL.format(folder=tiny_folder)) as host:
        there = [word for one in (f"engine.place={host.place}", "is_deterministic=false") for word in ("--set", one)]
        with verb(file, out, *there) as killed:
            while num_lines(out) < 4:  # step 3 is in the log, step 2 in the checkpoint
                assert killed.poll() is None
                with suppress(subprocess.TimeoutExpired):
                    killed.wait(0.01)
            killed.kill()
        host.until_said("the trainer has left why=its connection ended")
        assert verb(file, out, *there, "--resume").wait(200) == 0
        lines = read_log(out)
        assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
        for before, line in itertools.pairwise(lines):
            assert line["version"] == before["version"] + ("sync" in line), "numbers are the run's own, without a gap"
        assert lines[-1]["version"] > 5
        assert all((line.get("k3") or 0.0) < 1e-8 for line in lines[1:])  # none where a step counted no token
        host.until_said("the trainer has left why=it said so")
        host.process.terminate()
        assert host.process.wait(20) == 0


class Relay:
    """A network between trainer and engine that can be cut: then nothing passes, and nobody is told."""

    def __init__(self, place: str) -> None:
        self.is_cut = threading.Event()
        self.seen = bytearray()  # all that passed, in both directions
        self._there = place.removeprefix("tcp://").split(":")
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._carry, daemon=True).start()

    def close(self) -> None:
        self._door.close()

    def _carry(self) -> None:
        near, _ = self._door.accept()
        far = socket.create_connection((self._there[0], int(self._there[1])))
        while not self.is_cut.is_set():
            for end in select.select([near, far], [], [], 0.05)[0]:
                data = end.recv(65536)
                self.seen += data
                (far if end is near else near).sendall(data)
                if not data:
                    near.close()
                    far.close()
                    return
        with closing(near), closing(far):
            threading.Event().wait(30.0)


def relay(place: str) -> closing[Relay]:
    return closing(Relay(place))
