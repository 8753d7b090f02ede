"""A real Ray cluster on this machine: streams equal those of one engine, deaths, scaling, and prompts that find their place."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.eventually import alive, children, eventually
from helpers.ray_cluster import RayCluster, environment, free_port, ray_cluster, ray_machines
from helpers.real_server import serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra: pip install -e '.[ray]'"),
]

SMALL = ("--kv-cache-memory", "32MiB", "--max-model-len", "512")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def deployed(cluster: RayCluster) -> RayCluster:
    cluster.deploy("--replicas", "2", "--max-num-seqs", "4", *SMALL)
    return cluster


def body(prompt: Any, **fields: object) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}


async def stream(client: httpx.AsyncClient, asked: dict[str, Any], begun: set[int] | None = None) -> dict[str, Any]:
    """A stream as its client saw it. begun: has its first token of the prompt in it while tokens have come, and not all."""
    found: dict[str, Any] = {"text": "", "error": None, "done": False, "finish": None}
    async with client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return {**found, "error": answer.json()["error"], "done": True}
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                found["done"] = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                found["error"] = event.get("error", found["error"])
                if begun is not None:
                    begun.add(asked["prompt"][0])
                for choice in event.get("choices", ()):
                    found["text"] += choice["text"]
                    found["finish"] = choice["finish_reason"] or found["finish"]
    if begun is not None:
        begun.discard(asked["prompt"][0])
    return found


async def streams(url: str, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await asyncio.gather(*(stream(client, one) for one in asked))


def test_streams_equal_those_of_one_engine(deployed: RayCluster) -> None:
    rng = random.Random(1)
    long = [rng.randrange(10, 4000) for _ in range(200)]
    asked = [
        body("The sun"),
        body(""),
        body([5]),
        body(long),
        body(long, temperature=0.9, seed=4),
        body(long, cache_salt="s"),
    ]
    asked += [body(long, rope_scaling={"rope_type": "yarn", "factor": 2.0}), body("In the beginning " * 20)]
    with serve(*SMALL) as single:
        expected = asyncio.run(streams(single.url, asked))
    assert all(one["done"] and one["error"] is None and one["finish"] for one in expected)
    for _ in range(2):
        assert asyncio.run(streams(deployed.url, asked)) == expected
    plain = httpx.post(f"{deployed.url}/v1/completions", json=body("The sun", n=2), timeout=60).json()
    assert {choice["text"] for choice in plain["choices"]} == {expected[0]["text"]}
    assert httpx.get(f"{deployed.url}/health").json()["status"] == "ready"
    pages = httpx.get(f"{deployed.url}/v1/cache").json()
    assert [group["engine"] for group in pages["groups"]] == [0, 1]
    refused = httpx.post(f"{deployed.url}/v1/completions", json=body("x", max_tokens=-1), timeout=60)
    assert refused.status_code == 400


def test_prompts_find_their_beginning_again(deployed: RayCluster) -> None:
    rng = random.Random(2)
    documents = [[rng.randrange(10, 4000) for _ in range(320)] for _ in range(10)]
    prompts = [[*rng.choice(documents), *(rng.randrange(10, 4000) for _ in range(20))] for _ in range(40)]
    with serve(*SMALL) as single:
        alone = hit_rate(single.url, single.metric, prompts)
    together = hit_rate(deployed.url, deployed.metric, prompts)
    assert alone > 0.5 and together >= 0.9 * alone, (alone, together)


def hit_rate(url: str, metric: Any, prompts: list[list[int]], at_once: int = 2) -> float:
    """Tokens of prompts that were cached, of all."""
    names = ("windlass_prefix_cache_hits_total", "windlass_prefix_cache_queries_total")
    before = [metric(name) for name in names]
    for start in range(0, len(prompts), at_once):
        done = asyncio.run(streams(url, [body(prompt, max_tokens=4) for prompt in prompts[start : start + at_once]]))
        assert all(one["error"] is None for one in done)
    hits, asked = (metric(name) - count for name, count in zip(names, before, strict=True))
    return float(hits / asked)


def test_a_killed_replica_under_load(deployed: RayCluster) -> None:
    deployed.wait_replicas(2, 30)

    async def under_load() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=deployed.url, timeout=120) as client:
            doomed = deployed.replicas()[0]
            work, over = await a_load(client, 20)
            os.kill(doomed, signal.SIGKILL)
            over.set()
            return [*await new_ones(client), *await ended(work)]

    results = asyncio.run(under_load())
    assert all(one["done"] for one in results)
    cut = [one for one in results if one["error"] is not None]
    assert all(one["error"]["code"] == "engine_unavailable" for one in cut) and 1 <= len(cut) <= 12, cut
    assert all(one["finish"] == "length" for one in results if one["error"] is None)
    assert [one["error"] for one in results[:4]] == [None] * 4
    deployed.wait_replicas(2, 60)


async def keep_asking(
    client: httpx.AsyncClient, number: int, until: asyncio.Event, begun: set[int] | None = None
) -> list[dict[str, Any]]:
    """Answers of another length for each number: streams that began together do not end together."""
    found = []
    while not until.is_set():
        asked = body([10 + number, 11, 12], max_tokens=160 + 15 * number, ignore_eos=True)
        found.append(await stream(client, asked, begun))
    return found


Asking = list[asyncio.Task[list[dict[str, Any]]]]


async def a_load(client: httpx.AsyncClient, clients: int) -> tuple[Asking, asyncio.Event]:
    """So many clients that ask until they are told, once six are amid an answer: two on each of two replicas, which take four."""
    over, begun = asyncio.Event(), set[int]()
    work = [asyncio.create_task(keep_asking(client, n, over, begun)) for n in range(clients)]
    while len(begun) < 6:
        await asyncio.sleep(0.002)
    return work, over


async def new_ones(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Four streams that begin now, whole within ten seconds."""
    began = time.monotonic()
    asked = [body([100 + n, 11, 12], max_tokens=200, ignore_eos=True) for n in range(4)]
    found = await asyncio.gather(*(stream(client, one) for one in asked))
    assert time.monotonic() - began < 10
    return found


async def ended(work: Asking) -> list[dict[str, Any]]:
    return [result for results in await asyncio.gather(*work) for result in results]


def test_an_update_loses_nothing(deployed: RayCluster) -> None:
    before = set(deployed.replicas())

    async def update() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=deployed.url, timeout=120) as client:
            enough = asyncio.Event()
            asking = [asyncio.create_task(keep_asking(client, n, enough)) for n in range(3)]
            await asyncio.to_thread(deployed.deploy, "--replicas", "2", "--max-num-seqs", "3", *SMALL)
            enough.set()
            return await ended(asking)

    results = asyncio.run(update())
    assert not before & set(deployed.replicas())
    assert len(results) > 6
    assert not [one for one in results if not one["done"] or one["error"] is not None or one["finish"] != "length"]


def test_who_connects_while_the_http_side_is_away_waits_for_it(deployed: RayCluster) -> None:
    deployed.wait_replicas(2, 60)
    before = deployed.ingress()
    os.kill(before, signal.SIGKILL)
    eventually(lambda: not alive(before), 60)
    (found,) = asyncio.run(streams(deployed.url, [body("The sun")]))
    assert found["done"] and found["error"] is None
    assert deployed.ingress() != before


def test_in_turns_half_as_much_is_found(cluster: RayCluster, deployed: RayCluster) -> None:
    """Each document is asked for twice; in turns, the second time may be the other replica's."""
    rng = random.Random(7)
    documents = [[rng.randrange(10, 4000) for _ in range(320)] for _ in range(16)]
    order = rng.sample([*range(16)] * 2, 32)
    prompts = [[*documents[number], *(rng.randrange(10, 4000) for _ in range(8))] for number in order]
    turns = [{place % 2 for place, one in enumerate(order) if one == number} for number in range(16)]
    share = sum(len(places) == 1 for places in turns) / 16  # of the second times, that are the same replica's
    assert share == 0.5
    with serve(*SMALL) as single:
        alone = hit_rate(single.url, single.metric, prompts, 1)
    cluster.deploy_in_turns("--replicas", "2", "--max-num-seqs", "4", *SMALL)
    in_turns = one_by_one(cluster, prompts)
    assert in_turns == pytest.approx(share * alone), (in_turns, alone)  # half, where 0.9 is asked of prefixes


def one_by_one(cluster: RayCluster, prompts: list[list[int]]) -> float:
    cluster.wait_replicas(2, 60)
    for _ in range(2):
        asyncio.run(streams(cluster.url, [body("warm")]))
    return hit_rate(cluster.url, cluster.metric, prompts, 1)


def test_scaling_up_and_down_loses_nothing(cluster: RayCluster, deployed: RayCluster) -> None:
    scaling = ("--target-requests", "2", "--scale-up-seconds", "1", "--scale-down-seconds", "4")
    cluster.deploy("--replicas", "1..2", *scaling, "--max-num-seqs", "4", *SMALL)
    cluster.wait_replicas(1, 90)

    async def scale() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            much, little = asyncio.Event(), asyncio.Event()
            crowd = [asyncio.create_task(keep_asking(client, n, much)) for n in range(10)]
            one = asyncio.create_task(keep_asking(client, 50, little))
            await asyncio.to_thread(cluster.wait_replicas, 2, 90)
            much.set()
            await asyncio.to_thread(cluster.wait_replicas, 1, 90)
            little.set()
            return await ended([*crowd, one])

    results = asyncio.run(scale())
    assert len(results) > 20
    assert not [one for one in results if not one["done"] or one["error"] is not None or one["finish"] != "length"]


def test_full_caches_bring_another_replica(cluster: RayCluster, deployed: RayCluster) -> None:
    """Of 1,024 tokens, where twenty streams of 200 ask for more; requests alone would be enough for one."""
    small = ("--kv-cache-memory", "2MiB", "--max-model-len", "512", "--max-num-seqs", "16")
    seconds = ("--scale-up-seconds", "1", "--scale-down-seconds", "2")  # there may be two from before
    cluster.deploy("--replicas", "1..2", "--target-requests", "1000", *seconds, *small)
    cluster.wait_replicas(1, 90)

    async def fill() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            enough = asyncio.Event()
            crowd = [asyncio.create_task(keep_asking(client, n, enough)) for n in range(20)]
            await asyncio.to_thread(cluster.wait_replicas, 2, 120)
            enough.set()
            return await ended(crowd)

    results = asyncio.run(fill())
    assert not [one for one in results if not one["done"] or one["error"] is not None or one["finish"] != "length"]


def refusal(done: Any) -> str:
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return str(done.stderr.removeprefix("error: ").rstrip("\n"))


def test_what_cannot_be_deployed_is_one_line(cluster: RayCluster, deployed: RayCluster, tmp_path: Path) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    assert refusal(cluster.windlass("deploy", "demo", address=nowhere)).startswith(
        f"--address {nowhere} cannot be reached"
    )
    assert "--address must be HOST:PORT" in refusal(cluster.windlass("deploy", "demo", address="what is this"))
    said = refusal(cluster.windlass("deploy", "demo", "--replicas", "8", "--name", "other", *SMALL))
    assert said.startswith("8 replicas need 8 CPUs and 0.5 for the server, the cluster has 4")
    for wrong in ("0", "3..2", "many"):
        assert "--replicas must be a number" in refusal(cluster.windlass("deploy", "demo", "--replicas", wrong))
    assert "no deployment has this name" in refusal(cluster.windlass("delete", "--name", "other"))
    assert refusal(cluster.windlass("deploy", tmp_path / "nothing"))
    assert "applies only to a server without Ray" in refusal(
        cluster.windlass("deploy", "demo", "--uds", tmp_path / "socket")
    )
    assert httpx.get(f"{cluster.url}/health").json()["status"] == "ready"  # what was there is there


def test_a_deployment_of_another_version_is_refused(cluster: RayCluster, deployed: RayCluster) -> None:
    """Its version is that of this installation, so the command is run with another one."""
    code = (
        "import sys, windlass._version as v; v.__version__ = '99.0'\n"
        "from windlass.server.cli.main import main; sys.argv[0] = 'windlass'; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "ray", "deploy", "demo", "--address", cluster.address]
    command += ["--port", str(deployed.port), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert refusal(done).startswith("this machine has Windlass 99.0, the deployment is of")
    # And by the replicas themselves, where nothing of that name runs.
    command += ["--name", "other"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment())
    assert f"cannot listen on 127.0.0.1 port {deployed.port}" in refusal(done)
    command[command.index("--port") + 1] = str(free_port())
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment())
    assert "the deployment is of 99.0" in refusal(done)
    assert refusal(cluster.windlass("delete", "--name", "other")).endswith("has this name on that cluster")


def test_a_replica_of_two_ranks(cluster: RayCluster, deployed: RayCluster) -> None:
    """It has two cores of the cluster, and is ended whole."""
    ranks = ("--tensor-parallel", "2", "--threads", "1")
    said = refusal(cluster.windlass("deploy", "demo", "--replicas", "3", "--name", "other", *ranks, *SMALL))
    assert said.startswith("3 replicas need 6 CPUs and 0.5 for the server, the cluster has 4")
    cluster.deploy("--replicas", "1", *ranks, *SMALL)
    cluster.wait_replicas(1, 60)
    asked = [body("The sun"), body([7, 8, 9], max_tokens=64, ignore_eos=True)]
    with serve(*ranks, *SMALL) as single:
        expected = asyncio.run(streams(single.url, asked))
    assert asyncio.run(streams(cluster.url, asked)) == expected
    os.kill(cluster.replicas()[0], signal.SIGKILL)
    found = asyncio.run(streams(cluster.url, asked))
    assert found == expected


def processes_below(pid: int) -> list[int]:
    """A process and all that it has started, itself first."""
    return [pid, *(one for child in children(pid) for one in processes_below(child))]


def machine_of_an_engine(cluster: RayCluster, raylets: list[int]) -> list[int]:
    """The processes of one of these machines, which has an engine and not the HTTP side: that has no other place to go to."""
    engines, ingress = set(cluster.replicas()), cluster.ingress()
    machines = [processes_below(raylet) for raylet in raylets]
    return next(pids for pids in machines if ingress not in pids and not engines.isdisjoint(pids))


def test_a_machine_that_dies_and_rays_own_proxy() -> None:
    """Three raylets, where Ray places an engine on each of two and the HTTP side on one; one with an engine dies under load."""
    with ray_machines([1, 1, 1]) as (cluster, raylets):
        ranks = ("--replicas", "1", "--tensor-parallel", "2", "--threads", "1")
        said = refusal(cluster.windlass("deploy", "demo", *ranks, *SMALL))
        assert said.startswith("1 replicas need 2 CPUs of one machine each, and only 0 fit")
        cluster.deploy("--listener", "proxy", "--replicas", "2", "--max-num-seqs", "4", *SMALL)
        cluster.wait_replicas(2, 60)
        with serve(*SMALL) as single:
            asked = [body("The sun"), body([5, 6, 7], temperature=0.8, seed=3)]
            assert asyncio.run(streams(cluster.url, asked)) == asyncio.run(streams(single.url, asked))

        async def under_load() -> list[dict[str, Any]]:
            async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
                doomed = machine_of_an_engine(cluster, raylets[1:])
                work, over = await a_load(client, 12)
                for pid in doomed:
                    with contextlib.suppress(ProcessLookupError):  # workers end with their raylet
                        os.kill(pid, signal.SIGKILL)
                over.set()
                return [*await new_ones(client), *await ended(work)]

        results = asyncio.run(under_load())
        assert all(one["done"] for one in results)
        cut = [one for one in results if one["error"] is not None]
        assert all(one["error"]["code"] == "engine_unavailable" for one in cut) and 1 <= len(cut) <= 8, cut
        assert [one["error"] for one in results[:4]] == [None] * 4
