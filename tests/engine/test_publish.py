"""Versions that arrive while requests run: kept or carried over, never mixed up in the cache, never in mid-step."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.engine.gate import Gate
from baltoro.errors import LeakError, RequestError, TransferError
from baltoro.model.adapter import Adapter
from baltoro.model.build import new_model
from baltoro.model.decoder import K3Model
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from tests.engine.stub import tokens_of
from tests.model.adapters import random_adapter
from tests.tiny import tiny_k3

CONFIG = tiny_k3(vision=None, media_token_id=None, num_layers=4, mla_layers=(3,))
PROMPT = tuple(range(1, 60))
NUM_TOKENS = 30
LAST = "model.layers.3.block_sparse_moe."  # behind every KV row and state: these do not depend on its adapter
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"overlap": False},
    "overlap": {"overlap": True},
    "no cache": {"prefix_cache": False},
    "one slot": {"max_loras": 1, "overlap": True},
    "recomputed": {"retract_every": 4},
    "backed up": {"retract_every": 4, "retract_to": "host", "host_cache_bytes": 1 << 20, "overlap": True},
}


@functools.cache
def base() -> K3Model:
    return new_model(CONFIG, dtype=torch.float64, seed=3, std=0.1, decay="slow")


@functools.cache
def adapter(version: int, is_last: bool = False) -> Adapter:
    wants = (lambda site: site.module.startswith(LAST)) if is_last else (lambda site: True)
    return random_adapter(CONFIG, 2, seed=version, std=0.4 if is_last else 0.1, wants=wants)


def make(**options: Any) -> Engine:
    defaults: dict[str, Any] = {"page_size": 16, "max_running": 6, "max_context": 200, "is_poisoned": True}
    defaults |= {"hash_endpoint": 64, "track_interval": 64, "max_loras": 2, "max_lora_rank": 4, "dtype": "float64"}
    return Engine(copy.deepcopy(base()).merge(), EngineConfig(**(defaults | options)), eos_ids=())


def publish(engine: Engine, version: int, *, is_carrying: bool, is_last: bool = False) -> None:
    weights = adapter(version, is_last)
    engine.publish("p", version, weights, weights.digest(), is_carrying=is_carrying)
    engine.audit()


def add(engine: Engine, name: str, prompt: tuple[int, ...] = PROMPT, *, is_base: bool = False, **fields: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=fields.pop("max_tokens", NUM_TOKENS))
    engine.add(Submit(request_id=name, token_ids=prompt, params=params, adapter=None if is_base else "p", **fields))


def steps(engine: Engine, count: int | None = None) -> list[TokenDelta]:
    found: list[TokenDelta] = []
    while engine.has_work and (count is None or count > 0):
        found += engine.step()
        engine.audit()
        count = None if count is None else count - 1
    return found


def alone(version: int, prompt: tuple[int, ...], num_tokens: int, is_last: bool = False) -> list[int]:
    engine = make(prefix_cache=False)
    if version:
        publish(engine, version, is_carrying=False, is_last=is_last)
    add(engine, "r", prompt, max_tokens=num_tokens, is_base=not version)
    return tokens_of(steps(engine))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("start", [0, 1])
def test_a_carried_request_goes_on_as_if_it_had_just_come(row: str, start: int) -> None:
    """With adapters that no KV row or state depends on, going on with the new version is what a new request with the
    same tokens would do: an oracle for every token after the change."""
    engine = make(**ROWS[row])
    if start:
        publish(engine, 1, is_carrying=True, is_last=True)
    add(engine, "r", is_base=not start)
    before = steps(engine, 12)
    publish(engine, 2, is_carrying=True, is_last=True)
    deltas = [*before, *steps(engine)]
    versions = [delta.version for delta in deltas if delta.token_ids]
    told, first = tokens_of(deltas), versions.index(2)
    assert versions == [start] * first + [2] * (NUM_TOKENS - first) and first >= 5
    assert told[:first] == alone(start, PROMPT, first, True)
    rest = alone(2, (*PROMPT, *told[:first]), NUM_TOKENS - first, True)
    assert told[first:] == rest != alone(start, (*PROMPT, *told[:first]), NUM_TOKENS - first, True)
    assert engine.stats()["num_aborted_reqs"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_nothing_that_a_carried_request_computed_is_found_by_others(row: str) -> None:
    """Its KV is of two versions. A later request of the new version with the same tokens finds none of it, and answers
    as it does alone; the carried one finds its own after a retraction."""
    engine = make(**ROWS[row])
    publish(engine, 1, is_carrying=True)
    add(engine, "r", max_tokens=60)
    deltas = steps(engine, 12)
    publish(engine, 2, is_carrying=True)
    deltas += steps(engine)
    again = (*PROMPT, *tokens_of(deltas))
    for name, cached in (("first", 0), ("second", 64 if ROWS[row].get("prefix_cache", True) else 0)):
        add(engine, name, again, max_tokens=5)
        found = steps(engine)
        assert found[0].num_cached_tokens == cached
        assert tokens_of(found) == alone(2, again, 5)


def test_who_waits_has_the_new_version_from_its_first_token() -> None:
    engine = make(max_running=1)
    publish(engine, 1, is_carrying=True)
    add(engine, "r", PROMPT[:9])
    add(engine, "late", PROMPT[:9])
    deltas = steps(engine, 4)
    publish(engine, 2, is_carrying=True)
    deltas += steps(engine)
    late = [delta for delta in deltas if delta.request_id == "late"]
    assert {delta.version for delta in late} == {2}
    assert tokens_of(late) == alone(2, PROMPT[:9], NUM_TOKENS)


def test_siblings_are_carried_together() -> None:
    engine = make()
    publish(engine, 1, is_carrying=True, is_last=True)
    add(engine, "r", n=3)
    deltas = steps(engine, 8)
    publish(engine, 2, is_carrying=True, is_last=True)
    deltas += steps(engine)
    told = {index: [d for d in deltas if d.index == index] for index in range(3)}
    assert len({tuple(tokens_of(each)) for each in told.values()}) == 1
    assert {delta.version for delta in deltas} == {1, 2}


def test_the_base_stays_where_no_slot_is_to_be_had() -> None:
    """Every slot is held by other adapters: requests of the base end as they began."""
    engine = make(max_loras=1)
    engine.load_adapter("other", adapter(5))
    add(engine, "base", PROMPT[:9], is_base=True)
    engine.add(
        Submit(request_id="o", token_ids=PROMPT[:9], params=SamplingParams(max_tokens=NUM_TOKENS), adapter="other")
    )
    steps(engine, 3)
    publish(engine, 7, is_carrying=True)
    deltas = steps(engine)
    assert {d.version for d in deltas if d.request_id == "base"} == {0}


def test_a_number_that_is_not_newer_and_a_namespace_that_was_given_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    publish(engine, 3, is_carrying=False)
    for number in (3, 2):
        with pytest.raises(RequestError, match="not newer than 3"):
            engine.publish("p", number, adapter(4), "x", is_carrying=False)
    monkeypatch.setattr("baltoro.engine.adapter_version.AdapterVersion.namespace", property(lambda self: self.name))
    publish(engine, 4, is_carrying=False)
    with pytest.raises(RequestError, match="namespace of its own"):
        publish(engine, 5, is_carrying=False)
    assert engine.adapters.latest("p").number == 4  # type: ignore[union-attr]


# ---- the gate --------------------------------------------------------------------------------------------------------
def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except (TransferError, RequestError) as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_a_job_is_done_by_the_thread_that_opens_the_gate() -> None:
    gate = Gate()
    thread, found = in_thread(lambda: gate.call(threading.get_ident, timeout_s=10))
    while not gate.run_due():
        pass
    thread.join()
    assert found == [threading.get_ident()]
    gate.close()


def test_a_job_that_was_given_up_is_never_done() -> None:
    gate, done = Gate(), list[int]()
    thread, found = in_thread(lambda: gate.call(lambda: done.append(1), timeout_s=0.01))
    thread.join()
    assert found[0].check == "timeout" and gate.run_due() == 1 and not done
    gate.close()
    thread, found = in_thread(lambda: gate.call(lambda: done.append(1), timeout_s=10))
    thread.join()
    assert found[0].check == "peer" and not done


@pytest.mark.parametrize("error", [RequestError("no"), LeakError("ours")])
def test_a_job_that_fails_is_told_to_who_waits(error: Exception) -> None:
    """What is the caller's fault stays with it; our own bug also stops the engine."""
    gate = Gate()

    def fail() -> None:
        raise error

    thread, found = in_thread(lambda: gate.call(fail, timeout_s=10))
    for _ in range(10**7):
        try:
            if gate.run_due():
                break
        except LeakError as raised:
            assert raised is error
            break
    thread.join()
    assert found[0] is error if isinstance(error, RequestError) else found[0].check == "install"
    gate.close()
