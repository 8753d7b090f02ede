"""Sends the requests of a recording when they are due, takes their answers apart and compares them. Prints nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from windlass.clients.loadtest.progress import Progress, RunProgress, tell, unless_stopped
from windlass.clients.sse import SSEDecoder
from windlass.clients.stream_rest import read_rest_async
from windlass.server.cli.replay.asking import AskedAgain
from windlass.server.routes.recorded import digest
from windlass.server.routes.retrieval.followed import digest_of_rows

# An answer that is no stream comes when it is complete, and a recorded one may have taken hours.
_PATIENCE = httpx.Timeout(None, connect=10.0)
_SHOWN = 200  # characters of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPace:
    """speed: 2 sends in half the time; None: each as soon as there is room. at_once: requests in flight at most."""

    speed: float | None = 1.0
    at_once: int = 1024


@dataclass(slots=True)
class Repeated:
    """What came of one request. error: why there is no answer. late: seconds that it was sent after its time."""

    asked: AskedAgain
    digests: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    fingerprint: str = ""
    seconds: float = 0.0
    late: float = 0.0
    error: str = ""

    @property
    def compared(self) -> bool:
        return self.asked.wanted is not None

    @property
    def failed(self) -> bool:
        """Whether it was answered then and is not now."""
        return bool(self.error) and self.asked.recorded.ended_well

    @property
    def equal(self) -> bool:
        """Whether every answer has the tokens it had."""
        wanted = self.asked.wanted
        if wanted is None or self.error:
            return False
        if self.asked.some:
            return not Counter(self.digests) - Counter(wanted)
        return self.digests == wanted


@dataclass(slots=True)
class Replayed:
    """All of them, in the order of the recording. seconds: from the first sent to the last answered.

    interrupted: whether it was stopped before; then only those that had ended are in it.
    """

    requests: list[Repeated]
    seconds: float = 0.0
    interrupted: bool = False


@dataclass(slots=True)
class _Read:
    """Token ids by choice, while an answer comes; or the digests of a text's rows."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    rows: dict[int, str] = field(default_factory=dict)
    fingerprint: str = ""

    def take(self, payload: Any) -> None:
        if (error := payload.get("error")) or isinstance(error, dict):
            raise ValueError(_reason(payload))
        self.fingerprint = payload.get("system_fingerprint") or self.fingerprint
        for choice in payload.get("choices", ()):
            self.ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        for item in payload.get("data", ()):
            self.rows[item["index"]] = digest_of_rows(base64.b64decode(item["data"]))


async def replay(
    url: str,
    api_key: str | None,
    asked: Sequence[AskedAgain],
    pace: ReplayPace,
    *,
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
) -> Replayed:
    """Send all to the server at `url` (without /v1) and wait for all answers. What fails is in the result, never raised.

    progress: called about twice a second. stop: once set, it ends at once and its result says `interrupted`.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=pace.at_once, max_keepalive_connections=pace.at_once, keepalive_expiry=4.0)
    room = asyncio.Semaphore(pace.at_once)
    # Answers that are no streams come in no chunks.
    how_far = RunProgress(phase="running", total=len(asked), chunks=None)
    results: list[Repeated | None] = [None] * len(asked)
    begun = time.monotonic()
    first = asked[0].recorded.at if asked else 0.0
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=_PATIENCE, limits=limits, trust_env=False
    ) as http:

        async def one(index: int, each: AskedAgain) -> None:
            async with room:
                due = begun if pace.speed is None else begun + (each.recorded.at - first) / pace.speed
                sent = time.monotonic()
                how_far.running += 1
                result = await _send(http, each)
                how_far.running -= 1
                how_far.ended += 1
                how_far.failed += result.failed
                result.seconds = time.monotonic() - sent
                result.late = 0.0 if pace.speed is None else max(0.0, sent - due)
                results[index] = result

        async def every_one() -> None:
            async with asyncio.TaskGroup() as group:
                for index, each in enumerate(asked):
                    if pace.speed is not None:
                        due = begun + (each.recorded.at - first) / pace.speed
                        await asyncio.sleep(max(0.0, due - time.monotonic()))
                    group.create_task(one(index, each))

        ticker = asyncio.create_task(tell(progress, lambda: how_far))
        try:
            finished = await unless_stopped(every_one(), stop or asyncio.Event())
        finally:
            ticker.cancel()
        seconds = time.monotonic() - begun
    return Replayed([result for result in results if result is not None], seconds, not finished)


async def _send(http: httpx.AsyncClient, asked: AskedAgain) -> Repeated:
    read = _Read()
    try:
        async with http.stream("POST", asked.path, json=asked.body) as response:
            if response.status_code != 200:
                raise ValueError(_refusal(response.status_code, await response.aread()))
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                await _read_stream(response, read)
            else:
                payload = json.loads(await response.aread())
                if not isinstance(payload, dict):
                    raise ValueError(f"the answer is no object (HTTP {response.status_code})")
                read.take(payload)
    except httpx.HTTPError as error:
        return Repeated(asked, error=f"{type(error).__name__}: {error}"[:_SHOWN])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Repeated(asked, error=str(error)[:_SHOWN] or type(error).__name__)
    if read.rows:
        return Repeated(asked, tuple(read.rows[index] for index in sorted(read.rows)))
    if not read.ids:
        return Repeated(asked, error="the answer has no choices")
    ids = [read.ids[choice] for choice in sorted(read.ids)]
    return Repeated(asked, tuple(map(digest, ids)), tuple(map(len, ids)), read.fingerprint)


def _refusal(status: int, body: bytes) -> str:
    """What an answer of another status says, whoever sent it: a proxy, or another server, has its own form."""
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        payload = None
    said = _reason(payload) if isinstance(payload, dict) else body.decode("utf-8", "replace")
    return f"HTTP {status}: {' '.join(said.split())}".removesuffix(": ")


def _reason(payload: dict[str, Any]) -> str:
    error = payload.get("error") or payload.get("message") or payload.get("detail") or ""
    return str(error.get("message") or error if isinstance(error, dict) else error)


async def _read_stream(response: httpx.Response, read: _Read) -> None:
    events = SSEDecoder()
    pieces = response.aiter_bytes()
    async for data in pieces:
        for event in events.feed(data):
            if event.data == "[DONE]":
                await read_rest_async(response, pieces)
                return
            read.take(json.loads(event.data))
    raise ValueError("the stream ended early")
