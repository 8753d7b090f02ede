"""Who follows a request while it runs: nobody, the recorder, or spans. Knows none of their forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, Protocol

from windlass.server.exchange.streaming import Exchange
from windlass.server.generation.deltas import Delta, GenerationPlan, Tally
from windlass.server.routes.job import GenerationJob
from windlass.server.routes.recorded import RecordedRequest
from windlass.server.routes.traced import TracedRequest

P = ParamSpec("P")


class RequestFollower(Protocol[P]):
    """`take` what comes, part by part; `end` it once. cut_short: see `RecordedRequest.end`."""

    def take(self, *args: P.args, **kwargs: P.kwargs) -> None: ...

    def end(self, error: BaseException | None, cut_short: str) -> None: ...


@contextmanager
def followed(exchange: Exchange, followers: Sequence[RequestFollower[P]]) -> Iterator[Callable[P, None] | None]:
    """A request runs until the block ends; what comes goes to the function, where there is one."""
    if not followers:
        yield None
        return

    def take(*args: P.args, **kwargs: P.kwargs) -> None:
        for follower in followers:
            follower.take(*args, **kwargs)

    failure: BaseException | None = None
    try:
        yield take
    except BaseException as error:
        failure = error
        raise
    finally:
        for follower in followers:
            follower.end(failure, exchange.cut_short)


def followers_of(
    exchange: Exchange, job: GenerationJob, plan: GenerationPlan, tally: Tally
) -> list[RequestFollower[[Delta]]]:
    """Who wants to see a request that generates."""
    state, followers = job.state, list[RequestFollower[[Delta]]]()
    if state.recorder is not None:
        followers.append(RecordedRequest(state.recorder, job, plan, tally, exchange.path))
    if state.tracing is not None and exchange.span is not None:
        followers.append(TracedRequest(state.tracing, exchange.span, job, plan, tally))
    return followers
