"""Real servers with two engines: answers equal those of one, deaths under load, and prompts that find their beginning again."""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from helpers.eventually import children
from helpers.real_server import RealServer, serve

SMALL = ("--kv-cache-memory", "32MiB", "--max-model-len", "512")
SAMPLERS = ({"temperature": 0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0, "n": 2, "logprobs": 2})
SCALING = {"rope_type": "yarn", "factor": 2.0}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serve("--replicas", "2", "--metrics-names", "both", *SMALL) as running:
        yield running


def engine_pids(server: RealServer) -> list[int]:
    return children(server.process.pid, b"windlass.engine")


def complete(server: RealServer, prompt: Any, **fields: object) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def told(answer: dict[str, Any]) -> list[Any]:
    return [(choice["text"], choice["finish_reason"], choice["logprobs"]) for choice in answer["choices"]]


def test_two_engines_on_their_own_cores_with_one_copy_of_the_weights(server: RealServer) -> None:
    pids = engine_pids(server)
    assert len(pids) == 2
    first, second = (os.sched_getaffinity(pid) for pid in pids)
    assert first and second and not first & second
    log = server.log.read_text()
    assert "replicas  2" in log and log.count("loading weights ...") == 1
    weights = float(re.findall(r"memory +([0-9.]+) MiB of weights", log)[0])
    for pid in pids:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        shared = int(re.findall(r"Pss_Shmem: +(\d+) kB", rollup)[0]) / 1024
        assert weights / 4 < shared < 0.75 * weights  # each is charged with half of what both map


def test_what_is_shown_of_both(server: RealServer) -> None:
    assert httpx.get(f"{server.url}/health", timeout=30).json() == {
        "status": "ready",
        "replicas": {"total": 2, "ready": 2},
    }
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "demo"
    for number in range(4):
        complete(server, [number + 5, 6, 7])
    text = httpx.get(f"{server.url}/metrics").text
    for name in ("windlass_engine_up", "windlass_generation_tokens_total", "vllm:num_requests_running"):
        assert set(re.findall(rf'^{name}{{[^}}]*engine="(\w+)"', text, re.MULTILINE)) == {"0", "1"}, name
    assert server.metric("windlass_engine_up") == 2
    tokens = re.findall(r'^windlass_generation_tokens_total{engine="\d"} (\S+)$', text, re.MULTILINE)
    assert len(tokens) == 2 and all(float(each) > 0 for each in tokens)
    pages = httpx.get(f"{server.url}/v1/cache").json()
    assert [group["engine"] for group in pages["groups"]] == [0, 1]
    assert pages["counters"]["generation_tokens"] == server.metric("windlass_generation_tokens_total")


@pytest.mark.slow
def test_answers_equal_those_of_one_engine(server: RealServer) -> None:
    rng = random.Random(1)
    prompts: list[Any] = ["The sun", "", [5], [rng.randrange(10, 4000) for _ in range(200)], "In the beginning " * 20]
    asked = [(prompt, sampler) for prompt in prompts for sampler in SAMPLERS]
    asked += [(prompts[3], {"rope_scaling": SCALING}), (prompts[3], {"cache_salt": "s"}), (["a", "b", "c", "d"], {})]
    with serve(*SMALL) as single:
        expected = [told(complete(single, prompt, **sampler)) for prompt, sampler in asked]
    for _ in range(2):  # whichever of them answers
        assert [told(complete(server, prompt, **sampler)) for prompt, sampler in asked] == expected


def long_answer(number: int) -> dict[str, Any]:
    """What stream `number` asks for. Neighbours differ in length, so those of an engine do not end, and others begin, at once."""
    return {
        "prompt": [10 + number, 11, 12],
        "max_tokens": 300 + 37 * (number % 5),
        "temperature": 0,
        "ignore_eos": True,
    }


async def stream(client: httpx.AsyncClient, request: dict[str, Any], found: dict[str, Any]) -> None:
    """found: is told how it goes: its text, its error if any, and whether it ended as streams do."""
    found.update({"text": "", "error": None, "done": False, "finish": None})
    body = {"model": "demo", **request, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            found.update({"error": answer.json()["error"], "done": True})
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                found["done"] = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                found["error"] = event.get("error", found["error"])
                for choice in event.get("choices", ()):
                    found["text"] += choice["text"]
                    found["finish"] = choice["finish_reason"] or found["finish"]


async def under_load(server: RealServer, clients: int) -> tuple[list[dict[str, Any]], list[int]]:
    """How all streams went, each client asking again until an engine died, and which had not ended then.

    So the load is there however long the right moment lets itself be waited for. The last four came behind the death.
    """
    results: list[dict[str, Any]] = []
    pid = engine_pids(server)[0]
    dead = False
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def ask() -> None:
            results.append({})
            await stream(client, long_answer(len(results) - 1), results[-1])

        async def keep_asking() -> None:
            while not dead:
                await ask()

        work = [asyncio.create_task(keep_asking()) for _ in range(clients)]
        # One without a token so far would be computed elsewhere instead of cut. So it stops first, for less time than makes it a
        # stuck one, and dies if all four that fit into both engines are amid their answers when what it had said has arrived, and
        # no client is just about to ask again. A server that is too busy to say so in that time is asked again later.
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, "four were never seen side by side"
            os.kill(pid, signal.SIGSTOP)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.get("/health")
                    await asyncio.sleep(0.1)
                    amid = [number for number, result in enumerate(results) if not result.get("done")]
                    if len(amid) == clients and sum(bool(results[number].get("text")) for number in amid) == 4:
                        break
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        dead = True
        await asyncio.gather(*work, *(asyncio.create_task(ask()) for _ in range(4)))
    return results, amid


@pytest.mark.slow
def test_a_killed_engine_under_load() -> None:
    with serve("--replicas", "2", "--max-num-seqs", "2", *SMALL) as server:
        results, amid = asyncio.run(under_load(server, 24))
        assert len(amid) == 24
        assert all(result["done"] for result in results)
        whole = [result for result in results if result["error"] is None]
        cut = [result for result in results if result["error"] is not None]
        assert 1 <= len(cut) <= 2, cut  # the two that ran there
        assert all(result["error"]["code"] == "engine_unavailable" for result in cut)
        assert all(result["finish"] == "length" for result in whole)
        assert all(result["error"] is None for result in results[-4:])  # new ones are served meanwhile
        deadline = time.monotonic() + 120
        while httpx.get(f"{server.url}/health", timeout=30).json()["replicas"]["ready"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        health = httpx.get(f"{server.url}/health", timeout=30).json()
        assert health["status"] == "ready" and health["degraded"] == ["engine_restarted"]
        # What went on elsewhere is what it would have been: half of them had been waiting for the one that died.
        for number in amid:
            if results[number]["error"] is None:
                again = complete(server, **long_answer(number))
                assert again["choices"][0]["text"] == results[number]["text"]


def hit_rate(server: RealServer, prompts: list[list[int]]) -> float:
    """Prompts two at a time."""

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for start in range(0, len(prompts), 2):
                bodies = [{"model": "demo", "prompt": p, "max_tokens": 4} for p in prompts[start : start + 2]]
                for answer in await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)):
                    assert answer.status_code == 200, answer.text

    asyncio.run(ask())
    return server.metric("windlass_prefix_cache_hits_total") / server.metric("windlass_prefix_cache_queries_total")


@pytest.mark.slow
def test_prompts_find_their_beginning_again() -> None:
    rng = random.Random(2)
    documents = [[rng.randrange(10, 4000) for _ in range(320)] for _ in range(10)]
    prompts = [[*rng.choice(documents), *(rng.randrange(10, 4000) for _ in range(20))] for _ in range(40)]
    rates = []
    for arguments in ((), ("--replicas", "2")):
        with serve(*arguments, *SMALL) as server:
            rates.append(hit_rate(server, prompts))
    assert rates[0] > 0.5 and rates[1] >= 0.9 * rates[0], rates
