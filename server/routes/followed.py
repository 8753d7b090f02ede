"""Who follows a generation request while it runs: nobody, the recorder, or spans. Knows none of their forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from windlass.server.exchange.streaming import Exchange
from windlass.server.generation.deltas import Delta, GenerationPlan, Tally
from windlass.server.routes.recorded import RecordedRequest
from windlass.server.routes.traced import TracedRequest

if TYPE_CHECKING:
    from windlass.server.routes.job import GenerationJob


class RequestFollower(Protocol):
    """See `RecordedRequest`."""

    def take(self, delta: Delta) -> None: ...

    def end(self, error: BaseException | None, cut_short: str) -> None: ...


@contextmanager
def followed(
    exchange: Exchange, job: GenerationJob, plan: GenerationPlan, tally: Tally
) -> Iterator[Callable[[Delta], None] | None]:
    """A request runs until the block ends; what comes goes to the function, where there is one."""
    state, followers = job.state, list[RequestFollower]()
    if state.recorder is not None:
        followers.append(RecordedRequest(state.recorder, job, plan, tally, exchange.path))
    if state.tracing is not None and exchange.span is not None:
        followers.append(TracedRequest(state.tracing, exchange.span, job, plan, tally))
    if not followers:
        yield None
        return

    def take(delta: Delta) -> None:
        for follower in followers:
            follower.take(delta)

    failure: BaseException | None = None
    try:
        yield take
    except BaseException as error:
        failure = error
        raise
    finally:
        for follower in followers:
            follower.end(failure, exchange.cut_short)
