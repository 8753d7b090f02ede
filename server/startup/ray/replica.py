"""Replicas of a deployment: the engine actor, request routing and autoscaling."""

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
from windlass.server.startup.engines import Engines, SupervisedEngine
from windlass.server.startup.launch import crash_folder, prepare
from windlass.server.startup.ray.wire import (
    CallFailed,
    DeploymentSpec,
    Finished,
    Item,
    OutputChannel,
    OutputChannels,
    ReceiverAddress,
    ReplicaCall,
    ReplicaReport,
    version_mismatch,
)

CACHE_HELD = "cache_held"  # the name of the measure: the share of a replica's cache that running requests hold, 0 to 1

TARGET_CACHE_USE = (
    0.8  # of all caches together; beyond that another replica helps before requests wait, or are computed twice
)


def cache_held(picture: CacheSnapshot) -> float:
    """The share of the fullest KV group that running requests hold. Pages that are only kept for later ones do not count."""
    return max((sum(group.held) + sum(group.shared)) / group.num_blocks for group in picture.groups)


def scale_by_requests_and_cache(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """As many replicas as requests need by Ray's own rule, or as keep cache use at TARGET_CACHE_USE, whichever is more.

    Called by Ray's controller, which then keeps to the bounds and the delays of the deployment.
    """
    wanted, state = replica_queue_length_autoscaling_policy(context)
    held = (context.aggregated_metrics or {}).get(CACHE_HELD, {})
    if held:
        # Of replicas that have not reported yet nothing is known: as full as the others, on average.
        wanted = max(wanted, context.current_num_replicas * sum(held.values()) / len(held) / TARGET_CACHE_USE)
    return wanted, state


class PrefixRequestRouter(RequestRouter):
    """The longest cached prefix wins, unless its replica is too busy; what is no `ReplicaCall` goes to the least busy."""

    def initialize_state(self, block_tokens: int = 32, **kwargs: Any) -> None:
        """block_tokens: of a call's digests. Raises TypeError for anything else."""
        if kwargs:
            raise TypeError(f"unknown: {', '.join(kwargs)}")
        self._block_tokens = block_tokens
        self._prefixes: PrefixRouter[ReplicaID] | None = None
        self._requests: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that is chosen, and behind it the others, the least busy first."""
        call = _get_call(pending_request)
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where all of them are full
        load = {replica_id: self._requests.get(replica_id, 0) for replica_id in by_id}
        ranked = sorted(by_id, key=lambda replica_id: load[replica_id])
        if call is None or not ranked:
            return [[by_id[replica_id]] for replica_id in ranked]
        open_to_it = {one: requests for one, requests in load.items() if one.unique_id not in call.avoid} or load
        router = self._router(call)
        chosen = router.choose(call.digests, open_to_it)
        router.sent(chosen, call.digests)  # now, so that whoever comes meanwhile finds it there
        others = [one for one in ranked if one != chosen and one in open_to_it]
        return [[by_id[replica_id]] for replica_id in (chosen, *others)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken it, which may be another than was chosen first."""
        if (call := _get_call(pending_request)) is not None:
            self._router(call).sent(replica_id, call.digests)

    # How many requests each replica has: what Serve itself counts, which it forgets where it hears nothing new for a while.
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

    def _router(self, call: ReplicaCall) -> PrefixRouter[ReplicaID]:
        if self._prefixes is None:
            self._prefixes = PrefixRouter(self._block_tokens, call.max_blocks)
        return self._prefixes


def _get_call(pending_request: PendingRequest | None) -> ReplicaCall | None:
    found = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return found if isinstance(found, ReplicaCall) else None


_logger = logging.getLogger("windlass.server")

POLL_SECONDS = 2.0  # between looks at the cache: its books are read between two steps

GATHER_SECONDS = 0.01  # in which outputs of one stream come together, as each item costs half a millisecond on its way


class EngineReplica:
    """start: see there. Its methods are called by Ray Serve, in the event loop of the replica's actor."""

    async def __init__(self, start: DeploymentSpec) -> None:  # type: ignore[misc]
        start.check()
        self._id = serve.get_replica_context().replica_id.unique_id
        self._channels = OutputChannels(self._id)
        self._held, self._next_poll = 0.0, 0.0
        self._engines = Engines(start.engine, start.log_level)
        try:
            path, engine, _ = await asyncio.to_thread(prepare, start.model, start.engine, start.server)
            folder = crash_folder(start.server)
            self._client: SupervisedEngine = self._engines.client(
                engine, path, folder, engines_per_machine=start.engines_per_machine
            )
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
        if time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + POLL_SECONDS
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
        if (channel := await self._channels.to(call.channel)) is not None:
            await channel.run(self._generate_over(channel, call))
            yield Finished()
            return
        try:
            async for outputs in batch_outputs(await self._begin(call)):
                yield outputs
        except EngineError as error:
            yield CallFailed(self._id, picklable_error(error))

    async def _generate_over(self, channel: OutputChannel, call: ReplicaCall) -> None:
        last: CallFailed | Finished = Finished()
        try:
            async with contextlib.aclosing(await self._begin(call)) as outputs:
                async for output in outputs:
                    channel.send(call.number, without_local_time(output))
        except Exception as error:  # whatever it is, the ingress waits for an end
            if not isinstance(error, EngineError):
                _logger.exception("a call failed")
            last = CallFailed(self._id, picklable_error(error))
        channel.send(call.number, last)

    async def _begin(self, call: ReplicaCall) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a call, whose adapter is loaded first. Raises EngineError."""
        if call.version != __version__:
            raise EngineError(version_mismatch(call.version))
        if call.adapter is not None and call.adapter.adapter_id not in self._client.adapter_ids:
            with contextlib.suppress(EngineDeadError):  # told by the request itself
                await self._client.load_adapter(call.adapter)
        return self._client.generate(call.to_local_request())

    async def end_sample(self, request_id: str, index: int) -> None:
        self._client.end_sample(request_id, index)

    async def report(self, stats: bool, address: ReceiverAddress | None = None) -> ReplicaReport:
        """How it is; with its statistics if they are asked for, each sample of which is handed out once.

        address: of the ingress that asks, to which there is a lane from then on.
        """
        await self._channels.to(address)
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


def without_local_time(output: RequestOutput) -> RequestOutput:
    """Without the time it has by a clock of this machine."""
    return output if output.scheduled_at is None else replace(output, scheduled_at=None)


async def batch_outputs(stream: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[list[RequestOutput], None]:
    """What a stream gives, all that is there at once: it is the way of an item that costs. The stream is closed with it."""
    waiting: list[RequestOutput] = []
    news = asyncio.Event()

    async def pump() -> None:
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    waiting.append(without_local_time(output))
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
