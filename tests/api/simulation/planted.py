"""Mistakes such as people make, each planted into the real code while a context is open. Simulations have to find every one."""

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
from windlass.server.http.http_protocol import HttpProtocol
from windlass.server.serving.streaming import Exchange
from windlass.server.text.workers.pool import FairLimiter


def _wrapped(owner: type, name: str, make: Callable[[Any], Callable[..., Any]]) -> AbstractContextManager[Any]:
    """`make` gets the method and returns what takes its place."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def blocks_stay_held_after_a_cancel() -> AbstractContextManager[Any]:
    def make(abort: Any) -> Any:
        def patched(self: Scheduler, request_id: str) -> None:
            with mock.patch.object(BlockManager, "free", lambda self, handle: None):
                abort(self, request_id)

        return patched

    return _wrapped(Scheduler, "abort", make)


def the_last_token_is_dropped() -> AbstractContextManager[Any]:
    def make(append: Any) -> Any:
        def patched(*args: Any, **options: Any) -> Any:
            output = append(*args, **options)
            return replace(output, token_ids=output.token_ids[:-1]) if output.finish_reason == "length" else output

        return patched

    return _wrapped(Scheduler, "_append", make)


def an_event_goes_to_another_stream() -> AbstractContextManager[Any]:
    def make(deliver: Any) -> Any:
        def patched(self: RequestRouter, message: Message) -> bool:
            if isinstance(message, StepDone) and len(message.outputs) > 1:
                first, second, *rest = message.outputs
                if first.error is second.error is first.finish_reason is second.finish_reason is None:
                    first, second = (
                        replace(first, request_id=second.request_id),
                        replace(second, request_id=first.request_id),
                    )
                message = replace(message, outputs=(first, second, *rest))
            return bool(deliver(self, message))

        return patched

    return _wrapped(RequestRouter, "deliver", make)


def an_error_keeps_its_callers_place() -> AbstractContextManager[Any]:
    def make(send_error: Any) -> Any:
        async def patched(self: Exchange, error: Any) -> None:
            callers, caller = self._state.callers, self._scope.get("windlass.caller") or ""
            callers._in_flight[callers.key_of(caller).name] += 1
            await send_error(self, error)

        return patched

    return _wrapped(Exchange, "_send_error", make)


def a_message_is_delivered_twice() -> AbstractContextManager[Any]:
    def make(deliver: Any) -> Any:
        count = 0

        def patched(self: RequestRouter, message: Message) -> bool:
            nonlocal count
            count += isinstance(message, StepDone)
            if count % 7 == 0:
                deliver(self, message)
            return bool(deliver(self, message))

        return patched

    return _wrapped(RequestRouter, "deliver", make)


@contextmanager
def deadlines_are_ignored() -> Iterator[None]:
    def make(init: Any) -> Any:
        def patched(self: Exchange, *args: Any, deadline: float | None = None, **options: Any) -> None:
            init(self, *args, **options)

        return patched

    with _wrapped(Exchange, "__init__", make), mock.patch.object(Deadlines, "add", lambda *args: None):
        yield


def a_preempted_request_loses_a_token() -> AbstractContextManager[Any]:
    def make(preempt: Any) -> Any:
        def patched(self: SchedulerQueues, seq: Any) -> None:
            preempt(self, seq)
            if seq.num_output_tokens > 1:
                seq.token_ids.pop()

        return patched

    return _wrapped(SchedulerQueues, "preempt", make)


def nobody_watches_the_engine() -> AbstractContextManager[Any]:
    async def patched(self: ProcessClient, *args: Any) -> None:
        pass

    return mock.patch.object(ProcessClient, "_watch", patched)


def writers_never_pause() -> AbstractContextManager[Any]:
    return mock.patch.object(HttpProtocol, "pause_writing", lambda self: None)


def an_evicted_block_is_still_found() -> AbstractContextManager[Any]:
    def make(take: Any) -> Any:
        def patched(self: BlockPool, private: bool = False) -> int:
            before = dict(self.cached)
            block: int = take(self, private)
            self.cached.update(before)
            return block

        return patched

    return _wrapped(BlockPool, "take", make)


def requests_of_a_dead_engine_are_forgotten() -> AbstractContextManager[Any]:
    return mock.patch.object(RequestRouter, "fail_all", lambda self, make_error: self._streams.clear())


def a_slow_reader_counts_against_the_engine() -> AbstractContextManager[Any]:
    whole = property(lambda self: len(self._streams) + len(self._aborting))
    return mock.patch.object(RequestRouter, "in_flight", whole)


@contextmanager
def a_request_goes_on_after_its_client_left() -> Iterator[None]:
    async def generate(self: RequestRouter, request: Any) -> AsyncGenerator[Any, None]:
        outputs = original(self, request)
        async for output in outputs:  # and nobody closes it
            kept.append(outputs)
            yield output

    kept: list[Any] = []
    original = RequestRouter.generate
    with mock.patch.object(RequestRouter, "generate", generate):
        yield


def a_place_in_a_lane_is_lost() -> AbstractContextManager[Any]:
    def make(pass_on: Any) -> Any:
        def patched(self: FairLimiter) -> None:
            if self._queues:
                pass_on(self)

        return patched

    return _wrapped(FairLimiter, "_release", make)


@contextmanager
def everybody_is_told_of_a_death() -> Iterator[None]:
    """Also those that another engine could have taken."""
    with mock.patch.object(ReplicatedClient, "_has_alternative", lambda self, tried: False):
        yield


@contextmanager
def a_begun_request_begins_again() -> Iterator[None]:
    async def generate(self: ReplicatedClient, request: Any) -> AsyncGenerator[Any, None]:
        while True:
            try:
                async for output in original(self, request):
                    yield output
                return
            except EngineDeadError:
                if self.state != "ready":
                    raise

    original = ReplicatedClient.generate
    with mock.patch.object(ReplicatedClient, "generate", generate):
        yield


def a_replica_stays_charged() -> AbstractContextManager[Any]:
    def make(choose: Any) -> Any:
        def patched(self: ReplicatedClient, digests: Any, tried: Any) -> Any:
            replica = choose(self, digests, tried)
            replica.in_flight += bool(tried)
            return replica

        return patched

    return _wrapped(ReplicatedClient, "_choose", make)


MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    mistake.__name__: mistake
    for mistake in (
        blocks_stay_held_after_a_cancel,
        the_last_token_is_dropped,
        an_event_goes_to_another_stream,
        an_error_keeps_its_callers_place,
        a_message_is_delivered_twice,
        deadlines_are_ignored,
        a_preempted_request_loses_a_token,
        nobody_watches_the_engine,
        writers_never_pause,
        an_evicted_block_is_still_found,
        requests_of_a_dead_engine_are_forgotten,
        a_slow_reader_counts_against_the_engine,
        a_request_goes_on_after_its_client_left,
        a_place_in_a_lane_is_lost,
    )
}

MISTAKES_OF_REPLICAS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    mistake.__name__: mistake
    for mistake in (everybody_is_told_of_a_death, a_begun_request_begins_again, a_replica_stays_charged)
}
