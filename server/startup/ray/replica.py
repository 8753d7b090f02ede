"""A replica of a deployment: one engine process under the same supervision as on a single machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ray import serve

from windlass._version import __version__
from windlass.engine.core.messages import picklable_error
from windlass.engine.errors import EngineDeadError, EngineError
from windlass.engine.interface.introspection import CacheQuery, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, RequestOutput
from windlass.server.startup.engines import Engines, SupervisedEngine
from windlass.server.startup.launch import crash_folder, prepare
from windlass.server.startup.ray.call import Address, Ended, Finished, Item, ReplicaCall, ReplicaReport, Start, mixed
from windlass.server.startup.ray.lane import Lanes, ReplicaLane
from windlass.server.startup.ray.scaling import CACHE_HELD, cache_held

_logger = logging.getLogger("windlass.server")

LOOK_SECONDS = 2.0  # between looks at the cache: its books are read between two steps
GATHER_SECONDS = 0.01  # in which outputs of one stream come together, as each item costs half a millisecond on its way


class EngineReplica:
    """start: see there. Its methods are called by Ray Serve, in the event loop of the replica's actor."""

    async def __init__(self, start: Start) -> None:  # type: ignore[misc]
        start.check()
        self._id = serve.get_replica_context().replica_id.unique_id
        self._lanes = Lanes(self._id)
        self._held, self._next_look = 0.0, 0.0
        self._engines = Engines(start.engine, start.log_level)
        try:
            path, engine, _ = await asyncio.to_thread(prepare, start.model, start.engine, start.server)
            folder = crash_folder(start.server)
            self._client: SupervisedEngine = self._engines.client(engine, path, folder, sharing=start.sharing)
            self._info = await self._client.start()
        except BaseException:
            self._engines.close()
            raise

    async def check_health(self) -> None:
        """Raise where the engine was given up: Serve starts another replica."""
        if self._client.state in ("failed", "closed"):
            raise RuntimeError(self._client.failure or "the engine was closed")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What replicas are counted by beside their requests; Ray asks twice a second where their number may change."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            with contextlib.suppress(EngineError):  # of an engine that starts again nothing new is known
                self._held = cache_held(await self._client.inspect(CacheQuery()))
        return {CACHE_HELD: self._held}

    async def info(self) -> ModelInfo:
        return self._info

    async def generate(self, call: ReplicaCall) -> AsyncGenerator[Item | Finished, None]:
        """Outputs as they come, those that came together in one item; an error is the last item.

        Where there is a lane they go there, and the only item says so: Ray then has the call to count, to cancel and to end with
        this replica, and no tokens.
        """
        if (lane := await self._lanes.to(call.lane)) is not None:
            await lane.run(self._generate_by(lane, call))
            yield Finished()
            return
        try:
            async for outputs in in_batches(await self._begin(call)):
                yield outputs
        except EngineError as error:
            yield Ended(self._id, picklable_error(error))

    async def _generate_by(self, lane: ReplicaLane, call: ReplicaCall) -> None:
        last: Ended | Finished = Finished()
        try:
            async with contextlib.aclosing(await self._begin(call)) as outputs:
                async for output in outputs:
                    lane.send(call.number, by_no_clock(output))
        except Exception as error:  # whatever it is, the ingress waits for an end
            if not isinstance(error, EngineError):
                _logger.exception("a call failed")
            last = Ended(self._id, picklable_error(error))
        lane.send(call.number, last)

    async def _begin(self, call: ReplicaCall) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a call, whose adapter is loaded first. Raises EngineError."""
        if call.version != __version__:
            raise EngineError(mixed(call.version))
        if call.adapter is not None and call.adapter.adapter_id not in self._client.adapter_ids:
            with contextlib.suppress(EngineDeadError):  # told by the request itself
                await self._client.load_adapter(call.adapter)
        return self._client.generate(call.arrived())

    async def end_sample(self, request_id: str, index: int) -> None:
        self._client.end_sample(request_id, index)

    async def report(self, stats: bool, address: Address | None = None) -> ReplicaReport:
        """How it is; with its statistics if they are asked for, each sample of which is handed out once.

        address: of the ingress that asks, to which there is a lane from then on.
        """
        await self._lanes.to(address)
        found: EngineStats | None = None
        if stats:
            with contextlib.suppress(EngineError):
                found = await self._client.stats()
        return ReplicaReport(self._id, self._client.state, self._client.restarts, found)

    async def inspect(self, question: IntrospectionQuery[Any]) -> Any:
        """The answer, or the EngineError that there was instead."""
        try:
            return await self._client.inspect(question)
        except EngineError as error:
            return picklable_error(error)

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo | EngineError:
        try:
            return await self._client.load_adapter(source)
        except EngineError as error:
            return picklable_error(error)

    async def drop_adapter(self, adapter_id: int) -> None:
        self._client.drop_adapter(adapter_id)


def by_no_clock(output: RequestOutput) -> RequestOutput:
    """Without the time it has by a clock of this machine."""
    return output if output.scheduled_at is None else replace(output, scheduled_at=None)


async def in_batches(stream: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[list[RequestOutput], None]:
    """What a stream gives, all that is there at once: it is the way of an item that costs. The stream is closed with it."""
    waiting: list[RequestOutput] = []
    news = asyncio.Event()

    async def pump() -> None:
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    waiting.append(by_no_clock(output))
                    news.set()
        finally:
            news.set()

    pumping = asyncio.ensure_future(pump())
    pause = 0.0
    try:
        while waiting or not pumping.done():
            if not waiting:
                await news.wait()
            if not pumping.done():
                await asyncio.sleep(pause)
            news.clear()
            outputs, waiting[:] = waiting[:], []
            if outputs:
                pause = GATHER_SECONDS  # the first goes at once
                yield outputs
        await pumping  # its error
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
