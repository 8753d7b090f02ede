"""Calls of an ingress and outputs of a replica, over a channel and over Ray's streams, without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is an extra: pip install -e '.[ray]'")

from ray.exceptions import RayActorError

from windlass.engine.errors import QueueFullError
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.server.startup.ray.client import Calls
from windlass.server.startup.ray.replica import EngineReplica
from windlass.server.startup.ray.wire import CallFailedError, CallLostError, OutputChannels, ReplicaCall

TOKENS = 50
END = object()


class Engine:
    """Engine client that generates the requested tokens, then raises `error`."""

    adapter_ids = frozenset[int]()

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.closed = 0

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        try:
            for number in range(request.sampling.max_tokens or 0):
                await asyncio.sleep(0)
                yield RequestOutput(request.request_id, token_ids=(number,), scheduled_at=1.0 if not number else None)
            if self._error is not None:
                raise self._error
        finally:
            self.closed += 1


class Handle:
    """Calls the replica in this process like Ray's streams. dies: number of items after which the replica is lost."""

    def __init__(self, replica: Any, dies: int | None = None) -> None:
        self.replica, self.dies, self.items = replica, dies, 0
        self.tasks: list[asyncio.Task[None]] = []

    def options(self, **options: Any) -> Handle:
        assert options == {"method_name": "generate", "stream": True}
        return self

    def remote(self, call: ReplicaCall) -> Any:
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def run() -> None:
            async with contextlib.aclosing(self.replica.generate(call)) as items:
                async for item in items:
                    queue.put_nowait(item)
            queue.put_nowait(END)

        task = asyncio.create_task(run())
        self.tasks.append(task)
        handle = self

        class Stream:
            def cancel(self) -> None:
                task.cancel()

            async def __aiter__(self) -> Any:
                while (item := await queue.get()) is not END:
                    if handle.items == handle.dies:
                        raise RayActorError
                    handle.items += 1
                    yield item

        return Stream()


def replica_of(error: Exception | None = None) -> tuple[Any, Engine]:
    replica: Any = object.__new__(EngineReplica)
    engine = Engine(error)
    replica._id, replica._client, replica._channels = "a", engine, OutputChannels("a")
    return replica, engine


def replica_call(tokens: int = TOKENS) -> ReplicaCall:
    return ReplicaCall.from_request(EngineRequest("r", [1, 2, 3], SamplingParams(max_tokens=tokens)))


async def outputs_of(calls: Calls, found: list[RequestOutput], most: int | None = None) -> None:
    async with calls.start_call(replica_call()) as items:
        async for outputs in items:
            found += outputs
            if most is not None and len(found) >= most:
                return


@pytest.mark.parametrize("with_channel", [True, False])
def test_outputs_are_the_same_with_and_without_a_channel(with_channel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1" if with_channel else "203.0.113.1")

    async def main() -> None:
        for error in (None, QueueFullError("full")):
            replica, engine = replica_of(error)
            handle = Handle(replica)
            calls = Calls(handle)  # type: ignore[arg-type]
            await calls.listen()
            assert (calls.address is not None) == with_channel
            found: list[RequestOutput] = []
            if error is None:
                await outputs_of(calls, found)
            else:
                with pytest.raises(CallFailedError) as caught:
                    await outputs_of(calls, found)
                assert caught.value.replica == "a" and type(caught.value.error) is QueueFullError
            assert [output.token_ids for output in found] == [(number,) for number in range(TOKENS)]
            assert all(output.scheduled_at is None for output in found)
            await asyncio.gather(*handle.tasks)
            assert engine.closed == 1
            await calls.close()

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("with_channel", [True, False])
def test_a_caller_that_leaves_ends_the_call(with_channel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1" if with_channel else "203.0.113.1")

    async def main() -> None:
        replica, engine = replica_of()
        handle = Handle(replica)
        calls = Calls(handle)  # type: ignore[arg-type]
        await calls.listen()
        await outputs_of(calls, [], 3)
        while not engine.closed:
            await asyncio.sleep(0.01)
        await asyncio.gather(*handle.tasks, return_exceptions=True)
        await calls.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_dead_replica_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "203.0.113.1")  # of no machine here: no channel

    async def main() -> None:
        replica, _ = replica_of()
        handle = Handle(replica, dies=1)
        calls = Calls(handle)  # type: ignore[arg-type]
        await calls.listen()
        found: list[RequestOutput] = []
        with pytest.raises(CallLostError):
            await outputs_of(calls, found)
        assert 1 <= len(found) < TOKENS
        await asyncio.gather(*handle.tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 30))
