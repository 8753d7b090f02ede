"""`RayClient`: the replicas of a deployment behind the interface of one engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace
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
from windlass.server.startup.ray.replica import EngineReplica
from windlass.server.startup.ray.wire import (
    CallFailed,
    ConnectionLost,
    Finished,
    Item,
    OutputReceiver,
    ReceiverAddress,
    ReplicaCall,
    ReplicaReport,
)

_logger = logging.getLogger("windlass.server")

LOST = (RayError, RayServeException)


class CallLostError(Exception):
    """The replica, or the way to it, is gone. replica: which, if that is known."""

    def __init__(self, replica: str) -> None:
        super().__init__(replica)
        self.replica = replica


class CallFailedError(Exception):
    """The replica ended it with an error."""

    def __init__(self, replica: str, error: EngineError) -> None:
        super().__init__(str(error))
        self.replica, self.error = replica, error


class Calls:
    """Those of one ingress, in its event loop."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._generate = handle.options(method_name="generate", stream=True)
        self._end = OutputReceiver()
        self._numbers = count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Begin to take outputs by lanes. Where that cannot be they come by Ray."""
        try:
            await self._end.listen(ray.util.get_node_ip_address())
        except OSError as error:
            _logger.warning("no lanes from replicas, tokens come by Ray: %s", error)

    @property
    def address(self) -> ReceiverAddress | None:
        """Where lanes lead to."""
        return self._end.address

    async def close(self) -> None:
        await self._end.stop()

    @contextlib.asynccontextmanager
    async def begun(self, call: ReplicaCall) -> AsyncIterator[AsyncIterator[list[RequestOutput]]]:
        """The outputs of a call, which is cancelled with it. They raise CallLostError and CallFailedError."""
        number = next(self._numbers)
        news: asyncio.Queue[Item | Finished | ConnectionLost] = asyncio.Queue()
        self._end.open(number, news.put_nowait)
        stream = self._generate.remote(replace(call, channel=self._end.address, number=number))
        following = asyncio.ensure_future(_follow(stream, news))
        self._tasks.add(following)
        following.add_done_callback(self._tasks.discard)
        is_finished = asyncio.Event()
        try:
            async with contextlib.aclosing(_outputs(news, is_finished)) as outputs:
                yield outputs
        finally:
            self._end.close(number)
            if not is_finished.is_set():
                stream.cancel()
                following.cancel()


async def _outputs(
    news: asyncio.Queue[Item | Finished | ConnectionLost], is_finished: asyncio.Event
) -> AsyncGenerator[list[RequestOutput], None]:
    while True:
        match await news.get():
            case list(outputs):
                yield outputs
            case CallFailed(replica, error):
                is_finished.set()
                raise CallFailedError(replica, error)
            case Finished():
                is_finished.set()
                return
            case ConnectionLost(replica):
                raise CallLostError(replica)


async def _follow(stream: Any, news: asyncio.Queue[Item | Finished | ConnectionLost]) -> None:
    """What Ray says of a call: outputs that came its way, and that the replica died."""
    try:
        async for item in stream:
            if isinstance(item, Finished):
                return  # the lane says the rest
            news.put_nowait(item)
        news.put_nowait(Finished())
    except LOST:
        news.put_nowait(ConnectionLost())
    except Exception:  # whatever it is, the request waits for an end
        _logger.exception("a call of a replica failed")
        news.put_nowait(ConnectionLost())


MAX_TRIES = 3  # replicas that a request is sent to, none of which had begun with it

POLL_SECONDS = 1.0  # between two looks at how the replicas are

REPORT_TIMEOUT_SECONDS = 2.0  # for them to say


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """A replica as it was when it was looked at last. name: its id."""

    name: str
    state: str
    restarts: int


class RayClient(EngineClient):
    """Over a deployment of `EngineReplica`. config: as the replicas have it, but for where the model is."""

    def __init__(self, handle: DeploymentHandle[Any], config: EngineConfig) -> None:
        self._handle, self._config = handle, config
        self._calls = Calls(handle)
        self._info: ModelInfo | None = None
        self._keys: PrefixKeys | None = None
        self._max_blocks = 1
        self._closed = False
        self._adapters: dict[int, AdapterSource] = {}
        self._ids: set[str] = set()  # of requests that run
        self._known: dict[str, RemoteEngine] = {}
        self._gone_restarts = 0  # of replicas that are there no more
        self._watching: asyncio.Task[None] | None = None

    # ---- the EngineClient protocol -----------------------------------------------------------------------------------
    @property
    def engines(self) -> tuple[RemoteEngine, ...]:
        """Each of them, by name."""
        return tuple(self._known[name] for name in sorted(self._known))

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
        return "ready" if any(engine.state == "ready" for engine in self._known.values()) else "restarting"

    @property
    def restarts(self) -> int:
        return self._gone_restarts + sum(engine.restarts for engine in self._known.values())

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.generate`."""
        self._require_engine()
        if request.request_id in self._ids:
            raise RequestError(f"a request with the id {request.request_id!r} is already running", "request_id")
        digests = () if self._keys is None else tuple(self._keys.of(request))
        adapter = None if request.adapter is None else self._adapters.get(request.adapter)
        call = replace(ReplicaCall.of(request), digests=digests, max_blocks=self._max_blocks, adapter=adapter)
        self._ids.add(request.request_id)
        try:
            for tries in range(1, MAX_TRIES + 1):
                begun = False
                error: EngineError
                try:
                    async with self._calls.begun(call) as items:
                        async for outputs in items:
                            for output in outputs:
                                begun = True
                                yield output
                    return
                except CallLostError as lost:
                    call = replace(call, avoid=(*call.avoid, lost.replica))
                    error = EngineDeadError(
                        "the replica ended while this request was running; send it again", begun=begun
                    )
                except CallFailedError as ended:
                    error = ended.error
                    if not isinstance(error, EngineDeadError | QueueFullError):
                        raise error from None
                    call = replace(call, avoid=(*call.avoid, ended.replica))
                if begun or getattr(error, "begun", False) or tries == MAX_TRIES or self._closed:
                    raise error
        finally:
            self._ids.discard(request.request_id)

    def end_sample(self, request_id: str, index: int) -> None:
        """See `EngineClient.end_sample`. Whoever does not know the request ignores it."""
        if request_id in self._ids:
            self._run_in_background(self._all(EngineReplica.end_sample, request_id, index))

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """See `EngineClient.load_adapter`. A replica that comes later loads it with the first request that names it."""
        try:
            found = await self._all(EngineReplica.load_adapter, source, seconds=None)
        except asyncio.CancelledError:  # some may have it already, of which nobody would know
            self.drop_adapter(source.adapter_id)
            raise
        refused = [one for one in found if isinstance(one, RequestError)]
        infos = [one for one in found if isinstance(one, AdapterInfo)]
        if refused or not infos:
            self.drop_adapter(source.adapter_id)
            raise refused[0] if refused else EngineDeadError("no replica could load this adapter; try again soon")
        self._adapters[source.adapter_id] = source
        return infos[0]

    def drop_adapter(self, adapter_id: int) -> None:
        """See `EngineClient.drop_adapter`."""
        self._adapters.pop(adapter_id, None)
        self._run_in_background(self._all(EngineReplica.drop_adapter, adapter_id))

    async def inspect(self, question: IntrospectionQuery[A]) -> A:
        """See `EngineClient.inspect`. A picture of the cache has the pages of all; any one answers anything else."""
        self._require_engine()
        if isinstance(question, CacheQuery):
            found = await self._all(EngineReplica.inspect, question)
            seen = [one for one in found if not isinstance(one, BaseException)]
            if not seen:
                raise EngineDeadError("no replica answered; ask again")
            return concat_cache_snapshots(list(enumerate(seen)))  # type: ignore[return-value]
        try:
            answer: Any = await self._handle.inspect.remote(question)
        except LOST:
            raise EngineDeadError("the replica ended before it answered; ask again") from None
        if isinstance(answer, EngineError):
            raise answer
        return answer  # type: ignore[no-any-return]

    async def stats(self) -> EngineStats:
        """The sum of all, with each one's in `engines`, in the order of `engines` here."""
        self._require_engine()
        reports = await self._reports(stats=True)
        if not reports:
            raise EngineDeadError("no replica answered; ask again")
        by_name = {report.replica: report.stats for report in reports}
        return sum_stats([by_name.get(engine.name) for engine in self.engines])

    async def close(self) -> None:
        """Look no more; the replicas are the deployment's."""
        self._closed = True
        await self._calls.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    # ---- the replicas ------------------------------------------------------------------------------------------------
    async def start(self) -> ModelInfo:
        """Wait for a replica, and watch them all from then on."""
        await self._calls.listen()
        info: ModelInfo = await self._handle.info.remote()
        if self._config.cache.prefix_caching and not info.is_bidirectional:
            self._keys = PrefixKeys(info, self._config.rotary)
            self._max_blocks = max(1, info.block_size * min(info.num_kv_blocks) // self._keys.block_tokens)
        await self._reports(stats=False)
        self._info = info
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="replicas-watch")
        return info

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._reports(stats=False)

    async def _reports(self, *, stats: bool) -> list[ReplicaReport]:
        """What the replicas say; those that say nothing in time are taken for gone."""
        found = [
            one
            for one in await self._all(EngineReplica.report, stats, self._calls.address)
            if isinstance(one, ReplicaReport)
        ]
        before, self._known = (
            self._known,
            {one.replica: RemoteEngine(one.replica, one.state, one.restarts) for one in found},
        )
        # One that is gone was an engine that ended; where it was only slow, it has not ended after all.
        self._gone_restarts += sum(engine.restarts + 1 for name, engine in before.items() if name not in self._known)
        return found

    async def _all(
        self, method: Callable[..., Any], *arguments: object, seconds: float | None = REPORT_TIMEOUT_SECONDS
    ) -> list[Any]:
        """The answers of all replicas to a method of `EngineReplica`, an exception for one that has none."""
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
