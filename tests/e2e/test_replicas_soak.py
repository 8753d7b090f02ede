"""A real server with two engines that are killed again and again under load: each request ends once, whole or with an error.

The long form, marked soak, takes ten minutes or SOAK_SECONDS; the short one, marked slow, 45 seconds.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from e2e.test_replicas import SMALL, complete, engine_pids, stream
from e2e_helpers.soaking import Memory
from helpers.eventually import eventually
from helpers.real_server import RealServer, serve

TEXTS, CLIENTS = 16, 5
TOLERANCE = 24.0  # MiB that the server may grow by behind the first half


def answer_of(number: int) -> dict[str, Any]:
    """What text `number` is asked for with."""
    return {"prompt": [10 + number, 11, 12], "max_tokens": 200, "temperature": 0, "ignore_eos": True}


async def asking(
    client: httpx.AsyncClient, first: int, until: float, ended: list[tuple[int, dict[str, object]]]
) -> int:
    """Streams one after the other; returns how many were begun."""
    begun = 0
    while time.monotonic() < until:
        number = (first + begun * CLIENTS) % TEXTS
        begun += 1
        found: dict[str, object] = {}
        await stream(client, answer_of(number), found)
        ended.append((number, found))
    return begun


async def both_ready(client: httpx.AsyncClient) -> bool:
    told: dict[str, Any] = (await client.get("/health")).json()
    return told["replicas"]["ready"] == 2


async def killing(server: RealServer, client: httpx.AsyncClient, until: float, longest: float, memory: Memory) -> int:
    """Kill one of the engines at random, now and then and never while another starts; returns how often."""
    rng, deaths = random.Random(7), 0
    while time.monotonic() < until:
        pause = time.monotonic() + rng.uniform(longest / 3, longest)
        while time.monotonic() < until and (time.monotonic() < pause or not await both_ready(client)):
            memory.sample(time.monotonic())
            await asyncio.sleep(0.5)
        if time.monotonic() < until:
            os.kill(rng.choice(engine_pids(server)), signal.SIGKILL)
            deaths += 1
    return deaths


@pytest.mark.parametrize(
    ("seconds", "longest"),
    [
        pytest.param(45.0, 18.0, id="three quarters of a minute", marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
        pytest.param(
            float(os.environ.get("SOAK_SECONDS", "600")),
            36.0,
            id="ten minutes",
            marks=[pytest.mark.soak, pytest.mark.timeout(4 * 3600)],
        ),
    ],
)
def test_nothing_is_lost_silently_where_engines_die(seconds: float, longest: float) -> None:
    with serve("--replicas", "2", "--deterministic", "--max-num-seqs", "3", *SMALL) as server:
        ended: list[tuple[int, dict[str, object]]] = []
        memory = Memory(server.process.pid)

        async def work() -> tuple[list[int], int]:
            until = time.monotonic() + seconds
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                clients = [asking(client, number, until, ended) for number in range(CLIENTS)]
                *begun, deaths = await asyncio.gather(*clients, killing(server, client, until, longest, memory))
                return begun, deaths

        begun, deaths = asyncio.run(work())
        eventually(lambda: httpx.get(f"{server.url}/health", timeout=30).json()["replicas"]["ready"] == 2, 60.0)
        assert len(ended) == sum(begun) and all(result["done"] for _, result in ended)
        outcomes = Counter(
            "whole" if result["error"] is None else str(result["error"]["code"])  # type: ignore[index]
            for _, result in ended
        )
        print(f"{deaths} deaths, {dict(outcomes)}, server at {memory.samples[-1][1]:.0f} MiB")
        assert set(outcomes) <= {"whole", "engine_unavailable"} and outcomes["whole"] > outcomes["engine_unavailable"]
        assert deaths > 1 and server.metric("windlass_engine_restarts_total") == deaths
        assert server.metric("windlass_num_requests_running") == server.metric("windlass_num_requests_waiting") == 0
        alone = {}
        for number in range(TEXTS):
            answer = complete(server, **answer_of(number))
            alone[number] = answer["choices"][0]["text"]
        for number, result in ended:  # those that moved to the other engine, too; of the cut ones what came is right
            text = str(result["text"])
            assert text == (alone[number] if result["error"] is None else alone[number][: len(text)])
        assert memory.growth(0.5)[1] < TOLERANCE
        assert "Traceback" not in server.log.read_text()
