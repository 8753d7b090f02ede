"""Carries out one request and makes its record: connecting, sending, waiting, giving up. Knows no schedule."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from typing import Any

from windlass.clients.loadtest.results import RequestRecord
from windlass.clients.loadtest.stream import AnswerReader, count
from windlass.clients.loadtest.timed_connections import Pool, TimedConnection
from windlass.clients.loadtest.workload import PreparedRequest

# After these the rest of the answer is not waited for; after others the connection ends by itself, or is used again.
_CUT_OFF = frozenset({"timeout", "disconnected", "interrupted", "aborted", "malformed"})
# Of this process, and of its machine: what the generator lacks is no failure of the server.
_NO_FILES = (errno.EMFILE, errno.ENFILE)


class Exchanges:
    """Requests over a pool. timeout_s: for each of them, from its sending. keep: whether to keep texts and token ids."""

    def __init__(self, pool: Pool, timeout_s: float, *, keep: bool = False) -> None:
        self._pool, self._timeout_s, self._keep = pool, timeout_s, keep
        self._active: set[AnswerReader] = set()
        self._ended_chunks = 0

    @property
    def chunks(self) -> int:
        """Chunks with tokens received until now."""
        return self._ended_chunks + sum(len(reader.chunks) for reader in self._active)

    async def exchange(
        self,
        request: PreparedRequest,
        done: Callable[[RequestRecord], None],
        *,
        index: int = 0,
        intended: float = 0.0,
        start: float = 0.0,
    ) -> RequestRecord:
        """Send `request`; `done` gets its record whatever happens, cancellation included.

        intended: seconds since `start`, by `time.perf_counter`. Never raises but for cancellation.
        """
        sent = time.perf_counter()
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def notice() -> None:
            if not finished.done():
                finished.set_result(None)

        reader = AnswerReader(notice, leave_after=request.disconnect_after, keep=self._keep)
        self._active.add(reader)
        connection: TimedConnection | None = None
        try:
            async with asyncio.timeout(self._timeout_s) as clock:
                connection = await self._pool.take()
                connection.send(reader, self._pool.request(request.path, request.body), request.body)
                await finished
        except OSError as error:  # TimeoutError is one: the system's own is a connection that cannot be made
            if clock.expired():
                reader.end("timeout", time.perf_counter(), f"no complete answer within {self._timeout_s:g} s")
            elif error.errno in _NO_FILES:
                reader.end(
                    "unsent", time.perf_counter(), f"the load generator has no file left for a connection: {error}"
                )
            else:
                reader.end("connection", time.perf_counter(), f"cannot connect: {error}")
        except asyncio.CancelledError:
            reader.end("interrupted", time.perf_counter(), "the run was stopped")
            raise
        finally:
            record = self._close(reader, connection, request, index, intended, sent, start)
            done(record)
        return record

    def _close(
        self,
        reader: AnswerReader,
        connection: TimedConnection | None,
        request: PreparedRequest,
        index: int,
        intended: float,
        sent: float,
        start: float,
    ) -> RequestRecord:
        self._active.discard(reader)
        self._ended_chunks += len(reader.chunks)
        outcome = reader.outcome or "interrupted"
        if connection is not None and outcome in _CUT_OFF:
            connection.abort()
        usage = reader.usage
        return RequestRecord(
            index=index,
            intended=intended,
            sent=sent - start,
            chunks=tuple(when - start for when in reader.chunks),
            ended=None if reader.ended is None else reader.ended - start,
            input_tokens=count(usage.get("prompt_tokens"), request.input_tokens),
            output_tokens=count(usage.get("completion_tokens"), len(reader.chunks)),
            cached_tokens=_cached(usage.get("prompt_tokens_details")),
            reused_tokens=reader.reused_tokens,
            outcome=outcome,
            message=reader.message,
            label=request.label,
            request_id=reader.request_id,
            asked_tokens=request.output_tokens,
            finish_reason=reader.finish_reason,
            text="".join(reader.text) if self._keep else None,
            token_ids=tuple(reader.token_ids) if self._keep and reader.token_ids is not None else None,
        )


def _cached(details: Any) -> int | None:
    cached = count(details.get("cached_tokens"), -1) if isinstance(details, dict) else -1
    return None if cached < 0 else cached
