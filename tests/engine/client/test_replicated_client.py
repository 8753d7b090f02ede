"""ReplicatedClient with scripted engines: routing, crashes and combined statistics."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from helpers.configs import engine_config
from helpers.eventually import eventually, eventually_async
from helpers.scripted_core import BUG, FIRST_TOKEN, REFUSE
from helpers.waiting_core import POISON

from windlass.engine.client.process_client import ProcessClient
from windlass.engine.client.replicated_client import ReplicatedClient, concat_cache_snapshots, sum_stats
from windlass.engine.errors import EngineDeadError, EngineError, LoadError, QueueFullError, RequestError
from windlass.engine.interface.introspection import CacheGroupSnapshot, CacheQuery, CacheSequenceSnapshot, CacheSnapshot
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.outputs import EngineStats
from windlass.engine.interface.request import EngineRequest, SamplingParams

TESTS = Path(__file__).parents[2]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "0.005")
    monkeypatch.setattr("windlass.engine.client.request_router.STATS_TIMEOUT", 20.0)  # asserts that a new one is clean


def make_client(replicas: int = 2, **values) -> ReplicatedClient:
    values.setdefault("max_num_seqs", 1)
    config = engine_config("scripted", replicas=replicas, **values)
    core = "helpers.waiting_core:WaitingCore"
    return ReplicatedClient([ProcessClient(config, core=core, backoff=0.05) for _ in range(replicas)], config)


@asynccontextmanager
async def running(**values):
    client = make_client(**values)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def request(name: str, first: int = 50, max_tokens: int = 5, length: int = 2, **fields) -> EngineRequest:
    return EngineRequest(name, [first, *[7] * (length - 1)], SamplingParams(max_tokens=max_tokens), **fields)


async def tokens(client: ReplicatedClient, wanted: EngineRequest) -> list[int]:
    return [token async for output in client.generate(wanted) for token in output.token_ids]


async def test_replicas_behave_like_one_engine():
    async with running() as client:
        first, second = client.engines
        assert client.info is not None and client.info.replicas == 2
        assert (client.state, client.restarts) == ("ready", 0)
        names = [f"r{number}" for number in range(6)]
        answers = await asyncio.gather(*(tokens(client, request(name)) for name in names))
        assert answers == [[FIRST_TOKEN + i for i in range(5)]] * 6
        stats = await client.stats()
        assert stats.generation_tokens == 30 and len(stats.queue_seconds) == 6
        assert [part.generation_tokens for part in stats.engines] == [
            15,
            15,
        ]  # chosen by load only
        assert second.config.cache.memory == client.info.kv_cache_bytes and second.config.replicas == 1
        assert first.config == second.config
        again = asyncio.create_task(tokens(client, request("again", max_tokens=100_000)))
        await eventually_async(lambda: "again" in client._replica_of)
        with pytest.raises(RequestError, match="already running"):
            await tokens(client, request("again"))
        with pytest.raises(RequestError, match="no such thing"):
            await tokens(client, request("refused", REFUSE))
        with pytest.raises(EngineError, match="a defect"):
            await tokens(client, request("bug", BUG))
        client.end_sample("again", 0)
        found = await again
        assert found == [FIRST_TOKEN + i for i in range(len(found))]
    assert client.state == "closed"
    with pytest.raises(EngineDeadError, match="closed"):
        await tokens(client, request("late"))


async def test_prompts_are_routed_by_prefix():
    async with running(max_num_seqs=4) as client:
        for number in range(4):
            await tokens(client, request(f"a{number}", 60, length=200))
            await tokens(client, request(f"b{number}", 61, length=200))
            await tokens(client, request(f"c{number}", 60, length=200, cache_salt="another"))
        parts = (await client.stats()).engines
        assert sorted(part.generation_tokens for part in parts) == [20, 40]  # one of three prefixes has its own engine


async def test_unstarted_requests_are_moved_and_others_fail():
    async with running() as client:
        victim, other = client.engines
        lengths = [100_000, *[60] * 7]  # the first request runs as long as its engine
        work = [asyncio.create_task(tokens(client, request(f"r{n}", max_tokens=m))) for n, m in enumerate(lengths)]
        await eventually_async(lambda: victim._child.last_requests() == {"r0"})
        os.kill(victim.pid, signal.SIGKILL)
        told, *results = await asyncio.gather(*work, return_exceptions=True)
        assert isinstance(told, EngineDeadError) and "send it again" in str(told)
        assert results == [[FIRST_TOKEN + i for i in range(60)]] * 7
        assert client.state == "ready" and other.restarts == 0
        await eventually_async(lambda: client.restarts == 1 and victim.state == "ready")
        assert await tokens(client, request("new")) == [FIRST_TOKEN + i for i in range(5)]
        stats = await client.stats()
        assert None not in stats.engines


async def test_request_that_kills_an_engine_is_not_moved():
    async with running() as client:
        with pytest.raises(EngineDeadError):
            await tokens(client, request("poison", POISON))
        assert sum(engine.state == "ready" for engine in client.engines) == 1
        await eventually_async(lambda: all(engine.state == "ready" for engine in client.engines))
        assert client.restarts == 1


@pytest.mark.slow
async def test_requests_fail_when_all_engines_are_gone():
    async with running() as client:
        work = [asyncio.create_task(tokens(client, request(f"r{n}", max_tokens=100_000))) for n in range(6)]
        await eventually_async(lambda: all(engine._child.last_requests() for engine in client.engines))
        for engine in client.engines:
            os.kill(engine.pid, signal.SIGKILL)
        eventually(
            lambda: all(engine._child.ended for engine in client.engines), 20
        )  # otherwise one may restart before
        results = await asyncio.gather(*work, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        await eventually_async(
            lambda: client.restarts == 2 and all(engine.state == "ready" for engine in client.engines)
        )
        await eventually_async(lambda: any(replica.usable for replica in client._replicas))
        assert len(await tokens(client, request("new"))) == 5


@pytest.mark.slow
async def test_queue_limit_covers_all_replicas():
    async with running(max_waiting=2) as client:
        lengths = [100_000, 100_000, 60, 60]  # the first two run, one per engine, and the others wait
        work = [asyncio.create_task(tokens(client, request(f"r{n}", max_tokens=m))) for n, m in enumerate(lengths)]
        await eventually_async(lambda: [replica.in_flight for replica in client._replicas] == [2, 2])
        with pytest.raises(QueueFullError):
            await tokens(client, request("too many"))
        for running_one in ("r0", "r1"):
            client.end_sample(running_one, 0)
        assert [len(found) for found in await asyncio.gather(*work)][2:] == [60] * 2


async def test_ended_samples_and_aborted_requests_are_removed():
    async with running() as client:
        stream = client.generate(request("a", max_tokens=10_000))
        await anext(stream)
        await stream.aclose()
        ended = EngineRequest("b", [50], SamplingParams(max_tokens=10_000, n=2))
        seen = []
        async for output in client.generate(ended):
            seen.append(output)
            if len(seen) == 4:
                client.end_sample("b", 0)
                client.end_sample("b", 1)
        assert [replica.in_flight for replica in client._replicas] == [0, 0] and client._replica_of == {}
        for _ in range(20):
            if (await client.stats()).num_running == 0:
                return
        raise AssertionError("something still runs")


async def test_adapters_are_loaded_in_all_and_restarted_engines():
    async with running() as client:
        victim, other = client.engines
        await client.load_adapter(AdapterSource(1, "one", "/one"))
        assert victim.adapter_ids == other.adapter_ids == {1}
        with pytest.raises(RequestError):
            await client.load_adapter(AdapterSource(2, "two", "/bad"))
        assert victim.adapter_ids == other.adapter_ids == {1}
        os.kill(victim.pid, signal.SIGKILL)
        await eventually_async(lambda: victim.state != "ready")
        await client.load_adapter(AdapterSource(3, "three", "/three"))
        client.drop_adapter(1)
        await eventually_async(lambda: all(replica.usable for replica in client._replicas))
        assert victim.adapter_ids == other.adapter_ids == {3}
        client.drop_adapter(3)
        assert victim.adapter_ids == other.adapter_ids == frozenset()


@pytest.mark.slow
async def test_requests_are_routed_to_engines_with_their_adapter(tmp_path, caplog):
    async with running(max_num_seqs=4) as client:
        victim, other = client.engines
        await client.load_adapter(AdapterSource(1, "one", str(tmp_path)))
        (tmp_path / "gone").touch()
        os.kill(victim.pid, signal.SIGKILL)
        await eventually_async(lambda: victim.restarts == 1 and all(replica.usable for replica in client._replicas))
        assert not victim.adapter_ids and client.adapter_ids == other.adapter_ids == {1}
        assert "replica 0: adapter one: no adapter" in caplog.text
        streams = [client.generate(request(f"r{number}", max_tokens=100, adapter=1)) for number in range(4)]
        for stream in streams:
            await anext(stream)
        assert [replica.in_flight for replica in client._replicas] == [0, 4]
        os.kill(other.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError):
                _ = [output async for output in stream]
        await eventually_async(lambda: other.restarts == 1 and all(replica.usable for replica in client._replicas))
        assert client.adapter_ids == frozenset()


@pytest.mark.parametrize("leaves", [False, True])
async def test_engine_started_during_a_load_has_the_adapter(monkeypatch, leaves):
    async with running() as client:
        victim, other = client.engines
        go, load = asyncio.Event(), other.load_adapter

        async def slowly(source):
            await go.wait()
            return await load(source)

        monkeypatch.setattr(other, "load_adapter", slowly)
        os.kill(victim.pid, signal.SIGKILL)
        await eventually_async(lambda: victim.state != "ready")
        loading = asyncio.create_task(client.load_adapter(AdapterSource(1, "one", "/one")))
        await eventually_async(lambda: all(replica.usable for replica in client._replicas))
        if leaves:
            assert victim.adapter_ids == {1}
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            assert not victim.adapter_ids and not client.adapter_ids
        else:
            go.set()
            await loading
            assert victim.adapter_ids == other.adapter_ids == client.adapter_ids == {1}


async def test_replica_that_cannot_load_fails_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("SCRIPT_RELOAD_FILE", str(tmp_path / "mark"))  # the second load fails
    client = make_client()
    with pytest.raises(LoadError, match="the second load fails"):
        await client.start()
    assert client.state == "failed" and client.failure == "the second load fails"
    await client.close()


@pytest.mark.slow
async def test_abandoned_replica_does_not_affect_others(monkeypatch):
    async with running() as client:
        victim, other = client.engines
        monkeypatch.setenv("SCRIPT_LOAD_ERROR", "the disk is gone")  # of engines started from now on
        os.kill(victim.pid, signal.SIGKILL)
        await eventually_async(lambda: victim.state == "failed")
        assert client.state == "ready" and len(await tokens(client, request("new"))) == 5
        os.kill(other.pid, signal.SIGKILL)
        assert await client.wait_state("failed") == "failed"
        assert "the disk is gone" in client.failure
        with pytest.raises(EngineDeadError, match="given up"):
            await tokens(client, request("late"))


async def test_statistics_are_summed():
    one = EngineStats(num_running=2, kv_cache_usage=0.5, recomputed_tokens={"a": 1}, queue_seconds=(1.0,), num_steps=3)
    two = EngineStats(kv_cache_usage=0.2, recomputed_tokens={"a": 2, "b": 1}, step_tokens=(1, 2), num_steps=4)
    found = sum_stats([one, None, two])
    assert (found.num_running, found.kv_cache_usage, found.num_steps) == (2, 0.5, 7)
    assert found.recomputed_tokens == {"a": 3, "b": 1} and found.queue_seconds == (1.0,)
    assert found.step_tokens == (1, 2) and found.engines == (one, None, two)
    assert sum_stats([None]) == EngineStats(engines=(None,))


async def test_cache_pages_of_replicas_are_combined():
    def picture(sequences: int, owners: tuple[int, ...]) -> CacheSnapshot:
        group = CacheGroupSnapshot(2, 2, 1, None, (1, 0), (0, 0), (0, 1), owners)
        return CacheSnapshot(16, (group,), (CacheSequenceSnapshot(1, 1, 0, 1, 0, 0),) * sequences, 0.1)

    found = concat_cache_snapshots([(0, picture(2, (1, -1))), (2, picture(1, (0, -1)))])
    assert [(group.engine, group.owners) for group in found.groups] == [(0, (1, -1)), (2, (2, -1))]
    assert len(found.sequences) == 3
    async with running() as client:
        with pytest.raises(RequestError, match="nothing to see"):
            await client.inspect(CacheQuery())
