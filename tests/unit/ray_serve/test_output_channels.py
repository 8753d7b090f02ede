"""Output channels between an ingress and replicas, over real connections in one process."""

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
    CallFailedError,
    CallLostError,
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


def call_of(number: int, receiver: OutputReceiver) -> ReplicaCall:
    request = EngineRequest(f"r{number}", [1, 2, 3], SamplingParams(max_tokens=4))
    return replace(ReplicaCall.from_request(request), channel=receiver.address, number=number)


class Replica:
    """Responds to a call with tokens that equal its number and the next one; waits while `gate` is closed."""

    def __init__(self, name: str) -> None:
        self.channels = OutputChannels(name)
        self.name = name
        self.cancelled: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, call: ReplicaCall) -> bool:
        """Whether there was a channel."""
        if (channel := await self.channels.to(call.channel)) is not None:
            await channel.run(self.run(channel, call))
        return channel is not None

    async def run(self, channel: OutputChannel, call: ReplicaCall) -> None:
        try:
            channel.send(call.number, RequestOutput(call.request.request_id, token_ids=(call.number,)))
            await self.gate.wait()
            channel.send(call.number, RequestOutput(call.request.request_id, token_ids=(call.number + 1,)))
            channel.send(call.number, None)
        except asyncio.CancelledError:
            self.cancelled.append(call.number)
            raise


@asynccontextmanager
async def listening() -> AsyncIterator[OutputReceiver]:
    receiver = OutputReceiver()
    await receiver.listen("127.0.0.1")
    try:
        yield receiver
    finally:
        await receiver.stop()


def callback(receiver: OutputReceiver, number: int) -> asyncio.Queue[CallEvent]:
    events: asyncio.Queue[CallEvent] = asyncio.Queue()
    receiver.open(number, events.put_nowait)
    return events


async def tokens(events: asyncio.Queue[CallEvent]) -> list[int]:
    found: list[int] = []
    while (event := await events.get()) is not None:
        assert isinstance(event, list), event
        found += [token for output in event for token in output.token_ids]
    return found


@in_a_loop
async def test_calls_share_a_channel() -> None:
    async with listening() as receiver:
        replica = Replica("a")
        queues = {number: callback(receiver, number) for number in range(1, 500)}
        assert all(await asyncio.gather(*(replica.call(call_of(number, receiver)) for number in queues)))
        for number, events in queues.items():
            assert await tokens(events) == [number, number + 1]
        assert len(receiver.connections) == 1


@in_a_loop
async def test_more_than_the_system_buffers_arrives_in_order() -> None:
    async with listening() as receiver:
        replica, events = Replica("a"), callback(receiver, 1)
        channel = await replica.channels.to(receiver.address)
        assert channel is not None
        sent = [tuple(range(number, number + 1000)) for number in range(2000)]
        for number, ids in enumerate(sent):
            channel.send(1, RequestOutput("r", token_ids=ids))
            if number % 100 == 0:
                await asyncio.sleep(0)
        channel.send(1, None)
        assert await tokens(events) == [token for ids in sent for token in ids]


@in_a_loop
async def test_a_cancelled_call_ends() -> None:
    async with listening() as receiver:
        replica, events = Replica("a"), callback(receiver, 2)
        replica.gate.clear()
        calling = asyncio.create_task(replica.call(call_of(2, receiver)))
        assert isinstance(await events.get(), list)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await asyncio.sleep(0)
        assert replica.cancelled == [2]


@in_a_loop
async def test_outputs_of_closed_calls_are_dropped() -> None:
    async with listening() as receiver:
        replica, other = Replica("a"), callback(receiver, 2)
        receiver.open(1, lambda events: pytest.fail(f"{events}"))
        receiver.close(1)
        assert await replica.call(call_of(1, receiver)) and await replica.call(call_of(2, receiver))
        assert await tokens(other) == [2, 3]


@in_a_loop
async def test_a_lost_channel_is_noticed_at_both_ends() -> None:
    async with listening() as receiver:
        replica, second = Replica("a"), Replica("b")
        replica.gate.clear()
        begun, others, idle = callback(receiver, 1), callback(receiver, 2), callback(receiver, 3)
        calling = asyncio.create_task(replica.call(call_of(1, receiver)))
        assert isinstance(await begun.get(), list)
        assert await second.call(call_of(2, receiver))
        assert await tokens(others) == [2, 3]
        (channel,) = [one for one in receiver.connections if one._replica == "a"]
        channel.abort()
        lost = await begun.get()
        assert isinstance(lost, CallLostError) and lost.replica == "a"
        assert await calling and replica.cancelled == [1]
        assert idle.empty() and others.empty() and len(receiver.connections) == 1
        replica.gate.set()
        assert await replica.call(call_of(3, receiver))  # over a new channel
        assert await tokens(idle) == [3, 4]
        assert len(replica.channels._channels) == 1


@in_a_loop
async def test_errors_keep_their_type() -> None:
    async with listening() as receiver:
        events = callback(receiver, 1)
        channel = await Replica("a").channels.to(receiver.address)
        assert channel is not None
        channel.send(1, CallFailedError("a", QueueFullError("full")))
        found = await events.get()
        assert isinstance(found, CallFailedError) and type(found.error) is QueueFullError


@in_a_loop
async def test_connections_without_the_secret_are_closed() -> None:
    async with listening() as receiver:
        assert receiver.address is not None
        events = callback(receiver, 1)
        wrong = replace(call_of(1, receiver), channel=replace(receiver.address, secret=bytes(32)))
        await Replica("a").call(wrong)
        reader, writer = await asyncio.open_connection(receiver.address.host, receiver.address.port)
        writer.write(b"x" * 31)
        await asyncio.sleep(0.05)
        writer.write(b"x\x00\x00\x00\x01.")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()
        await asyncio.sleep(0.05)
        assert events.empty() and len(receiver.connections) == 0


@in_a_loop
async def test_an_unreachable_ingress_has_no_channel() -> None:
    async with listening() as receiver:
        nowhere = call_of(1, receiver)
        await receiver.stop()
        assert not await Replica("a").call(nowhere)
    assert not await Replica("a").call(replace(nowhere, channel=None))
