"""Real servers with two engines: answers equal those of one, deaths under load, and routing by prefix."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_helpers.streams import Streamed, stream
from helpers.eventually import eventually
from helpers.real_server import RealServer, serve

SMALL = ("--kv-cache-memory", "32MiB", "--max-model-len", "512")
SAMPLERS = ({"temperature": 0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0, "n": 2, "logprobs": 2})
SCALING = {"rope_type": "yarn", "factor": 2.0}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serve("--replicas", "2", "--metrics-names", "both", *SMALL) as running:
        yield running


def complete(server: RealServer, prompt: Any, **fields: Any) -> list[Any]:
    answer = server.complete(prompt, **{"max_tokens": 12, **fields})
    return [(choice["text"], choice["finish_reason"], choice["logprobs"]) for choice in answer["choices"]]


def test_two_engines_have_separate_cores_and_share_the_weights(server: RealServer) -> None:
    pids = server.engine_pids()
    assert len(pids) == 2
    first, second = (os.sched_getaffinity(pid) for pid in pids)
    assert first and second and not first & second
    log = server.log.read_text()
    assert "replicas  2" in log and log.count("loading weights ...") == 1
    weights = float(re.findall(r"memory +([0-9.]+) MiB for the weights", log)[0])
    for pid in pids:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        shared = int(re.findall(r"Pss_Shmem: +(\d+) kB", rollup)[0]) / 1024
        assert weights / 4 < shared < 0.75 * weights  # half of the shared memory is attributed to each


def test_health_metrics_and_cache_contain_both_engines(server: RealServer) -> None:
    assert server.get("/health") == {
        "status": "ready",
        "replicas": {"total": 2, "ready": 2},
    }
    assert server.get("/v1/models")["data"][0]["id"] == "demo"
    for number in range(4):
        complete(server, [number + 5, 6, 7])
    text = httpx.get(f"{server.url}/metrics").text
    for name in ("windlass_engine_up", "windlass_generation_tokens_total", "vllm:num_requests_running"):
        assert set(re.findall(rf'^{name}{{[^}}]*engine="(\w+)"', text, re.MULTILINE)) == {"0", "1"}, name
    assert server.metric("windlass_engine_up") == 2
    tokens = re.findall(r'^windlass_generation_tokens_total{engine="\d"} (\S+)$', text, re.MULTILINE)
    assert len(tokens) == 2 and all(float(each) > 0 for each in tokens)
    pages = server.get("/v1/cache")
    assert [group["engine"] for group in pages["groups"]] == [0, 1]
    assert pages["counters"]["generation_tokens"] == server.metric("windlass_generation_tokens_total")


@pytest.mark.slow
def test_answers_equal_those_of_one_engine(server: RealServer) -> None:
    rng = random.Random(1)
    prompts: list[Any] = ["The sun", "", [5], [rng.randrange(10, 4000) for _ in range(200)], "In the beginning " * 20]
    requests = [(prompt, sampler) for prompt in prompts for sampler in SAMPLERS]
    requests += [(prompts[3], {"rope_scaling": SCALING}), (prompts[3], {"cache_salt": "s"}), (["a", "b", "c", "d"], {})]
    with serve(*SMALL) as single:
        expected = [complete(single, prompt, **sampler) for prompt, sampler in requests]
    for _ in range(2):  # either engine may answer
        assert [complete(server, prompt, **sampler) for prompt, sampler in requests] == expected


def long_answer(number: int) -> dict[str, Any]:
    """Request of a stream. Lengths differ, so that the streams of an engine do not end at the same time."""
    return {
        "prompt": [10 + number, 11, 12],
        "max_tokens": 300 + 37 * (number % 5),
        "temperature": 0,
        "ignore_eos": True,
    }


async def kill_under_load(server: RealServer, clients: int) -> tuple[list[Streamed], list[int]]:
    """Kill an engine, and return all streams and the indices of those that ran at its death.

    Each client reads one stream after the other until then. The last four streams start after it.
    """
    results: list[Streamed] = []
    pid = server.engine_pids()[0]
    dead = False
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def ask() -> None:
            results.append(Streamed())
            await stream(client, long_answer(len(results) - 1), results[-1])

        async def ask_repeatedly() -> None:
            while not dead:
                await ask()

        work = [asyncio.create_task(ask_repeatedly()) for _ in range(clients)]
        # A stream without a token would be computed by the other engine instead of being cut. Therefore the engine is stopped
        # first, for less time than the watchdog allows, and its messages are awaited. It is killed if four streams, as many as
        # fit into both engines, have tokens then, and every client has a running stream. Otherwise this is repeated.
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, "four streams never ran at the same time"
            os.kill(pid, signal.SIGSTOP)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.get("/health")
                    await asyncio.sleep(0.1)
                    running = [number for number, result in enumerate(results) if not result.done]
                    if len(running) == clients and sum(bool(results[number].text) for number in running) == 4:
                        break
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        dead = True
        await asyncio.gather(*work, *(asyncio.create_task(ask()) for _ in range(4)))
    return results, running


@pytest.mark.slow
def test_killed_engine_cuts_only_its_running_streams() -> None:
    with serve("--replicas", "2", "--max-num-seqs", "2", *SMALL) as server:
        results, running = asyncio.run(kill_under_load(server, 24))
        assert len(running) == 24
        assert all(result.done for result in results)
        cut = [result for result in results if result.error is not None]
        assert 1 <= len(cut) <= 2, cut  # of the two that ran there
        assert {result.end for result in cut} == {"engine_unavailable"}
        assert all(result.finish == "length" for result in results if result.error is None)
        assert all(result.error is None for result in results[-4:])
        eventually(lambda: server.get("/health")["replicas"]["ready"] == 2, 120)
        health = server.get("/health")
        assert health["status"] == "ready" and health["degraded"] == ["engine_restarted"]
        # Streams that moved to the other engine have the same text. Half of them had waited for the dead engine.
        for number in running:
            if results[number].error is None:
                ((text, _, _),) = complete(server, **long_answer(number))
                assert text == results[number].text


def hit_rate(server: RealServer, prompts: list[list[int]]) -> float:
    """Share of cached prompt tokens, with two prompts at a time."""

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for start in range(0, len(prompts), 2):
                bodies = [{"model": "demo", "prompt": p, "max_tokens": 4} for p in prompts[start : start + 2]]
                for answer in await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)):
                    assert answer.status_code == 200, answer.text

    asyncio.run(ask())
    return server.metric("windlass_prefix_cache_hits_total") / server.metric("windlass_prefix_cache_queries_total")


@pytest.mark.slow
def test_prompts_are_routed_to_their_cached_prefix() -> None:
    rng = random.Random(2)
    documents = [[rng.randrange(10, 4000) for _ in range(320)] for _ in range(10)]
    prompts = [[*rng.choice(documents), *(rng.randrange(10, 4000) for _ in range(20))] for _ in range(40)]
    rates = []
    for arguments in ((), ("--replicas", "2")):
        with serve(*arguments, *SMALL) as server:
            rates.append(hit_rate(server, prompts))
    assert rates[0] > 0.5 and rates[1] >= 0.9 * rates[0], rates
