"""Replicated client: several engine processes of one model behind one client.

Starts the engines with one copy of the weights in memory and sends each request to the replica that the prefix router chooses.
If an engine dies, requests that it had not started continue on another; those that it had started fail. `ProcessClient`
supervises each process. Statistics are summed, cache snapshots are concatenated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from windlass.engine.client.child_process import ProcessPlacement
from windlass.engine.client.prefix_router import PrefixKeys, PrefixRouter
from windlass.engine.client.process_client import ProcessClient, SupervisedClient
from windlass.engine.errors import EngineDeadError, EngineError, LoadError, QueueFullError, RequestError
from windlass.engine.host_resources import partition_cores, processor_quota, threads_per_rank
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import A, CacheGroupSnapshot, CacheQuery, CacheSnapshot, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, PersistStats, RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.engine.process_setup import create_memory_file

_logger = logging.getLogger("windlass.engine.client")

_STATES = frozenset({"starting", "ready", "restarting", "failed", "closed"})
_MODELS = 2  # a model and a draft model


class Replica:
    """One engine. in_flight: samples that it has not finished."""

    def __init__(self, number: int, client: ProcessClient) -> None:
        self.number, self.client = number, client
        self.in_flight = 0
        self._prepared: int | None = None  # value of `restarts` when it had loaded the adapters of the others

    @property
    def usable(self) -> bool:
        """Whether it takes requests: it is ready, and has loaded every adapter in use that it could load."""
        return self.client.state == "ready" and self._prepared == self.client.restarts

    def has(self, adapter_id: int | None) -> bool:
        """Whether requests with this adapter can run here. A restarted engine may lack it if its files are gone."""
        return adapter_id is None or adapter_id in self.client.adapter_ids

    async def prepare(self, adapters: dict[int, AdapterSource]) -> str | None:
        """Load these adapters, which may change meanwhile, then take requests. Returns what is wrong with one of them."""
        restarts, problem = self.client.restarts, None
        refused: set[int] = set()
        while missing := adapters.keys() - self.client.adapter_ids - refused:
            source = adapters[missing.pop()]
            try:
                await self.client.load_adapter(source)
            except EngineError as error:
                refused.add(source.adapter_id)
                problem = f"adapter {source.name}: {error}"
            if self.client.restarts != restarts or self.client.state != "ready":
                return problem
        for adapter_id in self.client.adapter_ids - adapters.keys():
            self.client.drop_adapter(adapter_id)
        self._prepared = restarts
        return problem


class ReplicaPlacement:
    """Cores and shared memory files of `replicas` engines, to be closed. Raises LoadError if there are not enough cores.

    leave_one: the last core is left to the server. The memory files are empty until the first engine loads.
    """

    def __init__(self, replicas: int, *, leave_one: bool = False) -> None:
        self._cores = partition_cores(replicas, leave_one=leave_one)
        self._files = tuple(create_memory_file(0) for _ in range(_MODELS))

    @property
    def placements(self) -> list[ProcessPlacement]:
        return [ProcessPlacement(cores, self._files) for cores in self._cores]

    def configs(self, config: EngineConfig) -> list[EngineConfig]:
        """The configuration of each engine."""
        engines, loading = len(self._cores), replace(config.loading, shared_memory=self._files)
        parts = [replace(config.compute, cores=cores) for cores in self._cores]
        if processor_quota() is not None:  # an engine knows its cores, but not how many engines share the quota
            parts = [replace(compute, threads=threads_per_rank(compute, engines=engines)) for compute in parts]
        return [replace(config, replicas=engines, loading=loading, compute=compute) for compute in parts]

    def close(self) -> None:
        """Close the descriptors; running engines keep their mappings. Safe to call twice."""
        files, self._files = self._files, ()
        for number in files:
            with contextlib.suppress(OSError):
                os.close(number)


def sum_stats(parts: Sequence[EngineStats | None]) -> EngineStats:
    """The sum over all engines, None for an unavailable one. `kv_cache_usage` is the maximum."""
    available = [part for part in parts if part is not None]
    values: dict[str, Any] = {}
    for field in fields(EngineStats):
        each = [getattr(part, field.name) for part in available]
        match field.name:
            case "engines":
                continue
            case "kv_cache_usage":
                values[field.name] = max(each, default=0.0)
            case "recomputed_tokens":
                values[field.name] = dict(sum(map(Counter, each), Counter()))
            case "persist":
                values[field.name] = _sum_persist(each)
            case "step_tokens":
                values[field.name] = tuple(map(sum, zip(*filter(None, each), strict=True)))
            case name if name.endswith("_seconds"):
                values[field.name] = tuple(seconds for samples in each for seconds in samples)
            case _:
                values[field.name] = sum(each)
    return EngineStats(**values, engines=tuple(parts))


def _sum_persist(parts: Sequence[PersistStats]) -> PersistStats:
    """All engines share one folder, so its files are not summed."""
    values = {field.name: [getattr(part, field.name) for part in parts] for field in fields(PersistStats)}
    shared = ("disk_bytes", "known_blocks")
    return PersistStats(**{n: max(each, default=0) if n in shared else sum(each) for n, each in values.items()})


def concat_cache_snapshots(snapshots: Sequence[tuple[int, CacheSnapshot]]) -> CacheSnapshot:
    """One snapshot of several caches, each given with the number of its engine."""
    groups: list[CacheGroupSnapshot] = []
    before = 0
    for engine, snapshot in snapshots:
        for group in snapshot.groups:
            owners = tuple(owner if owner < 0 else owner + before for owner in group.owners)
            groups.append(replace(group, owners=owners, engine=engine))
        before += len(snapshot.sequences)
    sequences = tuple(sequence for _, snapshot in snapshots for sequence in snapshot.sequences)
    seconds = max(snapshot.seconds for _, snapshot in snapshots)
    return CacheSnapshot(snapshots[0][1].block_size, tuple(groups), sequences, seconds)


class ReplicatedClient(SupervisedClient):
    """Client of several equal engines.

    clients: not started yet. The first engine loads alone, with the number of replicas in its configuration; the others then
    load with its cache size and context length, and share its weights. `progress` reports the first one.
    """

    has_replicas = True

    def __init__(self, clients: Sequence[ProcessClient], config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._replicas = [Replica(number, client) for number, client in enumerate(clients)]
        self._adapters = {source.adapter_id: source for source in config.adapters.sources}
        self._replica_of: dict[str, Replica | None] = {}  # of running requests; None: moving to another replica
        self._keys: PrefixKeys | None = None
        self._router: PrefixRouter[int] = PrefixRouter(1)
        self._closed = False
        self._tasks: list[asyncio.Task[None]] = []

    # -- the EngineClient protocol -------------------------------------------------------------------------------------
    @property
    def engines(self) -> tuple[ProcessClient, ...]:
        return tuple(replica.client for replica in self._replicas)

    @property
    def state(self) -> str:
        """The state of the engines, "ready" if any of them is."""
        if self._closed:
            return "closed"
        if self._failure:
            return "failed"
        if self.info is None:
            return "starting"
        states = {replica.client.state for replica in self._replicas}
        return next((state for state in ("ready", "restarting", "failed") if state in states), "restarting")

    @property
    def restarts(self) -> int:
        return sum(replica.client.restarts for replica in self._replicas)

    @property
    def adapter_ids(self) -> frozenset[int]:
        """Ids of the adapters that at least one engine has."""
        loaded = {adapter_id for engine in self.engines for adapter_id in engine.adapter_ids}
        return frozenset(self._adapters.keys() & loaded)

    @property
    def failure(self) -> str:
        if self._failure or self.state != "failed":
            return self._failure
        return self._replicas[0].client.failure

    @property
    def crash_report(self) -> Path | None:
        reports = [report for replica in self._replicas if (report := replica.client.crash_report) is not None]
        return max(reports, key=lambda report: report.name, default=None)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """A request that its replica has not started when it dies moves to another one."""
        request_id, samples = request.request_id, request.sampling.n
        if request_id in self._replica_of:
            raise RequestError(f"a request with the id {request_id!r} is already running", "request_id")
        digests = [] if self._keys is None else self._keys.of(request)
        tried: list[int] = []
        self._replica_of[request_id] = None
        try:
            while True:
                replica = self._choose(request, digests, tried)
                tried.append(replica.number)
                begun = False
                self._replica_of[request_id] = replica
                replica.in_flight += samples
                try:
                    async with contextlib.aclosing(replica.client.generate(request)) as stream:
                        async for output in stream:
                            begun = True
                            yield output
                    return
                except EngineDeadError as error:
                    if begun or error.begun or not self._has_alternative(request, tried):
                        raise
                except QueueFullError:
                    if begun or not self._has_alternative(request, tried):
                        raise
                finally:
                    replica.in_flight -= samples
                    self._replica_of[request_id] = None
        finally:
            del self._replica_of[request_id]

    def end_sample(self, request_id: str, index: int) -> None:
        if (replica := self._replica_of.get(request_id)) is not None:
            replica.client.end_sample(request_id, index)

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """Load an adapter on all engines; one that is being restarted loads it before it takes requests."""
        usable = self._usable()
        self._adapters[source.adapter_id] = source  # first, so that engines that restart meanwhile load it too
        loads = (one.client.load_adapter(source) for one in usable)
        try:
            results = await asyncio.gather(*loads, return_exceptions=True)
        except asyncio.CancelledError:  # some engines may have loaded it already
            self.drop_adapter(source.adapter_id)
            raise
        infos = [result for result in results if isinstance(result, AdapterInfo)]
        # A replica that died meanwhile loads it when it restarts.
        errors = [result for result in results if isinstance(result, BaseException)]
        fatal = [error for error in errors if not isinstance(error, EngineDeadError)] or (errors if not infos else [])
        if fatal:
            self.drop_adapter(source.adapter_id)
            raise fatal[0]
        return infos[0]

    def drop_adapter(self, adapter_id: int) -> None:
        self._adapters.pop(adapter_id, None)
        for replica in self._replicas:
            replica.client.drop_adapter(adapter_id)

    async def inspect(self, query: IntrospectionQuery[A]) -> A:
        """Answer a query: cache snapshots contain the caches of all engines, others come from the least busy engine."""
        usable = self._usable()
        if not isinstance(query, CacheQuery):
            return await min(usable, key=lambda replica: replica.in_flight).client.inspect(query)
        answers = await asyncio.gather(*(one.client.inspect(query) for one in usable), return_exceptions=True)
        snapshots = [
            (one.number, answer)
            for one, answer in zip(usable, answers, strict=True)
            if not isinstance(answer, BaseException)
        ]
        if not snapshots:
            raise next(answer for answer in answers if isinstance(answer, BaseException))
        return concat_cache_snapshots(snapshots)  # type: ignore[return-value]

    async def stats(self) -> EngineStats:
        """The sum over all engines, with each one's statistics in `engines`."""
        self._usable()
        results = await asyncio.gather(*(replica.client.stats() for replica in self._replicas), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, EngineDeadError):
                raise error
        return sum_stats([part if isinstance(part, EngineStats) else None for part in results])

    async def close(self) -> None:
        self._closed = True
        self._notify()
        await asyncio.gather(*(replica.client.close() for replica in self._replicas))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- starting ------------------------------------------------------------------------------------------------------
    def spawn(self) -> None:
        """Start the first child now; needs no event loop."""
        self._replicas[0].client.spawn()

    def start_nowait(self) -> None:
        self.spawn()
        if not self._tasks:
            start = asyncio.get_running_loop().create_task(self._start(), name="replicas-start")
            self._tasks.append(start)

    def kill(self, *, reap: bool = True) -> None:
        """Kill all children. Needs no event loop. reap: see `ChildProcess.kill`."""
        for replica in self._replicas:
            replica.client.kill(reap=reap)

    async def _start(self) -> None:
        try:
            info = await self._load()
        except LoadError as error:
            self._failure = str(error)
            self._notify()
            self.kill(reap=False)
            return
        if self._config.cache.prefix_caching and not info.is_bidirectional:
            self._keys = PrefixKeys(info, self._config.rotary)
            tokens = info.block_size * min(info.num_kv_blocks)
            self._router = PrefixRouter(self._keys.block_tokens, tokens // self._keys.block_tokens)
        for replica in self._replicas:
            await replica.prepare(self._adapters)
        self.info = replace(info, replicas=len(self._replicas))
        self._notify()
        create_task = asyncio.get_running_loop().create_task
        self._tasks += [
            create_task(self._supervise(replica), name=f"replica-{replica.number}") for replica in self._replicas
        ]

    async def _load(self) -> ModelInfo:
        """Load the first engine, then the others with equal sizes. Raises LoadError."""
        first, *others = (replica.client for replica in self._replicas)
        first.progress = self.progress
        first.start_nowait()
        info = await first.wait_ready()
        for client in self.engines:
            cache = replace(client.config.cache, memory=info.kv_cache_bytes)
            client.config = replace(client.config, replicas=1, max_model_len=info.max_model_len, cache=cache)
        for client in others:
            client.start_nowait()
        waiting = [asyncio.ensure_future(client.wait_ready()) for client in others]
        try:
            infos = await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()
        if any(one.fingerprint != info.fingerprint for one in infos):
            raise LoadError("the files of the model changed while they were read: start the server again")
        return info

    async def _supervise(self, replica: Replica) -> None:
        """Follow the state of one engine, and load the adapters of the others after a restart."""
        client = replica.client
        while (state := client.state) != "closed":
            if state == "ready" and not replica.usable:
                self._router.forget(replica.number)
                if (problem := await replica.prepare(self._adapters)) is not None:
                    _logger.error("replica %d: %s", replica.number, problem)
            if state == "failed" and self.state != "failed":
                _logger.error(
                    "replica %d has failed permanently; the other replicas continue: %s", replica.number, client.failure
                )
            self._notify()
            if client.state == state:
                await client.wait_state(*_STATES - {state})

    # -- helpers -------------------------------------------------------------------------------------------------------
    def _choose(self, request: EngineRequest, digests: list[bytes], tried: Sequence[int]) -> Replica:
        usable = [replica for replica in self._usable() if replica.number not in tried]
        # If no engine has the adapter, any of them refuses the request.
        usable = [replica for replica in usable if replica.has(request.adapter)] or usable
        number = self._router.choose(digests, {replica.number: replica.in_flight for replica in usable})
        self._router.sent(number, digests)
        return self._replicas[number]

    def _has_alternative(self, request: EngineRequest, tried: Sequence[int]) -> bool:
        others = (one for one in self._replicas if one.usable and one.has(request.adapter))
        return not self._closed and any(one.number not in tried for one in others)

    def _usable(self) -> list[Replica]:
        """The replicas that take requests. Raises EngineDeadError if there are none."""
        usable = [replica for replica in self._replicas if replica.usable]
        if self.state != "ready" or not usable:
            raise self._unavailable()
        return usable
