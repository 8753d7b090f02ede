"""Replicated client: several engine processes of one model behind one client.

Starts them with one copy of the weights in memory and sends each request to the replica that the prefix router chooses. When an
engine dies, requests that it had not started continue on another; those that it had started fail. `ProcessClient` supervises
each process. Statistics are summed, cache snapshots are concatenated.
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
from windlass.engine.client.engine_client import EngineClient
from windlass.engine.client.prefix_router import PrefixKeys, PrefixRouter
from windlass.engine.client.process_client import ProcessClient
from windlass.engine.core.messages import ProgressCallback
from windlass.engine.errors import EngineDeadError, EngineError, LoadError, QueueFullError, RequestError
from windlass.engine.host_resources import partition_cores, processor_quota, threads_per_rank
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import A, CacheGroupSnapshot, CacheQuery, CacheSnapshot, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, PersistStats, RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.engine.process_setup import create_memory_file


class Replica:
    """in_flight: samples of requests that it has to finish."""

    def __init__(self, number: int, client: ProcessClient) -> None:
        self.number, self.client = number, client
        self.in_flight = 0
        self._prepared: int | None = None  # restarts of the engine that has all that the others have

    @property
    def usable(self) -> bool:
        """Whether it takes requests: it has loaded, and every adapter that requests may name, if it could."""
        return self.client.state == "ready" and self._prepared == self.client.restarts

    def has(self, adapter_id: int | None) -> bool:
        """Whether requests with this adapter can run here: its files may have gone before this engine was started again."""
        return adapter_id is None or adapter_id in self.client.adapter_ids

    async def prepare(self, adapters: dict[int, AdapterSource]) -> str | None:
        """Take requests, once it has these adapters, which may change meanwhile. Returns what is amiss with one of them."""
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


_MODELS = 2  # a model and a draft model


class ReplicaPlacement:
    """Seats for so many engines; raises LoadError where there are not. leave_one: the last core is the server's. `close` it.

    Nothing lies in the memory files until the first engine loads.
    """

    def __init__(self, replicas: int, *, leave_one: bool = False) -> None:
        self._cores = partition_cores(replicas, leave_one=leave_one)
        self._files = tuple(create_memory_file(0) for _ in range(_MODELS))

    @property
    def placements(self) -> list[ProcessPlacement]:
        return [ProcessPlacement(cores, self._files) for cores in self._cores]

    def configs(self, config: EngineConfig) -> list[EngineConfig]:
        """What each engine loads."""
        engines, loading = len(self._cores), replace(config.loading, shared_memory=self._files)
        placements = [replace(config.compute, cores=cores) for cores in self._cores]
        if processor_quota() is not None:  # an engine knows its cores, and not with how many it shares the quota
            placements = [
                replace(compute, threads=threads_per_rank(compute, engines=engines)) for compute in placements
            ]
        return [replace(config, replicas=engines, loading=loading, compute=compute) for compute in placements]

    def close(self) -> None:
        """Give the descriptors back; engines that run keep what they have mapped. Safe to call twice."""
        files, self._files = self._files, ()
        for number in files:
            with contextlib.suppress(OSError):
                os.close(number)


def sum_stats(parts: Sequence[EngineStats | None]) -> EngineStats:
    """The statistics of all engines; None for one that has none now. `kv_cache_usage` is that of the fullest."""
    known = [part for part in parts if part is not None]
    values: dict[str, Any] = {}
    for field in fields(EngineStats):
        each = [getattr(part, field.name) for part in known]
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
    """All engines keep their blocks in one folder, so what lies there is not added up."""
    found = {field.name: [getattr(part, field.name) for part in parts] for field in fields(PersistStats)}
    shared = ("disk_bytes", "known_blocks")
    return PersistStats(**{n: max(each, default=0) if n in shared else sum(each) for n, each in found.items()})


def concat_cache_snapshots(pictures: Sequence[tuple[int, CacheSnapshot]]) -> CacheSnapshot:
    """One picture of several caches, each with the number of its engine."""
    groups: list[CacheGroupSnapshot] = []
    before = 0
    for engine, picture in pictures:
        for group in picture.groups:
            owners = tuple(owner if owner < 0 else owner + before for owner in group.owners)
            groups.append(replace(group, owners=owners, engine=engine))
        before += len(picture.sequences)
    sequences = tuple(sequence for _, picture in pictures for sequence in picture.sequences)
    seconds = max(picture.seconds for _, picture in pictures)
    return CacheSnapshot(pictures[0][1].block_size, tuple(groups), sequences, seconds)


_logger = logging.getLogger("windlass.engine.client.engine_client")

_STATES = frozenset({"starting", "ready", "restarting", "failed", "closed"})


class ReplicatedClient(EngineClient):
    """Over several.

    clients: not started; the first one's configuration says how many there are. The others load what the first has come to:
    as much cache, as long a context, the weights where it has put them.
    progress: called with (stage, done, total) while the first one loads.
    """

    def __init__(self, clients: Sequence[ProcessClient], config: EngineConfig) -> None:
        self.progress: ProgressCallback | None = None
        self._config = config
        self._replicas = [Replica(number, client) for number, client in enumerate(clients)]
        self._adapters = {source.adapter_id: source for source in config.adapters.sources}
        self._replica_of: dict[str, Replica | None] = {}  # of requests that run; None: on their way to another
        self._keys: PrefixKeys | None = None
        self._router: PrefixRouter[int] = PrefixRouter(1)
        self._info: ModelInfo | None = None
        self._failure = ""
        self._closed = False
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # ---- the EngineClient protocol -----------------------------------------------------------------------------------
    @property
    def engines(self) -> tuple[ProcessClient, ...]:
        return tuple(replica.client for replica in self._replicas)

    @property
    def has_replicas(self) -> bool:
        return True

    @property
    def info(self) -> ModelInfo | None:
        return self._info

    @property
    def state(self) -> str:
        """ "ready" while any of them is."""
        if self._closed:
            return "closed"
        if self._failure:
            return "failed"
        if self._info is None:
            return "starting"
        states = {replica.client.state for replica in self._replicas}
        return next((state for state in ("ready", "restarting", "failed") if state in states), "restarting")

    @property
    def restarts(self) -> int:
        return sum(replica.client.restarts for replica in self._replicas)

    @property
    def adapter_ids(self) -> frozenset[int]:
        """Of the adapters that requests may name: those that any of them has."""
        there = {adapter_id for engine in self.engines for adapter_id in engine.adapter_ids}
        return frozenset(self._adapters.keys() & there)

    @property
    def failure(self) -> str:
        """Why `state` is "failed", one line; empty otherwise."""
        if self._failure or self.state != "failed":
            return self._failure
        return self._replicas[0].client.failure

    @property
    def crash_report(self) -> Path | None:
        """The report of the last death, where there is one."""
        found = [report for replica in self._replicas if (report := replica.client.crash_report) is not None]
        return max(found, key=lambda report: report.name, default=None)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.generate`."""
        request_id, samples = request.request_id, request.sampling.n
        if request_id in self._replica_of:
            raise RequestError(f"a request with the id {request_id!r} is already running", "request_id")
        digests = self._digests(request)
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
        """See `EngineClient.end_sample`."""
        if (replica := self._replica_of.get(request_id)) is not None:
            replica.client.end_sample(request_id, index)

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """See `EngineClient.load_adapter`. All of them have it afterwards; one that is being restarted has it before it takes
        requests."""
        usable = self._usable()
        self._adapters[source.adapter_id] = source  # before the others are waited for: they load what is there
        loads = (one.client.load_adapter(source) for one in usable)
        try:
            results = await asyncio.gather(*loads, return_exceptions=True)
        except asyncio.CancelledError:  # one may have it already, of which nobody would know
            self.drop_adapter(source.adapter_id)
            raise
        infos = [result for result in results if isinstance(result, AdapterInfo)]
        # A replica that died over it comes back with it.
        errors = [result for result in results if isinstance(result, BaseException)]
        fatal = [error for error in errors if not isinstance(error, EngineDeadError)] or (errors if not infos else [])
        if fatal:
            self.drop_adapter(source.adapter_id)
            raise fatal[0]
        return infos[0]

    def drop_adapter(self, adapter_id: int) -> None:
        """See `EngineClient.drop_adapter`."""
        self._adapters.pop(adapter_id, None)
        for replica in self._replicas:
            replica.client.drop_adapter(adapter_id)

    async def inspect(self, question: IntrospectionQuery[A]) -> A:
        """See `EngineClient.inspect`. A picture of the cache has the pages of all; anything else is asked of the least busy."""
        usable = self._usable()
        if not isinstance(question, CacheQuery):
            return await min(usable, key=lambda replica: replica.in_flight).client.inspect(question)
        asked = await asyncio.gather(*(one.client.inspect(question) for one in usable), return_exceptions=True)
        seen = [
            (one.number, found)
            for one, found in zip(usable, asked, strict=True)
            if not isinstance(found, BaseException)
        ]
        if not seen:
            raise next(found for found in asked if isinstance(found, BaseException))
        return concat_cache_snapshots(seen)  # type: ignore[return-value]

    async def stats(self) -> EngineStats:
        """The sum of all, with each one's in `engines`; see `ProcessClient.stats`."""
        self._require_usable()
        found = await asyncio.gather(*(replica.client.stats() for replica in self._replicas), return_exceptions=True)
        parts = [part if isinstance(part, EngineStats) else None for part in found]
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, EngineDeadError):
                raise error
        return sum_stats(parts)

    async def close(self) -> None:
        """End all engines; see `ProcessClient.close`."""
        self._closed = True
        self._notify()
        await asyncio.gather(*(replica.client.close() for replica in self._replicas))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- starting ----------------------------------------------------------------------------------------------------
    def spawn(self) -> None:
        """Start the first child now; needs no event loop."""
        self._replicas[0].client.spawn()

    def start_nowait(self) -> None:
        """Begin to load and supervise, in the running event loop."""
        self.spawn()
        if not self._tasks:
            start = asyncio.get_running_loop().create_task(self._start(), name="replicas-start")
            self._tasks.append(start)

    async def wait_ready(self) -> ModelInfo:
        """Wait until requests are served, by all of them; raises LoadError if that will not happen."""
        state = await self.wait_state("ready", "failed", "closed")
        if state != "ready" or self._info is None:
            raise LoadError(self._failure or "the engine was closed before it was ready")
        return self._info

    async def start(self) -> ModelInfo:
        """start_nowait, then wait_ready."""
        self.start_nowait()
        return await self.wait_ready()

    async def wait_state(self, *states: str) -> str:
        """Wait until `state` is one of `states` and return it."""
        while self.state not in states:
            await self._changed.wait()
        return self.state

    def kill(self, *, reap: bool = True) -> None:
        """End all children at once, without a goodbye. Needs no event loop. reap: see `ChildProcess.kill`."""
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
        self._keys = (
            None
            if info.is_bidirectional or not self._config.cache.prefix_caching
            else PrefixKeys(info, self._config.rotary)
        )
        if self._keys is not None:
            tokens = info.block_size * min(info.num_kv_blocks)
            self._router = PrefixRouter(self._keys.block_tokens, tokens // self._keys.block_tokens)
        for replica in self._replicas:
            await replica.prepare(self._adapters)
        self._info = replace(info, replicas=len(self._replicas))
        self._notify()
        follow = asyncio.get_running_loop().create_task
        self._tasks += [
            follow(self._supervise(replica), name=f"replica-{replica.number}") for replica in self._replicas
        ]

    async def _load(self) -> ModelInfo:
        """The first one, then the others as it is. Raises LoadError."""
        first, *others = (replica.client for replica in self._replicas)
        first.progress = self.progress
        first.start_nowait()
        info = await first.wait_ready()
        for replica in self._replicas:
            replica.client.reconfigure(replica_config(replica.client.config, info))
        for client in others:
            client.start_nowait()
        waiting = [asyncio.ensure_future(client.wait_ready()) for client in others]
        try:
            found = await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()
        if any(one.fingerprint != info.fingerprint for one in found):
            raise LoadError("the files of the model changed while they were read: start the server again")
        return info

    async def _supervise(self, replica: Replica) -> None:
        """Notice what becomes of one engine, and bring a new one to what the others have."""
        client = replica.client
        while (state := client.state) != "closed":
            if state == "ready" and not replica.usable:
                self._router.forget(replica.number)
                if (problem := await replica.prepare(self._adapters)) is not None:
                    _logger.error("replica %d: %s", replica.number, problem)
            if state == "failed" and self.state != "failed":
                _logger.error("replica %d was given up, the others go on: %s", replica.number, client.failure)
            self._notify()
            if client.state == state:
                await client.wait_state(*_STATES - {state})

    # ---- small parts -------------------------------------------------------------------------------------------------
    def _digests(self, request: EngineRequest) -> list[bytes]:
        return [] if self._keys is None else self._keys.of(request)

    def _choose(self, request: EngineRequest, digests: list[bytes], tried: Sequence[int]) -> Replica:
        usable = [replica for replica in self._usable() if replica.number not in tried]
        usable = [
            replica for replica in usable if replica.has(request.adapter)
        ] or usable  # which tells that it is gone
        number = self._router.choose(digests, {replica.number: replica.in_flight for replica in usable})
        self._router.sent(number, digests)
        return self._replicas[number]

    def _has_alternative(self, request: EngineRequest, tried: Sequence[int]) -> bool:
        others = (one for one in self._replicas if one.usable and one.has(request.adapter))
        return not self._closed and any(one.number not in tried for one in others)

    def _usable(self) -> list[Replica]:
        self._require_usable()
        return [replica for replica in self._replicas if replica.usable]

    def _require_usable(self) -> None:
        if self.state == "ready" and any(replica.usable for replica in self._replicas):
            return
        match self.state:
            case "starting":
                raise EngineDeadError("the model is still loading; try again soon")
            case "failed":
                raise EngineDeadError(f"the engines failed and were given up: {self.failure}")
            case "closed":
                raise EngineDeadError("the engine was closed")
        raise EngineDeadError("the engines are being restarted; try again soon")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def replica_config(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """What an engine loads that is to be like one that has loaded."""
    cache = replace(config.cache, memory=info.kv_cache_bytes)
    return replace(config, replicas=1, max_model_len=info.max_model_len, cache=cache)
