"""Typical defects, each planted into the product code while a context is open. Simulations must detect all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.block_pool import BlockPool
from windlass.engine.client.process_client import ProcessClient
from windlass.engine.client.replicated_client import ReplicatedClient
from windlass.engine.client.request_router import RequestRouter
from windlass.engine.core.messages import Message, StepDone
from windlass.engine.errors import EngineDeadError
from windlass.engine.scheduling.request_queue import Deadlines, SchedulerQueues
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.server.http.uvicorn_protocol import HttpProtocol
from windlass.server.serving.streaming import Exchange
from windlass.server.text.workers.pool import FairLimiter

Planted = dict[str, Callable[[], AbstractContextManager[Any]]]
DEFECTS: Planted = {}
REPLICA_DEFECTS: Planted = {}


def defect(owner: type, name: str, defects: Planted = DEFECTS) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that replaces a method. It gets the method before its arguments."""

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def plant() -> Iterator[None]:
            original = getattr(owner, name)

            def patched(*args: Any, **options: Any) -> Any:
                return replacement(original, *args, **options)

            with mock.patch.object(owner, name, patched):
                yield

        defects[replacement.__name__] = plant
        return replacement

    return register


@defect(Scheduler, "abort")
def blocks_of_a_cancelled_request_stay_held(abort: Any, self: Scheduler, request_id: str) -> None:
    with mock.patch.object(BlockManager, "free", lambda self, handle: None):
        abort(self, request_id)


@defect(Scheduler, "_append")
def last_token_is_dropped(append: Any, *args: Any, **options: Any) -> Any:
    output = append(*args, **options)
    return replace(output, token_ids=output.token_ids[:-1]) if output.finish_reason == "length" else output


@defect(RequestRouter, "deliver")
def output_is_delivered_to_another_stream(deliver: Any, self: RequestRouter, message: Message) -> bool:
    if isinstance(message, StepDone) and len(message.outputs) > 1:
        first, second, *rest = message.outputs
        if first.error is second.error is first.finish_reason is second.finish_reason is None:
            exchanged = replace(first, request_id=second.request_id), replace(second, request_id=first.request_id)
            first, second = exchanged
        message = replace(message, outputs=(first, second, *rest))
    return bool(deliver(self, message))


@defect(Exchange, "_send_error")
async def error_does_not_release_its_caller(send_error: Any, self: Exchange, error: Any) -> None:
    callers, caller = self._state.callers, self._scope.get("windlass.caller") or ""
    callers._in_flight[callers.key_of(caller).name] += 1
    await send_error(self, error)


@defect(RequestRouter, "deliver")
def message_is_delivered_twice(deliver: Any, self: RequestRouter, message: Message) -> bool:
    count = self.__dict__["delivered"] = self.__dict__.get("delivered", 0) + isinstance(message, StepDone)
    if count % 7 == 0:
        deliver(self, message)
    return bool(deliver(self, message))


@defect(SchedulerQueues, "preempt")
def preempted_request_loses_a_token(preempt: Any, self: SchedulerQueues, seq: Any) -> None:
    preempt(self, seq)
    if seq.num_output_tokens > 1:
        seq.token_ids.pop()


@defect(ProcessClient, "_watch")
async def engine_is_not_watched(watch: Any, self: ProcessClient, *args: Any) -> None:
    pass


@defect(HttpProtocol, "pause_writing")
def writers_never_pause(pause: Any, self: HttpProtocol) -> None:
    pass


@defect(BlockPool, "take")
def evicted_block_is_still_found(take: Any, self: BlockPool, private: bool = False) -> int:
    before = dict(self.cached)
    block: int = take(self, private)
    self.cached.update(before)
    return block


@defect(RequestRouter, "fail_all")
def requests_of_a_dead_engine_are_forgotten(fail_all: Any, self: RequestRouter, make_error: Any) -> None:
    self._streams.clear()


@defect(FairLimiter, "_release")
def place_in_a_lane_is_lost(release: Any, self: FairLimiter) -> None:
    if self._queues:
        release(self)


@defect(RequestRouter, "generate")
async def request_continues_after_its_client_left(
    generate: Any, self: RequestRouter, request: Any
) -> AsyncGenerator[Any, None]:
    outputs = generate(self, request)
    leaked = self.__dict__.setdefault("leaked", [])
    async for output in outputs:
        leaked.append(outputs)  # never closed
        yield output


@contextmanager
def deadlines_are_ignored() -> Iterator[None]:
    init = Exchange.__init__

    def patched(self: Exchange, *args: Any, deadline: float | None = None, **options: Any) -> None:
        init(self, *args, **options)

    with (
        mock.patch.object(Exchange, "__init__", patched),
        mock.patch.object(Deadlines, "add", lambda *args: None),
    ):
        yield


def slow_reader_counts_as_load_of_the_engine() -> AbstractContextManager[Any]:
    all_streams = property(lambda self: len(self._streams) + len(self._aborting))
    return mock.patch.object(RequestRouter, "in_flight", all_streams)


DEFECTS |= {plant.__name__: plant for plant in (deadlines_are_ignored, slow_reader_counts_as_load_of_the_engine)}


@defect(ReplicatedClient, "_has_alternative", REPLICA_DEFECTS)
def every_death_is_reported(has_alternative: Any, self: ReplicatedClient, tried: Any) -> bool:
    """Also to requests that another engine could compute."""
    return False


@defect(ReplicatedClient, "generate", REPLICA_DEFECTS)
async def started_request_starts_again(
    generate: Any, self: ReplicatedClient, request: Any
) -> AsyncGenerator[Any, None]:
    while True:
        try:
            async for output in generate(self, request):
                yield output
            return
        except EngineDeadError:
            if self.state != "ready":
                raise


@defect(ReplicatedClient, "_choose", REPLICA_DEFECTS)
def replica_stays_charged(choose: Any, self: ReplicatedClient, digests: Any, tried: Any) -> Any:
    replica = choose(self, digests, tried)
    replica.in_flight += bool(tried)
    return replica
