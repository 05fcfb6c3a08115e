from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baltoro.errors import RequestError, WorkerLost
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from baltoro.server.client import WorkerClient
from tests.server.fake import FakeEngine, Reply


def submit(request_id: str, n: int = 1) -> Submit:
    return Submit(request_id=request_id, token_ids=(1, 2, 3), params=SamplingParams(), n=n)


def script(request: Submit, index: int) -> Reply:
    if request.request_id.startswith("stall"):
        return Reply([[1], [2]], stall_at=1)
    return Reply([[10 * index + step] for step in range(3)])


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[WorkerClient, FakeEngine]]:
    address = f"ipc://{tmp_path}/engine"
    client = WorkerClient(address, call_timeout_s=0.2)
    engine = FakeEngine(address, script)
    client.start()
    engine.start()
    await client.ready()
    yield client, engine
    engine.close()
    client.close()


Pair = tuple[WorkerClient, FakeEngine]


async def test_deltas_come_in_order_and_each_request_gets_its_own(pair: Pair) -> None:
    client, _ = pair

    async def read(request_id: str, n: int) -> list[tuple[str, int, tuple[int, ...]]]:
        return [(d.request_id, d.index, d.token_ids) async for d in client.submit([submit(request_id, n)])]

    one, two = await asyncio.gather(read("a", 1), read("b", 2))
    assert [ids for _, _, ids in one] == [(0,), (1,), (2,)]
    assert {r for r, _, _ in two} == {"b"}
    assert [ids for _, index, ids in two if index == 1] == [(10,), (11,), (12,)]
    assert client.running == ()


async def test_several_requests_share_a_stream_that_ends_with_the_last(pair: Pair) -> None:
    client, _ = pair
    seen = [d.request_id async for d in client.submit([submit("a"), submit("b", 2)])]
    assert sorted(seen) == ["a"] * 3 + ["b"] * 6
    assert client.running == ()


async def test_leaving_a_stream_early_aborts_its_request(pair: Pair) -> None:
    client, engine = pair
    with client.submit([submit("stall")]) as stream:
        assert (await anext(stream)).token_ids == (1,)
    await engine.until(lambda: engine.aborted == ["stall"])
    assert client.running == ()


async def test_a_finished_stream_is_not_aborted(pair: Pair) -> None:
    client, engine = pair
    with client.submit([submit("a")]) as stream:
        assert len([d async for d in stream]) == 3
    await client.query()
    assert engine.aborted == []


async def test_an_abort_ends_the_stream(pair: Pair) -> None:
    client, _ = pair
    with client.submit([submit("stall")]) as stream:
        await anext(stream)
        client.abort("stall")
        assert (await anext(stream)).finish_reason == "abort"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_an_id_in_use_is_refused(pair: Pair) -> None:
    client, _ = pair
    with client.submit([submit("stall")]), pytest.raises(RequestError) as caught:
        client.submit([submit("stall")])
    assert caught.value.param == "rid"


@pytest.mark.parametrize("how", ["dying", "watcher", "garbage"])
async def test_a_lost_engine_is_told_to_everybody_now_and_later(pair: Pair, how: str) -> None:
    client, engine = pair
    engine.is_mute = True
    stream = client.submit([submit("stall")])
    await anext(stream)
    call = asyncio.create_task(client.query())
    await asyncio.sleep(0)
    match how:
        case "dying":
            engine.die("audit: 3 pages missing")
        case "watcher":
            client.lose("exit code -9")
        case _:
            engine.send_garbage()
    for waiting in (anext(stream), call):
        with pytest.raises(WorkerLost):
            await waiting
    assert client.failure
    with pytest.raises(WorkerLost):
        client.submit([submit("late")])
    with pytest.raises(WorkerLost):
        await client.query()
    stream.close()
    assert client.running == ()


async def test_an_engine_that_does_not_answer_is_worker_lost_for_the_caller_only(pair: Pair) -> None:
    client, engine = pair
    engine.is_mute = True
    with pytest.raises(WorkerLost, match="did not answer"):
        await client.query()
    assert client.failure is None
    assert len([d async for d in client.submit([submit("a")])]) == 3


async def test_flush_and_query_are_answered(pair: Pair) -> None:
    client, engine = pair
    engine.info = {"num_running_reqs": 3}
    assert await client.query() == {"num_running_reqs": 3}
    await client.flush()
    assert engine.num_flushes == 1
    engine.flush_error = "2 requests are running"
    with pytest.raises(RequestError, match="2 requests"):
        await client.flush()


async def test_waiting_for_an_engine_that_dies_first_fails(tmp_path: Path) -> None:
    client = WorkerClient(f"ipc://{tmp_path}/engine")
    client.start()
    waiting = asyncio.create_task(client.ready())
    await asyncio.sleep(0)
    client.lose("exit code 1")
    with pytest.raises(WorkerLost, match="exit code 1"):
        await waiting
    client.close()
