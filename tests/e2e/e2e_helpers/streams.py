"""Streamed completions as their clients see them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

PATH = "/v1/completions"
LONG = {"prompt": "The sea", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


@dataclass
class Streamed:
    """A stream of completions, updated line by line.

    text: of all choices. finishes: reasons by choice. error: of an error event or a refused request. times: arrival of each
    event, in seconds.
    """

    text: str = ""
    finishes: dict[int, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    times: list[float] = field(default_factory=list, compare=False)

    def take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            self.times.append(time.monotonic())
            event = json.loads(line.removeprefix("data: "))
            self.error = event.get("error", self.error)
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices", ()):
                self.text += choice.get("text", "")
                if choice["finish_reason"] is not None:
                    self.finishes[choice["index"]] = choice["finish_reason"]

    @property
    def finish(self) -> str | None:
        """Reason for the end of the first choice."""
        return self.finishes.get(0)

    @property
    def end(self) -> str:
        """Code of the error, or the finish reason."""
        end = self.error["code"] if self.error else self.finish or "cut"
        return end if self.done else f"{end}, without [DONE]"

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [later - earlier for earlier, later in pairwise(self.times)]


def read_stream(
    url: str,
    body: dict[str, Any],
    *,
    headers: dict[str, str] | None = None,
    begun: Callable[[], object] | None = None,
    timeout: float = 60.0,
) -> Streamed:
    """Read a stream to its end. begun: called after the first event."""
    result = Streamed()
    body = {**body, "stream": True}
    with httpx.Client(timeout=timeout) as http, http.stream("POST", url + PATH, json=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            result.take(line)
            if begun is not None and result.times:
                begun()
                begun = None
    return result


async def stream(client: httpx.AsyncClient, body: dict[str, Any], result: Streamed | None = None) -> Streamed:
    """Read a stream to its end. result: updated meanwhile."""
    result = Streamed() if result is None else result
    async with client.stream("POST", PATH, json={"model": "demo", **body, "stream": True}) as answer:
        if answer.status_code != 200:
            await answer.aread()
            result.error, result.done = answer.json()["error"], True
            return result
        async for line in answer.aiter_lines():
            result.take(line)
    return result


class Streams:
    """Concurrent long streams, all of which have begun."""

    def __init__(self, url: str, count: int) -> None:
        self.results: list[Streamed] = []
        begun = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=lambda: self.results.append(read_stream(url, LONG, begun=begun.release)))
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert begun.acquire(timeout=60)

    def finish(self) -> list[str]:
        """Wait for the streams, and return the end of each."""
        for thread in self._threads:
            thread.join(600)
        assert len(self.results) == len(self._threads)
        return [result.end for result in self.results]

    @property
    def texts(self) -> set[str]:
        return {result.text for result in self.results}
