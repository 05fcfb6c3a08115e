"""The prefix cache as clients see it: the official client, server processes on the small model of this repository.

Every answer is compared with that of a server that keeps nothing. The model's words are never looked at, so any model
with a KDA chunk of 64 and a context that is not tiny will do.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.process import ROOT, Process, serving, until

MINI = ROOT / "models" / "mini"
GRID = 64
# Room for about 40 pages of 64 tokens: a handful of prompts of some hundred tokens.
TINY = ("--memory", "1536KiB", "--max-running", "4")
RULES = "Answer in one short sentence. Numbers are written in digits, names with a capital. Never say the same twice. "
WORDS = "the cat and the dog went over the hill to see the sea, and then they came back home before it was dark; "

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MINI.is_dir(), reason="models/mini is not there")]


@contextmanager
def tiered(folder: Path) -> Iterator[Process]:
    """A server with little memory, a host tier and a disk tier."""
    tiers = ("--host-cache", "2.5MiB", "--disk-cache-dir", str(folder), "--disk-cache", "64MiB")
    with serving(MINI, *TINY, *tiers) as made:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[Process]:
    with serving(MINI, "--no-prefix-cache") as process:
        yield process


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    """Little memory, nothing behind it."""
    with serving(MINI, *TINY) as process:
        yield process


def say(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def ask(server: Process, messages: list[Any], **options: Any) -> Any:
    extra = {"ignore_eos": True, "chat_template_kwargs": {"thinking": False}} | options.pop("extra_body", {})
    fields = {"model": "mini", "temperature": 0, "max_tokens": 8} | options
    return server.openai.chat.completions.create(messages=messages, extra_body=extra, **fields)


def cached(reply: Any) -> int:
    number: int = reply.usage.prompt_tokens_details.cached_tokens
    return number


def texts(reply: Any) -> list[str]:
    return [choice.message.content for choice in reply.choices]


def generate(server: Process, ids: list[int], **fields: Any) -> Any:
    params = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True} | fields.pop("sampling_params", {})
    reply = server.http.post("/generate", json={"input_ids": ids, "sampling_params": params} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def some_ids(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(900) for i in range(count)]


def metrics(server: Process) -> dict[str, tuple[str, float]]:
    """name -> (kind, value) of what has one sample."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {s.name: (family.type, s.value) for family in families for s in family.samples}


def talk(server: Process, start: str, num_turns: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """The conversation, and the replies."""
    messages, replies = [say(RULES * 3, "system")], []
    for turn in range(num_turns):
        messages.append(say(f"{start} {turn}: {WORDS * 3}"))
        replies.append(ask(server, messages))
        messages.append(say(texts(replies[-1])[0], "assistant"))
    return messages, replies


def test_a_chat_finds_more_of_itself_at_every_turn_and_says_what_it_says_without_a_cache(
    server: Process, plain: Process
) -> None:
    messages, replies = talk(server, "turn", 4)
    expected, alone = talk(plain, "turn", 4)
    assert messages == expected
    assert [cached(reply) for reply in alone] == [0, 0, 0, 0]
    found, sizes = [cached(reply) for reply in replies], [reply.usage.prompt_tokens for reply in replies]
    assert found[0] == 0 and found == sorted(set(found)), found
    for before, now, size in zip(sizes, found[1:], sizes[1:], strict=False):
        assert (before - 1) // GRID * GRID <= now < size and now % GRID == 0


def test_forks_of_a_history_start_where_it_ends(server: Process, plain: Process) -> None:
    history, replies = talk(server, "fork", 2)
    known = (replies[-1].usage.prompt_tokens - 1) // GRID * GRID
    for question in ("What is 3 + 4?", "Say it backwards, and name the animals in it."):
        reply = ask(server, [*history, say(question)])
        assert cached(reply) >= known
        assert texts(reply) == texts(ask(plain, [*history, say(question)]))
    both = ask(server, [*history, say("And what else?")], n=2, temperature=1.0, seed=5)
    alone = ask(plain, [*history, say("And what else?")], n=2, temperature=1.0, seed=5)
    assert known <= cached(both) < both.usage.prompt_tokens == alone.usage.prompt_tokens, "counted once for all n"
    assert texts(both) == texts(alone) and both.usage.completion_tokens == 16


def test_a_stream_tells_the_same_numbers(server: Process) -> None:
    messages = [say(f"stream: {WORDS * 4}")]
    ask(server, messages)
    whole = ask(server, messages)
    *_, last = ask(server, messages, stream=True, stream_options={"include_usage": True})
    assert last.usage == whole.usage and cached(last) > 0


def test_completions_count_each_prompt_once(server: Process) -> None:
    prompts = [some_ids(seed, 150) for seed in (1, 2)]
    fields: dict[str, Any] = {"model": "mini", "max_tokens": 2, "temperature": 0, "n": 2}
    first = server.openai.completions.create(prompt=prompts, **fields)
    again = server.openai.completions.create(prompt=prompts, **fields)
    assert (cached(first), cached(again)) == (0, 2 * 128) and again.usage.prompt_tokens == 300
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    *_, last = server.openai.completions.create(
        prompt=prompts[0], stream=True, stream_options={"include_usage": True}, **fields
    )
    assert cached(last) == 128


def test_generate_tells_what_was_found_in_every_answer(server: Process) -> None:
    ids = some_ids(3, 200)
    assert generate(server, ids)["meta_info"]["cached_tokens"] == 0
    answers = generate(server, ids, sampling_params={"n": 2})
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [192, 192]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}, "stream": True}
    with server.http.stream("POST", "/generate", json=body) as reply:
        assert '"cached_tokens":192' in reply.read().decode().replace(" ", "")


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_namespaces_do_not_see_each_other(server: Process, field: str) -> None:
    ids = some_ids(4 if field == "extra_key" else 5, 150)

    def found(value: str) -> int:
        if field == "extra_key":
            number: int = generate(server, ids, extra_key=value)["meta_info"]["cached_tokens"]
            return number
        reply = server.openai.completions.create(
            model="mini", prompt=ids, max_tokens=2, temperature=0, extra_body={"cache_salt": value}
        )
        return cached(reply)

    assert [found(value) for value in ("", "a", "b", "a", "")] == [0, 0, 0, 128, 128]


def test_flush_forgets_everything_and_leaves_running_requests_alone(server: Process) -> None:
    before, running = some_ids(6, 150), some_ids(7, 150)
    generate(server, before)
    alone = generate(server, running, sampling_params={"max_new_tokens": 60})["output_ids"]
    server.http.post("/flush_cache")
    answers: list[Any] = []
    job = threading.Thread(
        target=lambda: answers.append(generate(server, running, sampling_params={"max_new_tokens": 60}))
    )
    job.start()
    until(lambda: server.stats()["num_running_reqs"] == 1)
    generate(server, before)
    assert server.http.post("/flush_cache").json() == {"success": True}
    assert generate(server, before)["meta_info"]["cached_tokens"] == 0
    job.join(120)
    assert answers[0]["output_ids"] == alone and answers[0]["meta_info"]["cached_tokens"] == 0
    server.http.post("/flush_cache")
    stats = server.stats()
    assert stats["pages_used"] == stats["slots_used"] == stats["cache_tokens"] == 0
    assert generate(server, running)["meta_info"]["cached_tokens"] == 0


def test_what_can_never_fit_is_refused_and_what_just_fits_is_served(server: Process) -> None:
    info = server.http.get("/server_info").json()["engine"]
    context = info["model"]["max_context"]
    assert context == info["memory"]["kv_tokens"], "memory is the limit here"
    steps = server.stats()["num_steps"]
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.completions.create(model="mini", prompt=some_ids(8, context), max_tokens=1)
    assert str(context) in caught.value.message and caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=str(context)):
        ask(server, [say("x " * 4 * context)])
    assert server.stats()["num_steps"] == steps, "refused before any work"
    widest = generate(server, some_ids(9, context - 1), sampling_params={"max_new_tokens": 1})
    assert widest["meta_info"]["completion_tokens"] == 1
    assert texts(ask(server, [say("hello")]))


def test_both_limits_and_the_cache_are_seen(server: Process) -> None:
    generate(server, some_ids(10, 150))
    generate(server, some_ids(10, 150))
    stats, page = server.stats(), metrics(server)
    assert stats["max_total_num_tokens"] > 0 and stats["max_total_num_slots"] > 0
    assert 0 < stats["cache_hit_rate"] < 1 and stats["cache_states"] > 0
    assert stats["kv_used_tokens"] == stats["slots_held"] == 0, "nobody runs; the cache gives way"
    assert stats["kv_evictable_tokens"] >= stats["cache_tokens"] > 0 and stats["slots_evictable"] > 0
    assert page["baltoro:full_token_usage"][0] == page["baltoro:mamba_usage"][0] == "gauge"
    assert page["baltoro:cache_hit_tokens_total"] == ("counter", stats["cache_hit_tokens"])
    kind, value = page["baltoro:cached_tokens_total"]
    assert kind == "counter" and 0 < value <= stats["cache_hit_tokens"], "a request counts once, whatever its n"
    assert page["baltoro:num_snapshots_total"] == ("counter", stats["num_snapshots"])
    assert not any(name.startswith(("baltoro:host", "baltoro:disk")) for name in page), "there are no tiers"


def fill(server: Process, first_seed: int, count: int) -> None:
    """Other prompts, so many that the device gives up what came before."""
    for seed in range(first_seed, first_seed + count):
        generate(server, some_ids(seed, 600), sampling_params={"max_new_tokens": 1})


def test_what_the_device_gave_up_is_found_on_the_host_then_on_disk_then_after_a_restart(
    plain: Process, tmp_path: Path
) -> None:
    history, _ = talk(plain, "tiers", 2)
    asked = [*history, say("How does it end?")]
    expected = texts(ask(plain, asked))
    with tiered(tmp_path) as server:
        ask(server, asked)
        known = cached(ask(server, asked))
        assert known >= 3 * GRID
        fill(server, 100, 4)
        assert server.stats()["cache_evicted_tokens"] and server.stats()["host_tokens"]
        reply, stats = ask(server, asked), server.stats()
        assert (cached(reply), texts(reply)) == (known, expected)
        assert stats["host_loaded_tokens"] >= known - GRID and stats["disk_read_total"] == 0
        fill(server, 200, 9)
        assert server.stats()["host_spilled_total"] and server.stats()["disk_written_total"]
        reply, stats = ask(server, asked), server.stats()
        assert (cached(reply), texts(reply)) == (known, expected)
        assert stats["disk_read_total"] > 0 and stats["disk_bad_total"] == 0
        page = metrics(server)
        assert page["baltoro:disk_read_total"] == ("counter", stats["disk_read_total"])
        assert page["baltoro:host_tokens"] == ("gauge", stats["host_tokens"])
        assert server.stop() == 0
    assert not list(tmp_path.glob("*.unfinished"))
    with tiered(tmp_path) as server:
        assert server.stats()["disk_entries"] > 0
        reply = ask(server, asked)
        assert (cached(reply), texts(reply)) == (known, expected)
        assert server.http.post("/flush_cache").status_code == 200
        assert server.stats()["disk_entries"] == server.stats()["host_tokens"] == 0
        assert cached(ask(server, asked)) == 0
        assert server.stop() == 0
