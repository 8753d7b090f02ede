"""A real Ray cluster on this machine: streams equal those of one engine, deaths, scaling, and routing by prefix."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_helpers.streams import Streamed, stream
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
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}


def streams(url: str, bodies: list[dict[str, Any]]) -> list[Streamed]:
    async def read() -> list[Streamed]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            return await asyncio.gather(*(stream(client, body) for body in bodies))

    return asyncio.run(read())


class Load:
    """Clients that read one stream after the other. Lengths differ by client, so that they do not end at the same time."""

    def __init__(self, client: httpx.AsyncClient, numbers: Iterable[int]) -> None:
        self.results: list[Streamed] = []
        self._client, self._over = client, asyncio.Event()
        self._work = [asyncio.create_task(self._read(number)) for number in numbers]

    async def _read(self, number: int) -> None:
        while not self._over.is_set():
            result = Streamed()
            self.results.append(result)
            request = body([10 + number, 11, 12], max_tokens=160 + 15 * number, ignore_eos=True)
            await stream(self._client, request, result)

    async def wait_running(self, count: int = 6) -> None:
        """Wait until this many streams have tokens: by default at least two on each of two replicas, which run four."""
        while sum(bool(result.times) and not result.done for result in self.results) < count:
            await asyncio.sleep(0.002)

    async def stop(self) -> list[Streamed]:
        """Wait for the last streams, and return all."""
        self._over.set()
        await asyncio.gather(*self._work)
        return self.results

    async def replace(self) -> list[Streamed]:
        """Stop, and return the streams after four new ones, which must end within ten seconds."""
        stopped, began = asyncio.create_task(self.stop()), time.monotonic()
        bodies = [body([100 + n, 11, 12], max_tokens=200, ignore_eos=True) for n in range(4)]
        found = await asyncio.gather(*(stream(self._client, body) for body in bodies))
        assert time.monotonic() - began < 10
        return [*found, *await stopped]


def check_cut(results: list[Streamed], most: int) -> None:
    """All streams have ended, up to `most` of them with an error. The first four have none."""
    assert all(result.done for result in results)
    cut = [result for result in results if result.error is not None]
    assert all(result.end == "engine_unavailable" for result in cut) and 1 <= len(cut) <= most, cut
    assert [result.error for result in results[:4]] == [None] * 4


def check_complete(results: list[Streamed]) -> None:
    assert not [one for one in results if not one.done or one.error is not None or one.finish != "length"]


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
        expected = streams(single.url, asked)
    assert all(one.done and one.error is None and one.finish for one in expected)
    for _ in range(2):
        assert streams(deployed.url, asked) == expected
    plain = httpx.post(f"{deployed.url}/v1/completions", json=body("The sun", n=2), timeout=60).json()
    assert {choice["text"] for choice in plain["choices"]} == {expected[0].text}
    assert httpx.get(f"{deployed.url}/health").json()["status"] == "ready"
    pages = httpx.get(f"{deployed.url}/v1/cache").json()
    assert [group["engine"] for group in pages["groups"]] == [0, 1]
    refused = httpx.post(f"{deployed.url}/v1/completions", json=body("x", max_tokens=-1), timeout=60)
    assert refused.status_code == 400


def test_prompts_are_routed_to_their_cached_prefix(deployed: RayCluster) -> None:
    rng = random.Random(2)
    documents = [[rng.randrange(10, 4000) for _ in range(320)] for _ in range(10)]
    prompts = [[*rng.choice(documents), *(rng.randrange(10, 4000) for _ in range(20))] for _ in range(40)]
    with serve(*SMALL) as single:
        alone = hit_rate(single.url, single.metric, prompts)
    together = hit_rate(deployed.url, deployed.metric, prompts)
    assert alone > 0.5 and together >= 0.9 * alone, (alone, together)


def hit_rate(url: str, metric: Any, prompts: list[list[int]], at_once: int = 2) -> float:
    """Share of cached prompt tokens."""
    names = ("windlass_prefix_cache_hits_total", "windlass_prefix_cache_queries_total")
    before = [metric(name) for name in names]
    for start in range(0, len(prompts), at_once):
        done = streams(url, [body(prompt, max_tokens=4) for prompt in prompts[start : start + at_once]])
        assert all(one.error is None for one in done)
    hits, queries = (metric(name) - count for name, count in zip(names, before, strict=True))
    return float(hits / queries)


def test_killed_replica_cuts_only_its_running_streams(deployed: RayCluster) -> None:
    deployed.wait_replicas(2, 30)

    async def under_load() -> list[Streamed]:
        async with httpx.AsyncClient(base_url=deployed.url, timeout=120) as client:
            doomed = deployed.replicas()[0]
            load = Load(client, range(20))
            await load.wait_running()
            os.kill(doomed, signal.SIGKILL)
            return await load.replace()

    results = asyncio.run(under_load())
    check_cut(results, 12)
    assert all(one.finish == "length" for one in results if one.error is None)
    deployed.wait_replicas(2, 60)


def test_update_loses_no_requests(deployed: RayCluster) -> None:
    before = set(deployed.replicas())

    async def update() -> list[Streamed]:
        async with httpx.AsyncClient(base_url=deployed.url, timeout=120) as client:
            load = Load(client, range(3))
            await asyncio.to_thread(deployed.deploy, "--replicas", "2", "--max-num-seqs", "3", *SMALL)
            return await load.stop()

    results = asyncio.run(update())
    assert not before & set(deployed.replicas())
    assert len(results) > 6
    check_complete(results)


def test_requests_wait_for_a_restarted_ingress(deployed: RayCluster) -> None:
    deployed.wait_replicas(2, 60)
    before = deployed.ingress()
    os.kill(before, signal.SIGKILL)
    eventually(lambda: not alive(before), 60)
    (found,) = streams(deployed.url, [body("The sun")])
    assert found.done and found.error is None
    assert deployed.ingress() != before


def test_round_robin_finds_half_of_the_cached_prefixes(cluster: RayCluster, deployed: RayCluster) -> None:
    """Each document occurs twice. With round robin, its second prompt may go to the other replica."""
    rng = random.Random(7)
    documents = [[rng.randrange(10, 4000) for _ in range(320)] for _ in range(16)]
    order = rng.sample([*range(16)] * 2, 32)
    prompts = [[*documents[number], *(rng.randrange(10, 4000) for _ in range(8))] for number in order]
    turns = [{place % 2 for place, one in enumerate(order) if one == number} for number in range(16)]
    share = sum(len(places) == 1 for places in turns) / 16  # of documents with both prompts at one replica
    assert share == 0.5
    with serve(*SMALL) as single:
        alone = hit_rate(single.url, single.metric, prompts, 1)
    cluster.deploy_in_turns("--replicas", "2", "--max-num-seqs", "4", *SMALL)
    cluster.wait_replicas(2, 60)
    for _ in range(2):
        streams(cluster.url, [body("warm")])
    in_turns = hit_rate(cluster.url, cluster.metric, prompts, 1)
    assert in_turns == pytest.approx(share * alone), (in_turns, alone)  # the limit for routing by prefix is 0.9


def test_scaling_up_and_down_loses_no_requests(cluster: RayCluster, deployed: RayCluster) -> None:
    scaling = ("--target-requests", "2", "--scale-up-seconds", "1", "--scale-down-seconds", "4")
    cluster.deploy("--replicas", "1..2", *scaling, "--max-num-seqs", "4", *SMALL)
    cluster.wait_replicas(1, 90)

    async def scale() -> list[Streamed]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            high, low = Load(client, range(10)), Load(client, [50])
            await asyncio.to_thread(cluster.wait_replicas, 2, 90)
            stopped = asyncio.create_task(high.stop())
            await asyncio.to_thread(cluster.wait_replicas, 1, 90)
            return [*await low.stop(), *await stopped]

    results = asyncio.run(scale())
    assert len(results) > 20
    check_complete(results)


def test_full_cache_starts_another_replica(cluster: RayCluster, deployed: RayCluster) -> None:
    """The cache has 1,024 tokens, and twenty streams of 200 need more. Their number alone would not start another."""
    small = ("--kv-cache-memory", "2MiB", "--max-model-len", "512", "--max-num-seqs", "16")
    seconds = ("--scale-up-seconds", "1", "--scale-down-seconds", "2")  # two may run from the previous test
    cluster.deploy("--replicas", "1..2", "--target-requests", "1000", *seconds, *small)
    cluster.wait_replicas(1, 90)

    async def fill() -> list[Streamed]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            load = Load(client, range(20))
            await asyncio.to_thread(cluster.wait_replicas, 2, 120)
            return await load.stop()

    results = asyncio.run(fill())
    check_complete(results)


def refusal(done: Any) -> str:
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return str(done.stderr.removeprefix("error: ").rstrip("\n"))


def test_refused_deployments_are_one_line(cluster: RayCluster, deployed: RayCluster, tmp_path: Path) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    assert refusal(cluster.windlass("deploy", "demo", address=nowhere)).startswith(
        f"--address {nowhere} cannot be reached"
    )
    assert "--address must be HOST:PORT" in refusal(cluster.windlass("deploy", "demo", address="what is this"))
    message = refusal(cluster.windlass("deploy", "demo", "--replicas", "8", "--name", "other", *SMALL))
    assert message.startswith("8 replicas need 8 CPUs and 0.5 for the server, the cluster has 4")
    for wrong in ("0", "3..2", "many"):
        assert "--replicas must be a number" in refusal(cluster.windlass("deploy", "demo", "--replicas", wrong))
    assert "no deployment with this name" in refusal(cluster.windlass("delete", "--name", "other"))
    assert refusal(cluster.windlass("deploy", tmp_path / "nothing"))
    assert "applies only to a server without Ray" in refusal(
        cluster.windlass("deploy", "demo", "--uds", tmp_path / "socket")
    )
    assert httpx.get(f"{cluster.url}/health").json()["status"] == "ready"  # the existing deployment is unchanged


def test_command_of_another_version_is_refused(cluster: RayCluster, deployed: RayCluster) -> None:
    code = (
        "import sys, windlass._version as v; v.__version__ = '99.0'\n"
        "from windlass.server.cli.main import main; sys.argv[0] = 'windlass'; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "ray", "deploy", "demo", "--address", cluster.address]
    command += ["--port", str(deployed.port), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert refusal(done).startswith("this machine has Windlass 99.0, the deployment is of")
    # The replicas refuse it if no deployment has this name.
    command += ["--name", "other"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment())
    assert f"cannot listen on 127.0.0.1 port {deployed.port}" in refusal(done)
    command[command.index("--port") + 1] = str(free_port())
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment())
    assert "the deployment is of 99.0" in refusal(done)
    assert refusal(cluster.windlass("delete", "--name", "other")).endswith("no deployment with this name")


def test_replica_of_two_ranks_is_replaced(cluster: RayCluster, deployed: RayCluster) -> None:
    ranks = ("--tensor-parallel", "2", "--threads", "1")
    message = refusal(cluster.windlass("deploy", "demo", "--replicas", "3", "--name", "other", *ranks, *SMALL))
    assert message.startswith("3 replicas need 6 CPUs and 0.5 for the server, the cluster has 4")
    cluster.deploy("--replicas", "1", *ranks, *SMALL)
    cluster.wait_replicas(1, 60)
    asked = [body("The sun"), body([7, 8, 9], max_tokens=64, ignore_eos=True)]
    with serve(*ranks, *SMALL) as single:
        expected = streams(single.url, asked)
    assert streams(cluster.url, asked) == expected
    os.kill(cluster.replicas()[0], signal.SIGKILL)
    found = streams(cluster.url, asked)
    assert found == expected


def processes_below(pid: int) -> list[int]:
    """A process and its descendants."""
    return [pid, *(one for child in children(pid) for one in processes_below(child))]


def machine_of_an_engine(cluster: RayCluster, raylets: list[int]) -> list[int]:
    """The processes of a machine with an engine and without the ingress, for which there is no other machine."""
    engines, ingress = set(cluster.replicas()), cluster.ingress()
    machines = [processes_below(raylet) for raylet in raylets]
    return next(pids for pids in machines if ingress not in pids and not engines.isdisjoint(pids))


def test_dead_machine_behind_the_proxy_of_ray() -> None:
    """Ray places an engine on each of two raylets and the ingress on a third. A machine with an engine is killed under load."""
    with ray_machines([1, 1, 1]) as (cluster, raylets):
        ranks = ("--replicas", "1", "--tensor-parallel", "2", "--threads", "1")
        message = refusal(cluster.windlass("deploy", "demo", *ranks, *SMALL))
        assert message.startswith("1 replicas need 2 CPUs of one machine each, and only 0 fit")
        cluster.deploy("--listener", "proxy", "--replicas", "2", "--max-num-seqs", "4", *SMALL)
        cluster.wait_replicas(2, 60)
        with serve(*SMALL) as single:
            asked = [body("The sun"), body([5, 6, 7], temperature=0.8, seed=3)]
            assert streams(cluster.url, asked) == streams(single.url, asked)

        async def under_load() -> list[Streamed]:
            async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
                doomed = machine_of_an_engine(cluster, raylets[1:])
                load = Load(client, range(12))
                await load.wait_running()
                for pid in doomed:
                    with contextlib.suppress(ProcessLookupError):  # workers end with their raylet
                        os.kill(pid, signal.SIGKILL)
                return await load.replace()

        check_cut(asyncio.run(under_load()), 8)
