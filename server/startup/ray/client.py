"""`RayClient`: the replicas of a Ray deployment behind the interface of one engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from itertools import count
from typing import Any

import ray.util
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from windlass.engine.client.engine_client import EngineClient
from windlass.engine.client.prefix_router import PrefixKeys
from windlass.engine.client.replicated_client import concat_cache_snapshots, sum_stats
from windlass.engine.errors import EngineDeadError, EngineError, QueueFullError, RequestError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import A, CacheQuery, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.server.startup.ray import wire
from windlass.server.startup.ray.replica import EngineReplica

MAX_TRIES = 3  # replicas that a request is sent to if none of them has begun with it
POLL_SECONDS = 1.0  # between two reports of the replicas
REPORT_TIMEOUT_SECONDS = 2.0
LOST = (RayError, RayServeException)

_logger = logging.getLogger("windlass.server")


class Calls:
    """Calls of one ingress, on its event loop. handle: of a deployment of `EngineReplica`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._generate = handle.options(method_name="generate", stream=True)
        self._receiver = wire.OutputReceiver()
        self._numbers = count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Receive outputs over channels; if that is impossible, Ray transports them."""
        try:
            await self._receiver.listen(ray.util.get_node_ip_address())
        except OSError as error:
            _logger.warning("replicas cannot send tokens directly (%s): Ray transports them, which is slower", error)

    @property
    def address(self) -> wire.ReceiverAddress | None:
        """Where channels connect to."""
        return self._receiver.address

    async def close(self) -> None:
        await self._receiver.stop()

    @contextlib.asynccontextmanager
    async def start_call(self, call: wire.ReplicaCall) -> AsyncIterator[AsyncIterator[list[RequestOutput]]]:
        """The outputs of a call, which ends with the block. They raise CallLostError and CallFailedError."""
        number = next(self._numbers)
        events: asyncio.Queue[wire.CallEvent] = asyncio.Queue()
        self._receiver.open(number, events.put_nowait)
        stream = self._generate.remote(replace(call, channel=self.address, number=number))
        following = asyncio.ensure_future(_follow(stream, events))
        self._tasks.add(following)
        following.add_done_callback(self._tasks.discard)
        is_finished = asyncio.Event()
        try:
            async with contextlib.aclosing(_outputs(events, is_finished)) as outputs:
                yield outputs
        finally:
            self._receiver.close(number)
            if not is_finished.is_set():
                stream.cancel()
                following.cancel()


async def _follow(stream: Any, events: asyncio.Queue[wire.CallEvent]) -> None:
    """Events of a call that come through Ray: outputs without a channel, and the loss of the replica."""
    try:
        async for item in stream:
            if item is None:
                return  # the channel delivers the events
            events.put_nowait(item)
        events.put_nowait(None)
    except LOST:
        events.put_nowait(wire.CallLostError())
    except Exception:  # the request needs an end in any case
        _logger.exception("a call of a replica failed")
        events.put_nowait(wire.CallLostError())


async def _outputs(
    events: asyncio.Queue[wire.CallEvent], is_finished: asyncio.Event
) -> AsyncGenerator[list[RequestOutput], None]:
    while isinstance(event := await events.get(), list):
        yield event
    if not isinstance(event, wire.CallLostError):
        is_finished.set()
    if event is not None:
        raise event


class RayClient(EngineClient):
    """Client of a deployment of `EngineReplica`. config: that of the replicas, except for the model's path."""

    def __init__(self, handle: DeploymentHandle[Any], config: EngineConfig) -> None:
        self._handle, self._config = handle, config
        self._calls = Calls(handle)
        self._info: ModelInfo | None = None
        self._keys: PrefixKeys | None = None
        self._max_blocks = 1
        self._closed = False
        self._adapters: dict[int, AdapterSource] = {}
        self._ids: set[str] = set()  # of running requests
        self._reports: dict[str, wire.ReplicaReport] = {}  # the last one of each replica, by its name
        self._gone_restarts = 0  # of replicas that no longer exist
        self._polling: asyncio.Task[None] | None = None

    @property
    def engines(self) -> tuple[wire.ReplicaReport, ...]:
        """The replicas, ordered by name."""
        return tuple(self._reports[name] for name in sorted(self._reports))

    @property
    def has_replicas(self) -> bool:
        return True

    @property
    def info(self) -> ModelInfo | None:
        return self._info

    @property
    def state(self) -> str:
        if self._closed:
            return "closed"
        if self._info is None:
            return "starting"
        return "ready" if any(report.state == "ready" for report in self._reports.values()) else "restarting"

    @property
    def restarts(self) -> int:
        return self._gone_restarts + sum(report.restarts for report in self._reports.values())

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.generate`."""
        self._require_engine()
        if request.request_id in self._ids:
            raise RequestError(f"a request with the id {request.request_id!r} is already running", "request_id")
        digests = () if self._keys is None else tuple(self._keys.of(request))
        adapter = None if request.adapter is None else self._adapters.get(request.adapter)
        call = replace(
            wire.ReplicaCall.from_request(request), digests=digests, max_blocks=self._max_blocks, adapter=adapter
        )
        self._ids.add(request.request_id)
        try:
            for tries in range(1, MAX_TRIES + 1):
                begun = False
                error: EngineError
                try:
                    async with self._calls.start_call(call) as items:
                        async for outputs in items:
                            for output in outputs:
                                begun = True
                                yield output
                    return
                except wire.CallLostError as lost:
                    call = replace(call, avoid=(*call.avoid, lost.replica))
                    error = EngineDeadError(
                        "the replica ended while this request was running; send it again", begun=begun
                    )
                except wire.CallFailedError as ended:
                    error = ended.error
                    if not isinstance(error, EngineDeadError | QueueFullError):
                        raise error from None
                    call = replace(call, avoid=(*call.avoid, ended.replica))
                if begun or getattr(error, "begun", False) or tries == MAX_TRIES or self._closed:
                    raise error
        finally:
            self._ids.discard(request.request_id)

    def end_sample(self, request_id: str, index: int) -> None:
        """See `EngineClient.end_sample`. Replicas without the request ignore it."""
        if request_id in self._ids:
            self._run_in_background(self._all(EngineReplica.end_sample, request_id, index))

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """See `EngineClient.load_adapter`. A replica that starts later loads it with the first request that names it."""
        try:
            found = await self._all(EngineReplica.load_adapter, source, seconds=None)
        except asyncio.CancelledError:  # some replicas may have loaded it already
            self.drop_adapter(source.adapter_id)
            raise
        refused = [one for one in found if isinstance(one, RequestError)]
        infos = [one for one in found if isinstance(one, AdapterInfo)]
        if refused or not infos:
            self.drop_adapter(source.adapter_id)
            raise refused[0] if refused else EngineDeadError("no replica could load this adapter; try again later")
        self._adapters[source.adapter_id] = source
        return infos[0]

    def drop_adapter(self, adapter_id: int) -> None:
        """See `EngineClient.drop_adapter`."""
        self._adapters.pop(adapter_id, None)
        self._run_in_background(self._all(EngineReplica.drop_adapter, adapter_id))

    async def inspect(self, query: IntrospectionQuery[A]) -> A:
        """See `EngineClient.inspect`. A cache snapshot covers all replicas; any replica answers other queries."""
        self._require_engine()
        if isinstance(query, CacheQuery):
            found = await self._all(EngineReplica.inspect, query)
            snapshots = [one for one in found if not isinstance(one, BaseException)]
            if not snapshots:
                raise EngineDeadError("no replica responded; try again")
            return concat_cache_snapshots(list(enumerate(snapshots)))  # type: ignore[return-value]
        try:
            answer: Any = await self._handle.inspect.remote(query)
        except LOST:
            raise EngineDeadError("the replica ended before it responded; try again") from None
        if isinstance(answer, EngineError):
            raise answer
        return answer  # type: ignore[no-any-return]

    async def stats(self) -> EngineStats:
        """The sum of all replicas; its `engines` are those of each, in the order of `self.engines`."""
        self._require_engine()
        await self._poll(stats=True)
        if not self._reports:
            raise EngineDeadError("no replica responded; try again")
        return sum_stats([report.stats for report in self.engines])

    async def close(self) -> None:
        """Stop polling; the replicas belong to the deployment."""
        self._closed = True
        await self._calls.close()
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)

    async def start(self) -> ModelInfo:
        """Wait for a replica, and poll all of them from then on."""
        await self._calls.listen()
        info: ModelInfo = await self._handle.info.remote()
        if self._config.cache.prefix_caching and not info.is_bidirectional:
            self._keys = PrefixKeys(info, self._config.rotary)
            self._max_blocks = max(1, info.block_size * min(info.num_kv_blocks) // self._keys.block_tokens)
        await self._poll(stats=False)
        self._info = info
        self._polling = asyncio.get_running_loop().create_task(self._poll_forever(), name="replicas-watch")
        return info

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._poll(stats=False)

    async def _poll(self, *, stats: bool) -> None:
        """Update the reports. Replicas that do not respond in time are assumed to be gone."""
        found = await self._all(EngineReplica.report, stats, self._calls.address)
        before, self._reports = self._reports, {one.name: one for one in found if isinstance(one, wire.ReplicaReport)}
        # A replica that is gone counts as an engine that ended; one that was only slow then counts too much by one.
        self._gone_restarts += sum(one.restarts + 1 for name, one in before.items() if name not in self._reports)

    async def _all(
        self, method: Callable[..., Any], *arguments: object, seconds: float | None = REPORT_TIMEOUT_SECONDS
    ) -> list[Any]:
        """The results of a method of `EngineReplica` on all replicas, an exception for one that failed."""
        try:
            response = self._handle.broadcast(method.__name__, *arguments)
            found: list[Any] = await response.results_async(timeout_s=seconds, return_exceptions=True)
            return found
        except (*LOST, TimeoutError):
            return []

    def _run_in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _require_engine(self) -> None:
        match self.state:
            case "starting":
                raise EngineDeadError("the model is still loading; try again soon")
            case "closed":
                raise EngineDeadError("the engine was closed")
