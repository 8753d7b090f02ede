"""Measurement of a server during an attack, in a separate process: gaps of a stream, and latency of /health.

Run as `python helpers/probing.py URL`. Prints "watching" once the stream has started, and results as JSON when its
standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx


@dataclass
class Findings:
    """gaps, health: seconds, the longest first. status: of each /health other than 200."""

    gaps: list[float]
    health: list[float]
    bad: list[str]
    tokens: int

    @property
    def worst_gap(self) -> float:
        return self.gaps[0]

    @property
    def worst_health(self) -> float:
        return self.health[0]


@contextmanager
def watched(url: str, prompt: str = "In the beginning") -> Iterator[Findings]:
    """Measure the server during the block; the results are complete at its end."""
    found = Findings([], [], [], 0)
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, url, prompt], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "watching\n"
        yield found
        written, _ = process.communicate("", timeout=60)
        vars(found).update(json.loads(written))
    finally:
        process.kill()
        process.wait()


async def _watch(url: str, prompt: str) -> None:
    stop = asyncio.Event()
    started = asyncio.Event()
    gaps: list[float] = []
    health: list[float] = []
    bad: list[str] = []
    tokens = 0

    async def stream(client: httpx.AsyncClient) -> None:
        nonlocal tokens
        body = {"prompt": prompt, "max_tokens": 100_000, "stream": True, "ignore_eos": True, "temperature": 0}
        body["return_token_ids"] = True  # one event per token, also without text
        while not stop.is_set():
            last = None
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if "error" in line[:20]:
                        bad.append(line[:200])
                    now = time.monotonic()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
                    tokens += 1
                    if tokens > 20:
                        started.set()
                    if stop.is_set():
                        break

    async def ask(client: httpx.AsyncClient) -> None:
        while not stop.is_set():
            begin = time.monotonic()
            response = await client.get("/health")
            health.append(time.monotonic() - begin)
            if response.status_code != 200:
                bad.append(str(response.status_code))
            await asyncio.sleep(0.02)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        tasks = [asyncio.create_task(stream(client)), asyncio.create_task(ask(client))]
        await started.wait()
        gaps.clear()
        health.clear()
        print("watching", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        stop.set()
        await asyncio.gather(*tasks)
    gaps.sort(reverse=True)
    health.sort(reverse=True)
    print(json.dumps({"gaps": gaps[:20], "health": health[:20], "bad": bad, "tokens": tokens}))


if __name__ == "__main__":
    asyncio.run(_watch(*sys.argv[1:]))
