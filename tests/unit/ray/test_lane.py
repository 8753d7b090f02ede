"""Lanes between an ingress and replicas, over real connections in one process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from windlass.engine.errors import QueueFullError
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.server.startup.ray.wire import (
    CallEvent,
    CallFailed,
    ConnectionLost,
    Finished,
    OutputChannel,
    OutputChannels,
    OutputReceiver,
    ReplicaCall,
)


def in_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    return run


def call_of(number: int, end: OutputReceiver) -> ReplicaCall:
    request = EngineRequest(f"r{number}", [1, 2, 3], SamplingParams(max_tokens=4))
    return replace(ReplicaCall.of(request), channel=end.address, number=number)


class Replica:
    """Answers a call with the tokens of its number; waits while `gate` is shut."""

    def __init__(self, name: str) -> None:
        self.lanes = OutputChannels(name)
        self.name = name
        self.cancelled: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, call: ReplicaCall) -> bool:
        """Whether there was a lane."""
        if (channel := await self.lanes.to(call.channel)) is not None:
            await channel.run(self.run(channel, call))
        return channel is not None

    async def run(self, channel: OutputChannel, call: ReplicaCall) -> None:
        try:
            channel.send(call.number, RequestOutput(call.request.request_id, token_ids=(call.number,)))
            await self.gate.wait()
            channel.send(call.number, RequestOutput(call.request.request_id, token_ids=(call.number + 1,)))
            channel.send(call.number, Finished())
        except asyncio.CancelledError:
            self.cancelled.append(call.number)
            raise


@asynccontextmanager
async def an_end() -> AsyncIterator[OutputReceiver]:
    end = OutputReceiver()
    await end.listen("127.0.0.1")
    try:
        yield end
    finally:
        await end.stop()


def callback(end: OutputReceiver, number: int) -> asyncio.Queue[CallEvent]:
    news: asyncio.Queue[CallEvent] = asyncio.Queue()
    end.open(number, news.put_nowait)
    return news


async def tokens(news: asyncio.Queue[CallEvent]) -> list[int]:
    found: list[int] = []
    while not isinstance(one := await news.get(), Finished):
        assert isinstance(one, list), one
        found += [token for output in one for token in output.token_ids]
    return found


@in_a_loop
async def test_many_calls_share_a_lane() -> None:
    async with an_end() as end:
        replica = Replica("a")
        queues = {number: callback(end, number) for number in range(1, 500)}
        assert all(await asyncio.gather(*(replica.call(call_of(number, end)) for number in queues)))
        for number, news in queues.items():
            assert await tokens(news) == [number, number + 1]
        assert end.num_connections == 1


@in_a_loop
async def test_more_than_the_system_buffers_arrives_in_order() -> None:
    async with an_end() as end:
        replica, news = Replica("a"), callback(end, 1)
        channel = await replica.lanes.to(end.address)
        assert channel is not None
        sent = [tuple(range(number, number + 1000)) for number in range(2000)]
        for number, ids in enumerate(sent):
            channel.send(1, RequestOutput("r", token_ids=ids))
            if number % 100 == 0:
                await asyncio.sleep(0)
        channel.send(1, Finished())
        assert await tokens(news) == [token for ids in sent for token in ids]


@in_a_loop
async def test_a_cancelled_call_ends() -> None:
    async with an_end() as end:
        replica, news = Replica("a"), callback(end, 2)
        replica.gate.clear()
        calling = asyncio.create_task(replica.call(call_of(2, end)))
        assert isinstance(await news.get(), list)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await asyncio.sleep(0)
        assert replica.cancelled == [2]


@in_a_loop
async def test_what_comes_for_nobody_is_dropped() -> None:
    async with an_end() as end:
        replica, other = Replica("a"), callback(end, 2)
        end.open(1, lambda news: pytest.fail(f"{news}"))
        end.close(1)
        assert await replica.call(call_of(1, end)) and await replica.call(call_of(2, end))
        assert await tokens(other) == [2, 3]


@in_a_loop
async def test_a_lost_lane_is_told_at_both_ends() -> None:
    async with an_end() as end:
        replica, second = Replica("a"), Replica("b")
        replica.gate.clear()
        begun, others, idle = callback(end, 1), callback(end, 2), callback(end, 3)
        calling = asyncio.create_task(replica.call(call_of(1, end)))
        assert isinstance(await begun.get(), list)
        assert await second.call(call_of(2, end))
        assert await tokens(others) == [2, 3]
        (channel,) = [one for one in end._incoming if one._replica == "a"]
        channel.abort()
        assert await begun.get() == ConnectionLost("a")
        assert await calling and replica.cancelled == [1]
        assert idle.empty() and others.empty() and end.num_connections == 1
        replica.gate.set()
        assert await replica.call(call_of(3, end))  # by a new lane
        assert await tokens(idle) == [3, 4]
        assert len(replica.lanes._channels) == 1


@in_a_loop
async def test_errors_arrive_as_they_are() -> None:
    async with an_end() as end:
        news = callback(end, 1)
        channel = await Replica("a").lanes.to(end.address)
        assert channel is not None
        channel.send(1, CallFailed("a", QueueFullError("full")))
        found = await news.get()
        assert isinstance(found, CallFailed) and type(found.error) is QueueFullError


@in_a_loop
async def test_who_does_not_know_the_secret_is_not_read() -> None:
    async with an_end() as end:
        assert end.address is not None
        news = callback(end, 1)
        wrong = replace(call_of(1, end), channel=replace(end.address, secret=bytes(32)))
        await Replica("a").call(wrong)
        reader, writer = await asyncio.open_connection(end.address.host, end.address.port)
        writer.write(b"x" * 31)
        await asyncio.sleep(0.05)
        writer.write(b"x\x00\x00\x00\x01.")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()
        await asyncio.sleep(0.05)
        assert news.empty() and end.num_connections == 0


@in_a_loop
async def test_an_ingress_that_cannot_be_reached_has_no_lane() -> None:
    async with an_end() as end:
        nowhere = call_of(1, end)
        await end.stop()
        assert not await Replica("a").call(nowhere)
    assert not await Replica("a").call(replace(nowhere, channel=None))
