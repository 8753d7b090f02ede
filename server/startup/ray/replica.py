"""Replicas of a Ray deployment: the engine actor, request routing and autoscaling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from windlass._version import __version__
from windlass.engine.client.prefix_router import PrefixRouter
from windlass.engine.core.messages import picklable_error
from windlass.engine.errors import EngineDeadError, EngineError
from windlass.engine.interface.introspection import CacheQuery, CacheSnapshot, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, RequestOutput
from windlass.engine.process_setup import disable_core_dumps
from windlass.server.startup.engines import Engines, SupervisedEngine
from windlass.server.startup.launch import crash_folder, prepare
from windlass.server.startup.ray import wire

CACHE_HELD = "cache_held"  # name of the metric: share of a replica's cache that running requests hold, 0 to 1
TARGET_CACHE_USE = 0.8  # of all caches together; above it a replica is added before requests wait or are preempted
POLL_SECONDS = 2.0  # between two inspections of the cache, which take place between two engine steps
GATHER_SECONDS = 0.01  # in which outputs of one stream are gathered, as Ray takes half a millisecond for each item

_logger = logging.getLogger("windlass.server")


def cache_held(snapshot: CacheSnapshot) -> float:
    """The share of the fullest KV group that running requests hold, without blocks that are only cached."""
    return max((sum(group.held) + sum(group.shared)) / group.num_blocks for group in snapshot.groups)


def scale_by_requests_and_cache(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """The number of replicas that Ray's own rule asks for, or that brings cache use to TARGET_CACHE_USE, whichever is more.

    Called by Ray's controller, which applies the bounds and delays of the deployment.
    """
    wanted, state = replica_queue_length_autoscaling_policy(context)
    held = (context.aggregated_metrics or {}).get(CACHE_HELD, {})
    if held:
        # Replicas that have not reported yet are assumed to be as full as the others on average.
        wanted = max(wanted, context.current_num_replicas * sum(held.values()) / len(held) / TARGET_CACHE_USE)
    return wanted, state


class PrefixRequestRouter(RequestRouter):
    """Routes a `ReplicaCall` by its longest cached prefix unless that replica is too busy, all else to the least busy."""

    def initialize_state(self, block_tokens: int = 32, **kwargs: Any) -> None:
        """block_tokens: per digest of a call. Raises TypeError for other options."""
        if kwargs:
            raise TypeError(f"unknown options: {', '.join(kwargs)}")
        self._block_tokens = block_tokens
        self._prefixes: PrefixRouter[ReplicaID] | None = None
        self._requests: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then the others in order of their load."""
        call = _get_call(pending_request)
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all of them are full
        load = {replica_id: self._requests.get(replica_id, 0) for replica_id in by_id}
        ranked = sorted(by_id, key=lambda replica_id: load[replica_id])
        if call is None or not ranked:
            return [[by_id[replica_id]] for replica_id in ranked]
        candidates = {one: requests for one, requests in load.items() if one.unique_id not in call.avoid} or load
        router = self._router(call)
        chosen = router.choose(call.digests, candidates)
        router.sent(chosen, call.digests)  # now, so that requests that arrive meanwhile find it there
        others = [one for one in ranked if one != chosen and one in candidates]
        return [[by_id[replica_id]] for replica_id in (chosen, *others)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note the replica that accepted the call, which may not be the first choice."""
        if (call := _get_call(pending_request)) is not None:
            self._router(call).sent(replica_id, call.digests)

    # Requests of each replica: counted here too, as Serve forgets its own count after a while without news.
    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._requests[replica_id] = self._requests.get(replica_id, 0) + 1

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        super().decrement_queue_len_cache(replica_id)
        self._requests[replica_id] = max(0, self._requests.get(replica_id, 0) - 1)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._requests[replica_id] = num_ongoing_requests

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._retain_only([replica.replica_id for replica in replicas])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._retain_only(list(self.curr_replicas))

    def _retain_only(self, replica_ids: Sequence[ReplicaID]) -> None:
        kept = set(replica_ids)
        self._requests = {one: requests for one, requests in self._requests.items() if one in kept}
        if self._prefixes is not None:
            self._prefixes.retain_only(replica_ids)

    def _router(self, call: wire.ReplicaCall) -> PrefixRouter[ReplicaID]:
        if self._prefixes is None:
            self._prefixes = PrefixRouter(self._block_tokens, call.max_blocks)
        return self._prefixes


def _get_call(pending_request: PendingRequest | None) -> wire.ReplicaCall | None:
    found = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return found if isinstance(found, wire.ReplicaCall) else None


class EngineReplica:
    """One engine. Ray Serve calls its methods on the event loop of the replica's actor."""

    async def __init__(self, spec: wire.DeploymentSpec) -> None:  # type: ignore[misc]
        spec.check()
        disable_core_dumps()
        self._id = serve.get_replica_context().replica_id.unique_id
        self._channels = wire.OutputChannels(self._id)
        self._held, self._next_poll = 0.0, 0.0
        self._engines = Engines(spec.engine, spec.log_level)
        try:
            path, engine, _ = await asyncio.to_thread(prepare, spec.model, spec.engine, spec.server)
            self._client: SupervisedEngine = self._engines.client(
                engine, path, crash_folder(spec.server), engines_per_machine=spec.engines_per_machine
            )
            self._info = await self._client.start()
        except BaseException:
            self._engines.close()
            raise

    async def check_health(self) -> None:
        """Raise if the engine has failed: Serve then starts another replica."""
        if self._client.state in ("failed", "closed"):
            raise RuntimeError(self._client.failure or "the engine was closed")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Metrics for autoscaling; Ray asks twice a second if the number of replicas may change."""
        if time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + POLL_SECONDS
            with contextlib.suppress(EngineError):  # an engine that restarts has nothing new
                self._held = cache_held(await self._client.inspect(CacheQuery()))
        return {CACHE_HELD: self._held}

    async def info(self) -> ModelInfo:
        return self._info

    async def generate(self, call: wire.ReplicaCall) -> AsyncGenerator[wire.CallEvent, None]:
        """Batches of outputs; an error is the last item.

        If there is a channel, outputs go there, and the only item is None at the end: Ray then only counts and cancels the call,
        and ends it with this replica.
        """
        if (channel := await self._channels.to(call.channel)) is not None:
            await channel.run(self._generate_over(channel, call))
            yield None
            return
        try:
            async for outputs in batch_outputs(await self._begin(call)):
                yield outputs
        except EngineError as error:
            yield wire.CallFailedError(self._id, picklable_error(error))

    async def _generate_over(self, channel: wire.OutputChannel, call: wire.ReplicaCall) -> None:
        failure: wire.CallFailedError | None = None
        try:
            async with contextlib.aclosing(await self._begin(call)) as outputs:
                async for output in outputs:
                    channel.send(call.number, without_local_time(output))
        except Exception as error:  # the ingress needs an end in any case
            if not isinstance(error, EngineError):
                _logger.exception("a call failed")
            failure = wire.CallFailedError(self._id, picklable_error(error))
        channel.send(call.number, failure)

    async def _begin(self, call: wire.ReplicaCall) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a call, after loading its adapter. Raises EngineError."""
        if call.version != __version__:
            raise EngineError(wire.version_mismatch(call.version))
        if call.adapter is not None and call.adapter.adapter_id not in self._client.adapter_ids:
            with contextlib.suppress(EngineDeadError):  # the request itself reports it
                await self._client.load_adapter(call.adapter)
        return self._client.generate(call.to_local_request())

    async def end_sample(self, request_id: str, index: int) -> None:
        self._client.end_sample(request_id, index)

    async def report(self, stats: bool, address: wire.ReceiverAddress | None = None) -> wire.ReplicaReport:
        """State of the replica, with statistics on request; each sample of those is returned once.

        address: of the calling ingress; a channel to it is opened.
        """
        await self._channels.to(address)
        engine_stats: EngineStats | None = None
        if stats:
            with contextlib.suppress(EngineError):
                engine_stats = await self._client.stats()
        return wire.ReplicaReport(self._id, self._client.state, self._client.restarts, engine_stats)

    async def inspect(self, query: IntrospectionQuery[Any]) -> Any:
        """The result, or the EngineError."""
        try:
            return await self._client.inspect(query)
        except EngineError as error:
            return picklable_error(error)

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo | EngineError:
        try:
            return await self._client.load_adapter(source)
        except EngineError as error:
            return picklable_error(error)

    async def drop_adapter(self, adapter_id: int) -> None:
        self._client.drop_adapter(adapter_id)


def without_local_time(output: RequestOutput) -> RequestOutput:
    """The output without the time on this machine's clock."""
    return output if output.scheduled_at is None else replace(output, scheduled_at=None)


async def batch_outputs(stream: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[list[RequestOutput], None]:
    """Batches of the available outputs, since the transport costs per item. It closes the stream at its end."""
    waiting: list[RequestOutput] = []
    arrived = asyncio.Event()

    async def pump() -> None:
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    waiting.append(without_local_time(output))
                    arrived.set()
        finally:
            arrived.set()

    pumping = asyncio.ensure_future(pump())
    pause = 0.0
    try:
        while waiting or not pumping.done():
            if not waiting:
                await arrived.wait()
            if not pumping.done():
                await asyncio.sleep(pause)
            arrived.clear()
            outputs, waiting[:] = waiting[:], []
            if outputs:
                pause = GATHER_SECONDS  # the first batch is not delayed
                yield outputs
        await pumping  # raises its error
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
