"""ProcessClient with a scripted core: streams, aborts, crashes, restarts, and the end of the parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import types
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.configs import engine_config
from helpers.eventually import alive, eventually, eventually_async, in_time
from helpers.scripted_core import BUG, CRASH, FAIL, FIRST_TOKEN, HANG, KILL, REFUSE, SPIN

from windlass.engine import process_setup
from windlass.engine.client import child_process, request_router, supervision
from windlass.engine.client.child_process import ChildProcess
from windlass.engine.client.process_client import ProcessClient
from windlass.engine.client.request_router import AdapterCalls
from windlass.engine.client.supervision import ProcessActivity
from windlass.engine.core.messages import AdapterLoaded, DropAdapter, LoadAdapter
from windlass.engine.errors import (
    EngineDeadError,
    EngineError,
    LoadError,
    QueueFullError,
    RequestError,
    SlowConsumerError,
)
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import CacheQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource
from windlass.engine.interface.request import EngineRequest, SamplingParams

TESTS = Path(__file__).parents[2]
CORE = "helpers.scripted_core:ScriptedCore"

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "0.005")
    monkeypatch.setattr(request_router, "STATS_TIMEOUT", 20.0)  # asserts that a new one is clean


@pytest.fixture
def spares(monkeypatch):
    """All started processes, in order."""
    made = []

    class Noted(ChildProcess):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(child_process, "ChildProcess", Noted)
    return made


def make_client(config: EngineConfig | None = None, **options) -> ProcessClient:
    options.setdefault("backoff", 0.05)
    return ProcessClient(config or engine_config("scripted"), core=CORE, **options)


@asynccontextmanager
async def running(config: EngineConfig | None = None, **options):
    client = make_client(config, **options)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def request(name: str, first: int = 50, max_tokens: int = 5, n: int = 1) -> EngineRequest:
    return EngineRequest(name, [first, 7], SamplingParams(max_tokens=max_tokens, n=n))


async def tokens(client: ProcessClient, wanted: EngineRequest) -> list[int]:
    return [token async for output in client.generate(wanted) for token in output.token_ids]


async def test_streams_are_split_by_request_and_sample():
    seen = []
    async with running(progress=lambda *report: seen.append(report)) as client:
        assert client.info is not None and client.info.vocab_size == 4096
        assert (seen[0], seen[-1]) == (("reading weights", 1, 3), ("reading weights", 3, 3))
        short, long, double = await asyncio.gather(
            tokens(client, request("a", max_tokens=3)),
            tokens(client, request("b", max_tokens=9)),
            tokens(client, request("c", max_tokens=2, n=2)),
        )
        assert short == [FIRST_TOKEN + i for i in range(3)]
        assert long == [FIRST_TOKEN + i for i in range(9)]
        assert double == [100, 100, 101, 101]
    assert client.state == "closed" and client.restarts == 0
    with pytest.raises(EngineDeadError):
        await tokens(client, request("d"))


async def test_error_fails_only_its_request():
    async with running(engine_config("scripted", max_waiting=2)) as client:
        neighbour = asyncio.create_task(tokens(client, request("neighbour", max_tokens=100_000)))
        with pytest.raises(RequestError) as refused:
            await tokens(client, request("refused", REFUSE))
        assert (refused.value.param, refused.value.code) == ("prompt", "refused")
        with pytest.raises(EngineError, match="KeyError"):
            await tokens(client, request("bug", BUG))
        with pytest.raises(RequestError, match="in flight"):
            await tokens(client, request("fail", FAIL))
        stream = client.generate(request("second", max_tokens=100_000))
        await anext(stream)
        with pytest.raises(QueueFullError) as full:
            await tokens(client, request("third"))
        assert full.value.retry_after == 7.0
        with pytest.raises(RequestError, match="already running"):
            await tokens(client, request("second"))
        await stream.aclose()
        assert len(await tokens(client, request("later", max_tokens=60))) == 60
        client.end_sample("neighbour", 0)
        found = await neighbour
        assert len(found) > 60 and found == [FIRST_TOKEN + i for i in range(len(found))]
        assert client.restarts == 0


async def test_closing_a_stream_aborts_its_request(monkeypatch):
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "0.05")
    async with running() as client:
        for aborts in range(1, 4):  # on a busy machine at least one should be in time
            stream = client.generate(request("a", max_tokens=10_000))
            await anext(stream)
            before = (await client.stats()).num_steps
            await stream.aclose()
            after = await client.stats()
            assert after.num_running == 0 and after.recomputed_tokens == {"aborts": aborts}
            if after.num_steps - before <= 2:  # the current step, and at most one started before the abort arrived
                break
        else:
            raise AssertionError("each time more steps were taken")

        task = asyncio.create_task(tokens(client, request("b", max_tokens=10_000)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.stats()).recomputed_tokens == {"aborts": aborts + 1}


async def test_id_can_be_reused_after_an_abort():
    async with running() as client:
        for _ in range(20):
            stream = client.generate(request("same", max_tokens=10_000))
            assert (await anext(stream)).token_ids == (FIRST_TOKEN,)  # without late outputs of the previous request
            await anext(stream)
            await stream.aclose()
        assert await tokens(client, request("same", max_tokens=2)) == [100, 101]


@pytest.mark.parametrize("how", ["from outside", "from inside"])
async def test_sigkill_fails_requests_in_flight_and_restarts(how):
    async with running() as client:
        first = 50 if how == "from outside" else KILL
        victims = [asyncio.create_task(tokens(client, request(f"v{i}", first, 100_000))) for i in range(3)]
        await asyncio.sleep(0.1 if how == "from outside" else 0)
        if how == "from outside":
            os.kill(client.pid, signal.SIGKILL)
        for result in await asyncio.gather(*victims, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
        assert client.state == "restarting"
        with pytest.raises(EngineDeadError, match="restarted"):
            await tokens(client, request("too early"))
        with pytest.raises(EngineDeadError):
            await client.stats()
        await client.wait_ready()
        assert client.restarts == 1
        assert await tokens(client, request("later", max_tokens=3)) == [100, 101, 102]
        assert (await client.stats()).num_steps == 3  # counters of the new process


async def test_crashed_step_is_logged_and_engine_restarted(capfd):
    async with running() as client:
        with pytest.raises(EngineDeadError):
            await tokens(client, request("bad", CRASH, 10))
        await client.wait_ready()
        assert client.restarts == 1
    errors = capfd.readouterr().err
    assert "Traceback" in errors and "ValueError: scripted crash" in errors


async def test_engine_with_an_unreadable_message_is_replaced(monkeypatch):
    async with running(backoff=0.01) as client:
        stream = client.generate(request("before", max_tokens=10_000))
        await anext(stream)
        with monkeypatch.context() as broken:
            broken.setattr(client, "_receive", lambda message: 1 / 0)
            with pytest.raises(EngineDeadError):
                while True:
                    await asyncio.wait_for(anext(stream), 30)
        assert await client.wait_state("ready") == "ready" and client.restarts == 1
        assert len(await tokens(client, request("after", max_tokens=3))) == 3


@pytest.mark.parametrize("max_tokens", [40, 10_000])
async def test_pending_outputs_of_a_slow_reader_are_limited(monkeypatch, max_tokens):
    monkeypatch.setattr(request_router, "MAX_BUFFERED_OUTPUT", 150)
    async with running() as client:
        stream = client.generate(request("slow", max_tokens=max_tokens))
        await anext(stream)
        # As many as may be pending, although they are read late.
        quick = [asyncio.create_task(tokens(client, request(name, max_tokens=25))) for name in "ab"]
        assert [len(each) for each in await asyncio.gather(*quick)] == [25, 25]
        await eventually_async(lambda: "slow" not in client._router._streams)
        with pytest.raises(SlowConsumerError, match="more quickly"):
            await anext(stream)
        await eventually_async(lambda: client._router.in_flight == 0)
        assert len(await tokens(client, request("slow", max_tokens=3))) == 3, "its id is free again"
        assert client.restarts == 0


async def test_adapter_loaded_for_a_cancelled_caller_is_unloaded():
    sent = []
    calls = AdapterCalls(sent.append, lambda: None, engine_config("scripted"))
    source = AdapterSource(3, "x", "/x")
    for result in (AdapterInfo(3, "x", "/x", 8, (), 1, "d"), RequestError("no", "lora_path")):
        loading = asyncio.create_task(calls.load(source))
        await asyncio.sleep(0)
        loading.cancel()
        assert calls.deliver(AdapterLoaded(3, result))  # before the caller resumes
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not calls.loaded and sent[-2:] == [LoadAdapter(source), DropAdapter(3)]


async def test_concurrent_loads_of_an_adapter_are_shared():
    sent, source, info = [], AdapterSource(3, "x", "/x"), AdapterInfo(3, "x", "/x", 8, (), 1, "d")
    calls = AdapterCalls(sent.append, lambda: None, engine_config("scripted"))
    first, second, third = (asyncio.create_task(calls.load(source)) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    assert calls.deliver(AdapterLoaded(3, info)) and await first is await third is info
    assert sent == [LoadAdapter(source)] and calls.loaded == {3}


async def test_unloading_during_a_load_fails_its_waiters():
    sent, source = [], AdapterSource(3, "x", "/x")
    calls = AdapterCalls(sent.append, lambda: None, engine_config("scripted"))
    loading = asyncio.create_task(calls.load(source))
    await asyncio.sleep(0)
    calls.drop(3)
    with pytest.raises(RequestError, match="unloaded"):
        await asyncio.wait_for(loading, 5)
    assert calls.deliver(AdapterLoaded(3, AdapterInfo(3, "x", "/x", 8, (), 1, "d"))) and not calls.loaded
    assert sent == [LoadAdapter(source), DropAdapter(3), DropAdapter(3)]


async def test_missing_adapter_files_do_not_fail_the_restart(tmp_path):
    paths = {number: tmp_path / str(number) for number in (1, 2, 3)}
    for path in paths.values():
        path.mkdir()
    sources = (AdapterSource(1, "one", str(paths[1])),)
    config = engine_config("scripted")
    config = replace(config, adapters=replace(config.adapters, sources=sources))
    async with running(config, backoff=0.01) as client:
        for number in (2, 3):
            await client.load_adapter(AdapterSource(number, str(number), str(paths[number])))
        for lost, left in ((1, {2, 3}), (2, {3})):
            before = client.restarts
            (paths[lost] / "gone").touch()
            assert client.adapter_ids == {*left, lost}
            os.kill(client.pid, signal.SIGKILL)
            await eventually_async(lambda before=before: client.restarts > before and client.state == "ready")
            assert client.adapter_ids == left
        (paths[1] / "gone").unlink()
        await client.load_adapter(sources[0])
        assert client.adapter_ids == {1, 3}


async def test_failing_crash_report_does_not_prevent_the_restart(monkeypatch, tmp_path, caplog):
    def no_thread(*_):
        raise RuntimeError("can't start new thread")

    async with running(backoff=0.01, crash_folder=tmp_path) as client:
        with monkeypatch.context() as full:
            full.setattr(supervision.asyncio, "to_thread", no_thread)
            os.kill(client.pid, signal.SIGKILL)
            await eventually_async(lambda: client.restarts == 1)
            assert await client.wait_state("ready") == "ready"
    assert "no crash report could be written" in caplog.text and "can't start new thread" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_hung_step_is_killed(caplog):
    async with running() as client:  # with a limit of two minutes per step
        for _ in range(3):  # on a busy machine at least one should be detected in time
            start = time.monotonic()
            with pytest.raises(EngineDeadError):
                await tokens(client, request("hung", HANG, 10))
            seconds = time.monotonic() - start
            await client.wait_ready()
            assert "the engine was idle for 2.5 seconds" in caplog.text
            assert await tokens(client, request("ok", max_tokens=1)) == [100]
            if 0.3 < seconds < 3.0:
                break
        else:
            raise AssertionError(f"{seconds:g} s, the last time")


@pytest.mark.slow
async def test_silent_first_step_is_killed(monkeypatch, caplog):
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "100")
    async with running(hang_seconds=0.4) as client:
        with pytest.raises(EngineDeadError):
            await tokens(client, request("hung"))
        await client.wait_ready()
        assert "no step of the engine finished for 0.4 seconds" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_endless_step_is_killed_by_its_expected_duration(monkeypatch):
    monkeypatch.setattr(supervision, "BUSY_SECONDS", 0.5)
    monkeypatch.setattr(supervision, "SLOW_STEP_FACTOR", 1.0)
    async with running() as client:  # with a limit of two minutes per step
        start = time.monotonic()
        with pytest.raises(EngineDeadError):
            await tokens(client, request("spins", SPIN, 10))
        assert time.monotonic() - start < 20.0  # instead of two minutes
        await client.wait_ready()
        assert await tokens(client, request("ok", max_tokens=1)) == [100]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_stopped_engine_is_detected(spares):
    async with running() as client:  # with a limit of two minutes per step
        stream = client.generate(request("a", max_tokens=100_000))
        await anext(stream)
        os.kill(client.pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(EngineDeadError):
            while True:
                await anext(stream)
        assert time.monotonic() - start < 20.0  # instead of two minutes
        await client.wait_ready()
        assert await tokens(client, request("b", max_tokens=1)) == [100]
        assert client.pid == spares[-1].process.pid  # started before the old one was abandoned


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_false_suspicion_leaves_no_process(monkeypatch, spares):
    monkeypatch.setattr(supervision, "INACTIVE_SECONDS", 60.0)
    monkeypatch.setattr(supervision, "STOPPED_SECONDS", 60.0)
    async with running() as client:
        pid = client.pid
        stream = client.generate(request("a", max_tokens=100_000))
        await anext(stream)
        os.kill(pid, signal.SIGSTOP)
        await eventually_async(lambda: len(spares) == 2, 20.0)
        os.kill(pid, signal.SIGCONT)
        await eventually_async(lambda: spares[1].ended, 20.0)
        await anext(stream)
        await stream.aclose()
        assert client.pid == pid and client.restarts == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_suspicion_ends_with_the_last_request(monkeypatch, spares):
    monkeypatch.setattr(supervision, "INACTIVE_SECONDS", 60.0)
    monkeypatch.setattr(supervision, "STOPPED_SECONDS", 60.0)
    async with running() as client:
        stream = client.generate(request("a", max_tokens=100_000))
        await anext(stream)
        os.kill(client.pid, signal.SIGSTOP)
        await eventually_async(lambda: len(spares) == 2, 20.0)
        os.kill(client.pid, signal.SIGCONT)
        await stream.aclose()
        await eventually_async(lambda: spares[1].ended, 20.0)
        assert client.restarts == 0


@pytest.mark.slow
async def test_restart_waits_until_the_old_engine_has_ended(spares):
    """The socket of the old process is closed long before its end."""
    async with running() as client:
        stream = client.generate(request("bad", max_tokens=100_000))
        await anext(stream)
        os.kill(client.pid, signal.SIGSTOP)
        client._writer.transport.abort()
        with pytest.raises(EngineDeadError):
            while True:
                await anext(stream)
        assert [lost.request_id for lost in client._failed_requests] == ["bad"]
        await client.wait_ready()
        assert client.pid == spares[-1].process.pid and len(spares) == 2
        assert client._failed_requests == []


async def test_restarts_are_limited():
    async with running(max_deaths=3, backoff=0.01) as client:
        for _ in range(3):
            await client.wait_ready()
            with pytest.raises(EngineDeadError):
                await tokens(client, request("bad", KILL, 10))
        with pytest.raises(LoadError, match=r"died 3 times.*SIGKILL"):
            await client.wait_ready()
        assert client.state == "failed" and client.restarts == 2
        with pytest.raises(EngineDeadError, match="given up"):
            await tokens(client, request("late"))


async def test_restart_that_cannot_load_is_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRIPT_RELOAD_FILE", str(tmp_path / "marker"))
    async with running(backoff=0.01) as client:
        os.kill(client.pid, signal.SIGKILL)
        assert await client.wait_state("failed") == "failed"
        with pytest.raises(LoadError, match="the second load fails"):
            await client.wait_ready()


async def test_load_errors(monkeypatch):
    monkeypatch.setenv("SCRIPT_LOAD_ERROR", "config.json names\nno architecture")
    client = make_client()
    with pytest.raises(LoadError, match=r"^config\.json names no architecture$"):
        await client.start()
    assert client.state == "failed"
    await client.close()
    await client.close()

    client = ProcessClient(engine_config("scripted"), core="helpers.no_such_module:Core")
    with pytest.raises(LoadError, match=r"cannot load scripted: ModuleNotFoundError: .*no_such_module"):
        await client.start()
    await client.close()


async def test_last_message_is_read_after_the_end_of_the_process(monkeypatch):
    async def blocked(seen: supervision.Watchdog) -> None:
        seen._child.process.wait()  # as a parent without CPU time does

    monkeypatch.setattr(supervision.Watchdog, "watch", blocked)
    monkeypatch.setenv("SCRIPT_LOAD_ERROR", "the disk is gone")
    client = make_client()
    with pytest.raises(LoadError, match="the disk is gone"):
        await client.start()
    await client.close()


async def test_standby_process_is_used_by_the_client():
    """A module that cannot be preloaded is reported only when needed."""
    with contextlib.closing(ChildProcess(CORE, "warning", preload="helpers.no_such_module")) as child:
        async with running(child=child) as client:
            assert client.pid == child.process.pid and await tokens(client, request("first"))
            os.kill(child.process.pid, signal.SIGKILL)
            await eventually_async(lambda: client.restarts == 1 and client.state == "ready")
            assert client.pid != child.process.pid and await tokens(client, request("second"))
    assert child.ended and child.socket.fileno() == -1


def test_unused_standby_process_ends():
    with contextlib.closing(ChildProcess(CORE, "warning", preload="helpers.scripted_core")) as child:
        assert not child.ended
    assert child.ended and child.socket.fileno() == -1


@pytest.mark.parametrize("closed", [False, True])
def test_process_without_standard_error(monkeypatch, closed):
    """File descriptor 2 may be any file by then, or closed."""

    def no_such_file(number):
        raise OSError

    if closed:
        monkeypatch.setattr(process_setup, "os", types.SimpleNamespace(**{**vars(os), "fstat": no_such_file}))
    else:
        monkeypatch.setattr(sys, "stderr", None)
    with contextlib.closing(ChildProcess(CORE, "warning")) as child:
        outputs = [str(Path(f"/proc/{child.process.pid}/fd/{number}").readlink()) for number in (1, 2)]
    assert outputs == [os.devnull] * 2


async def test_killed_while_loading(monkeypatch):
    monkeypatch.setenv("SCRIPT_LOAD_SECONDS", "100")
    client = make_client()
    client.start_nowait()
    with pytest.raises(EngineDeadError, match="loading"):
        await tokens(client, request("early"))
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(LoadError, match=r"while loading: killed by SIGKILL"):
        await client.wait_ready()
    await client.close()


def test_closed_while_loading(monkeypatch):
    monkeypatch.setenv("SCRIPT_LOAD_SECONDS", "100")

    async def once() -> float:
        client = make_client()
        client.start_nowait()
        waiting = asyncio.create_task(client.wait_ready())
        await asyncio.sleep(0.1)
        start = time.monotonic()
        await client.close()
        seconds = time.monotonic() - start
        with pytest.raises(LoadError, match="closed"):
            await waiting
        assert client._child.ended
        return seconds

    in_time(lambda: asyncio.run(once()), 2.0)


async def test_terminal_signals_do_not_end_the_engine():
    async with running() as client:
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        assert os.getsid(client.pid) == client.pid
        assert len(await tokens(client, request("a", max_tokens=20))) == 20
        assert client.restarts == 0


@pytest.mark.slow
async def test_samples_of_statistics_are_returned_once(monkeypatch):
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "0.01")
    async with running() as client:
        total, finished = 0, False

        async def poll():
            nonlocal total
            while not finished:
                results = await asyncio.gather(client.stats(), client.stats())
                total += sum(len(stats.queue_seconds) for stats in results)
                await asyncio.sleep(0.07)

        poller = asyncio.create_task(poll())
        # Longer than the push interval, so that samples arrive with steps and on request.
        for wave in range(5):
            await asyncio.gather(*[tokens(client, request(f"{wave}-{i}", max_tokens=12)) for i in range(8)])
        finished = True
        await poller
        total += len((await client.stats()).queue_seconds)
        assert total == 40


@pytest.mark.slow
async def test_stats_do_not_wait_for_a_step(monkeypatch):
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "0.5")
    monkeypatch.setattr(request_router, "STATS_TIMEOUT", 0.05)
    async with running() as client:
        stream, step = client.generate(request("a", max_tokens=1000)), 0
        for _ in range(5):  # on a busy machine at least one should be fast
            step += len((await anext(stream)).token_ids)
            while client._router._streams["a"].buffered_size:  # steps that ended in the meantime
                step += len((await anext(stream)).token_ids)
            start = time.monotonic()
            for _ in range(3):
                stats = await client.stats()
            if time.monotonic() - start < 0.4 and (stats.num_steps, stats.num_running) == (step, 1):
                break
        else:
            raise AssertionError("each time they came only with the step's end")
        await stream.aclose()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_slow_consumer_does_not_block_the_engine(monkeypatch):
    """The engine finishes although the parent does not read megabytes of outputs."""
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "0")
    async with running() as client:
        stream = client.generate(request("a", max_tokens=5000, n=4))
        await anext(stream)
        pulse = ProcessActivity(client.pid)

        def rests() -> bool:
            looks = []
            for _ in range(5):
                time.sleep(0.1)
                pulse.refresh()
                looks.append(pulse.inactive)
            return all(looks)

        eventually(rests, 60)  # finished, or waiting for this process
        stats = await client.stats()
        assert stats.num_running == 0 and stats.generation_tokens == 20_000
        assert len([output async for output in stream]) == 19_999


def test_ten_thousand_outputs_pass_quickly(monkeypatch):
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "0")

    async def once() -> float:
        async with running() as client:
            start = time.monotonic()
            results = await asyncio.gather(*[tokens(client, request(f"r{i}", max_tokens=200)) for i in range(50)])
            seconds = time.monotonic() - start
            assert all(result == list(range(100, 300)) for result in results)
            print(f"{10_000 / seconds:.0f} outputs/s")
            return seconds

    in_time(lambda: asyncio.run(once()), 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("load_seconds", ["0", "100"])
def test_engine_ends_with_its_parent(load_seconds):
    script = """
import asyncio, sys
from windlass.engine.client.process_client import ProcessClient
from windlass.engine.interface.config import EngineConfig
async def main():
    client = ProcessClient(EngineConfig(model="scripted"), core="helpers.scripted_core:ScriptedCore")
    client.start_nowait()
    print(client.pid, flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""
    environment = {**os.environ, "SCRIPT_LOAD_SECONDS": load_seconds}

    def once() -> float:
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
            child = int(parent.stdout.readline())
            time.sleep(0.6)
            parent.kill()
            parent.wait()
        start = time.monotonic()
        eventually(lambda: not alive(child), 60)
        return time.monotonic() - start

    in_time(once, 6.0)


def test_client_does_not_import_torch():
    modules = "windlass.engine.client.process_client, windlass.engine.core.engine_process"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
async def test_one_sample_of_a_request_is_ended():
    async with running() as client:
        before = 0
        for _ in range(3):  # on a busy machine at least one should end in time
            seen = {0: 0, 1: 0, 2: 0}
            stream = client.generate(request("a", max_tokens=200, n=3))
            async for output in stream:
                seen[output.index] += len(output.token_ids)
                if seen == {0: 3, 1: 3, 2: 3}:
                    client.end_sample("a", 0)
                    client.end_sample("a", 2)
                    client.end_sample("a", 2)
                    client.end_sample("a", 9)
                    client.end_sample("nobody", 0)
            after = (await client.stats()).generation_tokens
            assert seen[1] == 200
            if seen[0] < 100 and seen[2] < 100 and after - before < 400:
                break
            before = after
        else:
            raise AssertionError("each time they went on")

        again = client.generate(request("a", max_tokens=10_000, n=2))
        await anext(again)
        client.end_sample("a", 0)
        client.end_sample("a", 1)
        rest = [output async for output in again]
        assert len(rest) < 1000  # the stream ends with its last sample
        # Late outputs do not reach another request with that id.
        assert await tokens(client, request("a", max_tokens=4)) == [100, 101, 102, 103]
        assert (await client.stats()).num_running == 0


@pytest.mark.slow
async def test_crash_after_an_ended_sample():
    async with running() as client:
        stream = client.generate(request("a", max_tokens=100_000, n=2))
        await anext(stream)
        client.end_sample("a", 0)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            while True:
                await anext(stream)
        assert client._router.in_flight == 0
        client._hang_seconds = 0.5  # of the next engine
        await client.wait_ready()
        await asyncio.sleep(1.0)  # a silent idle engine is not hung
        assert client.restarts == 1 and client.state == "ready"
        client._watchdog.hang_seconds = 60.0  # steps may be late
        assert await tokens(client, request("a", max_tokens=3)) == [100, 101, 102]


async def test_introspection_is_refused_and_fails_with_the_engine(monkeypatch):
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "0.3")
    async with running() as client:
        with pytest.raises(RequestError, match="nothing to see"):
            await client.inspect(CacheQuery())
        stream = client.generate(request("a", max_tokens=50))
        await anext(stream)
        os.kill(client.pid, signal.SIGSTOP)  # otherwise it responds at the end of the step
        asked = asyncio.ensure_future(client.inspect(CacheQuery()))
        await eventually_async(lambda: client._inspections.waiting)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="before it answered"):
            await asked
        with pytest.raises(EngineDeadError):
            while True:
                await anext(stream)
