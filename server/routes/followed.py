"""Who follows a generation request while it runs: nobody, or the recorder. Knows the request's way, and no line of any file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from windlass.server.exchange.streaming import Exchange
from windlass.server.generation.deltas import Delta, GenerationPlan, Tally
from windlass.server.routes.job import GenerationJob
from windlass.server.routes.recorded import RecordedRequest


@contextmanager
def followed(
    exchange: Exchange, job: GenerationJob, plan: GenerationPlan, tally: Tally
) -> Iterator[Callable[[Delta], None] | None]:
    """A request runs until the block ends; what comes goes to the function, where there is one."""
    recorder = job.state.recorder
    if recorder is None:
        yield None
        return
    request = RecordedRequest(recorder, job, plan, tally, exchange.path)
    try:
        yield request.take
    except BaseException as error:
        request.end(error, exchange.cut_short)
        raise
    request.end(None, "")
