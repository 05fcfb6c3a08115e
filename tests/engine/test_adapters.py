"""The book of adapters: versions, users, slots. Weights are never looked at here."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from baltoro.engine.adapter_version import AdapterVersion
from baltoro.engine.adapters import AdapterBook, parse_modules
from baltoro.engine.config import EngineConfig
from baltoro.engine.request import Request
from baltoro.errors import ConfigError, LeakError, RequestError
from baltoro.model.adapter import Adapter
from baltoro.protocol.sampling import SamplingParams
from tests.model.adapters import random_adapter
from tests.tiny import tiny_kimi_linear


def weights(seed: int = 0) -> Adapter:
    return random_adapter(
        tiny_kimi_linear(), 1, seed=seed, wants=lambda site: site.module.endswith("0.self_attn.o_proj")
    )


def request(at: int, adapter: AdapterVersion | None) -> Request:
    fields: dict[str, Any] = {"request_id": f"r{at}", "index": 0, "arrival": at, "priority": 0, "seed": 0}
    params = SamplingParams()
    return Request(
        **fields,
        params=params,
        tokens=array("q", [1]),
        num_prompt=1,
        max_tokens=4,
        stop_ids=frozenset(),
        adapter=adapter,
    )


def test_every_load_is_a_version_and_a_namespace_of_its_own() -> None:
    book = AdapterBook(2)
    first, again, other = book.load("a", weights(), ""), book.load("a", weights(), ""), book.load("b", weights(1), "")
    assert first.digest == again.digest != other.digest
    assert len({first.namespace, again.namespace, other.namespace}) == 3
    assert first.number < again.number < other.number
    assert first.is_gone and first.weights is None
    assert book.select("a") is again


def test_a_version_stays_until_its_last_user_has_ended() -> None:
    book = AdapterBook(1)
    old = book.load("a", weights(), "")
    user, base = request(0, book.select("a")), request(1, None)
    book.join([user, base])
    book.enter(user, [])
    new = book.load("a", weights(1), "")
    assert not old.is_gone and old.weights is not None and user.adapter is old
    late = request(2, book.select("a"))
    book.join([late])
    assert late.adapter is new and not list(book.ready([late], [user]))
    book.audit([user, base, late], [user])
    book.leave(user)
    assert old.is_gone and old.weights is None
    assert list(book.ready([late], [])) == [late]
    assert book.unload("a") is new and not new.is_gone
    with pytest.raises(RequestError, match="none is loaded"):
        book.select("a")
    with pytest.raises(RequestError, match="not loaded"):
        book.unload("a")
    book.leave(late)
    book.leave(base)
    assert new.is_gone


def test_slots_are_given_to_who_runs_and_reused_longest_unused_first() -> None:
    book = AdapterBook(2)
    a, b, c = (book.load(name, weights(n), "") for n, name in enumerate("abc"))
    users = [request(n, version) for n, version in enumerate((a, b, c, a))]
    book.join(users)
    book.enter(users[0], [])
    book.enter(users[1], users[:1])
    book.enter(users[3], users[:2])
    assert [u.adapter_slot for u in users] == [1, 2, 0, 1]
    assert [i.slot for i in book.take_installs()] == [1, 2] and not book.take_installs()
    assert not list(book.ready([users[2]], [users[0], users[1], users[3]]))
    book.enter(users[2], [users[0]])  # b runs no more
    assert users[2].adapter_slot == 2 and [i.weights for i in book.take_installs()] == [c.weights]
    book.enter(users[1], [users[2]])  # b again, now where a was
    assert users[1].adapter_slot == 1


def test_who_waits_for_a_slot_is_passed_by_the_base_only() -> None:
    book = AdapterBook(1)
    a, b = book.load("a", weights(), ""), book.load("b", weights(1), "")
    running = [request(0, a)]
    line = [request(1, None), request(2, b), request(3, a), request(4, None)]
    assert [r.arrival for r in book.ready(line, running)] == [1, 4]
    assert [r.arrival for r in book.ready([line[2], *line[:2]], running)] == [3, 1]


def test_a_dropped_host_copy_is_refused_though_its_slot_may_hold_it() -> None:
    book = AdapterBook(2, max_loaded=2)
    a = book.load("a", weights(), "")
    user = request(0, a)
    book.join([user])
    book.enter(user, [])
    book.load("b", weights(1), "")
    book.load("c", weights(2), "")
    assert a.weights is not None, "in use"
    with pytest.raises(RequestError, match="no longer in host memory"):
        book.select("b")
    with pytest.raises(RequestError, match="running requests"):
        book.drop_host_copy("a")
    book.leave(user)
    book.drop_host_copy("a")
    with pytest.raises(RequestError, match="load it again"):
        book.select("a")
    assert book.facts()["a"]["is_on_host"] is False  # type: ignore[index]
    assert book.load("a", weights(), "").weights is not None


def test_books_that_do_not_add_up_are_found() -> None:
    book = AdapterBook(1)
    user = request(0, book.load("a", weights(), ""))
    with pytest.raises(LeakError, match="counts 0 users, there are 1"):
        book.audit([user], [])
    book.join([user])
    with pytest.raises(LeakError, match="adapter slot 0"):
        book.audit([user], [user])


@pytest.mark.parametrize("name", ["", "a:b", " a", "a\n", "x" * 257])
def test_names_that_cannot_be_selected_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match="no name"):
        AdapterBook(1).load(name, weights(), "")


def test_options_are_checked() -> None:
    assert parse_modules(["a=x/y", "b=z=1"]) == [("a", "x/y"), ("b", "z=1")]
    for wrong in (["a"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(ConfigError, match="lora-modules"):
            parse_modules(wrong)
    with pytest.raises(ConfigError, match="give max_loras"):
        EngineConfig(lora_modules=("a=b",))
    with pytest.raises(ConfigError, match="max_lora_rank"):
        EngineConfig(max_lora_rank=0)
    with pytest.raises(ConfigError, match="--max-loras"):
        AdapterBook().load("a", weights(), "")
