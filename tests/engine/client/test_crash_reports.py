"""Crash reports of engines that end by SIGKILL, by an error in a step, or because they are stuck."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from helpers.eventually import eventually
from helpers.failing_core import FATAL, STUCK
from helpers.real_server import RealServer, serve

from windlass import __version__
from windlass.engine.client.child_process import wait_for_stacks
from windlass.engine.client.supervision import MAX_REPORTS, _write
from windlass.engine.core.flight_recorder import (
    MAX_RECORDED_SEQUENCES,
    NUM_NAMES,
    NUM_PLANS,
    FlightRecorder,
    StackMemory,
)
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.startup.engines import CORE_VARIABLE

pytestmark = pytest.mark.timeout(240)
TESTS = Path(__file__).parents[2]
CANARY, KEY = "xylophone-canary", "key-4711-canary"


@contextlib.contextmanager
def failing_server(folder: Path | str, monkeypatch: pytest.MonkeyPatch, *more: str) -> Iterator[RealServer]:
    monkeypatch.setenv(CORE_VARIABLE, "helpers.failing_core:core")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("WINDLASS_CRASH_DIR", str(folder))
    with serve("--kv-cache-memory", "64MiB", "--api-key", KEY, *more) as server:
        yield server


def ask(server: RealServer, prompt: Any, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, **fields}
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "asked"}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, RealServer]]:
    folder = tmp_path_factory.mktemp("crashes")
    with pytest.MonkeyPatch.context() as patch, failing_server(folder, patch) as server:
        yield folder, server


@pytest.fixture
def failing(shared: tuple[Path, RealServer]) -> tuple[Path, RealServer]:
    """A healthy server, and the empty folder of its reports."""
    folder, server = shared
    server.wait_ready()
    for path in folder.iterdir():
        path.unlink()
    return shared


def report_in(folder: Path, server: RealServer) -> dict[str, Any]:
    """The only report, which the log names."""
    eventually(lambda: list(folder.glob("crash-*.json")), 20)
    (path,) = folder.iterdir()
    eventually(lambda: f"crash report: {path}" in server.log.read_text(), 20)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert KEY not in text and CANARY not in text
    found = json.loads(text)
    assert found["versions"]["windlass"] == __version__ and found["versions"]["torch"]
    assert found["memory"]["engine"] > 2**20 and found["memory"]["total"] > found["memory"]["available"] > 0
    assert (
        found["configuration"]["cache"]["memory"] == 64 * 2**20 and found["model"]["architecture"] == "LlamaForCausalLM"
    )
    return found


@pytest.mark.slow
def test_report_of_a_killed_engine_has_its_last_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "crashes"
    with failing_server(folder, monkeypatch) as server:
        lines = {"alone": 0, "scaled": 0}

        def stream(name: str, scaling: Any, tokens: int) -> None:
            body = {"prompt": [5] * tokens, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
            body |= {"context_overflow": "shift"}
            body |= {"rope_scaling": scaling} if scaling else {}
            headers = {"authorization": f"Bearer {KEY}", "x-request-id": name}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
                for _ in answer.iter_lines():
                    lines[name] += 1

        ask(server, f"{CANARY} {CANARY}")
        threads = [
            threading.Thread(target=stream, args=("alone", None, 30)),
            threading.Thread(target=stream, args=("scaled", {"rope_type": "yarn", "factor": 2.0}, 40)),
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: min(lines.values()) > 60, 60)
        os.kill(server.engine_pid(), signal.SIGKILL)
        for thread in threads:
            thread.join(30)
        found = report_in(folder, server)
        server.wait_ready()
        assert ask(server, "again").status_code == 200
        (path,) = folder.iterdir()
        assert httpx.get(f"{server.url}/health").json()["crash_report"] == path.name
    assert found["signal"] == "SIGKILL" and found["exit_code"] is None and "killed by SIGKILL" in found["end"]
    requests = {request["request_id"].rpartition("-")[0]: request for request in found["requests"]}
    assert set(requests) == {"alone", "scaled"}
    assert requests["scaled"]["prompt_tokens"] == 40 and requests["scaled"]["scaling"]["rope_type"] == "yarn"
    assert requests["alone"]["scaling"] is None and requests["alone"]["max_tokens"] == 20_000
    plans = found["plans"]
    assert 10 < len(plans) <= NUM_PLANS
    # Plans that only name ended sequences are not recorded.
    steps = [plan["step"] for plan in plans if any("alone" in str(each) for each in plan["sequences"])]
    assert len(steps) > 10 and steps == list(range(steps[0], steps[0] + len(steps)))
    last = {each["request_id"].rpartition("-")[0]: each for each in plans[-1]["sequences"]}
    assert last["scaled"]["scaling"] == "yarn" and last["alone"]["scaling"] == "default"
    passes = plans[-2]["num_tokens"] // 2
    for name, prompt in (("alone", 30), ("scaled", 40)):
        before = {each["request_id"].rpartition("-")[0]: each for each in plans[-2]["sequences"]}
        assert last[name]["tokens"] == 1 and last[name]["prompt_tokens"] == prompt
        assert last[name]["start"] == before[name]["start"] + passes > prompt
    assert plans[-1]["num_tokens"] % 2 == 0 and plans[-1]["num_sequences"] == 2


def test_report_of_a_failed_step_has_its_stack_and_plan(failing: tuple[Path, RealServer]) -> None:
    folder, server = failing
    assert ask(server, [9] * FATAL, n=2).status_code == 503
    found = report_in(folder, server)
    assert found["exit_code"] == 1 and found["signal"] is None and "ArithmeticError" in found["reason"]
    assert found["stack"][0].startswith("Traceback") and found["stack"][-1] == "ArithmeticError: a kernel has failed"
    assert any("engine_core.py" in line and "in step" in line for line in found["stack"])
    (sequence,) = found["plans"][-1]["sequences"]
    assert sequence["prompt_tokens"] == FATAL and sequence["start"] == 0 < sequence["tokens"] <= FATAL
    assert sequence["request_id"].startswith("asked-")


@pytest.mark.slow
def test_report_of_a_stuck_engine_has_its_stack(failing: tuple[Path, RealServer]) -> None:
    folder, server = failing
    assert ask(server, [9] * STUCK).status_code == 503
    found = report_in(folder, server)
    assert "the engine was idle for" in found["reason"] and found["signal"] == "SIGKILL"
    assert any("failing_core.py" in line and "failing" in line for line in found["stack"])


@pytest.mark.slow
def test_no_reports_if_disabled_or_unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for folder, said in (("none", "its stack: Traceback"), (str(blocked), "no crash report could be written to")):
        with failing_server(folder, monkeypatch) as server:
            assert ask(server, [9] * FATAL).status_code == 503
            eventually(lambda server=server, said=said: said in server.log.read_text(), 20)
            server.wait_ready()


def test_number_of_reports_is_limited(tmp_path: Path) -> None:
    for pid in range(MAX_REPORTS + 5):
        (tmp_path / f"crash-20200101T0000{pid:02}Z-1.json").write_text("{}")
    (tmp_path / "other.json").write_text("{}")
    path = _write(tmp_path, {"pid": 7})
    names = sorted(found.name for found in tmp_path.iterdir())
    assert len(names) == MAX_REPORTS + 1 and path.name in names and "other.json" in names
    assert "crash-20200101T000005Z-1.json" not in names and "crash-20200101T000024Z-1.json" in names


def test_new_report_is_retained_after_the_clock_was_set_back(tmp_path: Path) -> None:
    for number in range(MAX_REPORTS):
        (tmp_path / f"crash-29990101T0000{number:02}Z-1.json").write_text("{}")
    path = _write(tmp_path, {"pid": 7})
    assert path.exists() and len(list(tmp_path.iterdir())) == MAX_REPORTS


def test_reports_are_private_and_complete_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / ".crash-1-1.json.partial", tmp_path / ".crash-2-1.json.partial"
    for left in (old, new):
        left.write_text("{")
    os.utime(old, (0, 0))
    modes = []

    def full(self: Path, target: Path) -> None:
        modes.append(stat.S_IMODE(self.stat().st_mode))
        raise OSError(28, "No space left on device")

    before = os.umask(0)
    try:
        monkeypatch.setattr(Path, "replace", full)
        monkeypatch.setattr(Path, "chmod", lambda *_: None)
        with pytest.raises(OSError, match="No space left"):
            _write(tmp_path, {"pid": 7})
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert list(tmp_path.iterdir()) == [new]  # possibly still written by another server


def test_flight_recorder_retains_the_last_plans() -> None:
    number = FlightRecorder.make()
    recorder, other = FlightRecorder(number), FlightRecorder(number)
    os.close(number)
    live = [
        SimpleNamespace(
            seq_id=index, index=index % 3, num_prompt_tokens=index,
            request=SimpleNamespace(request_id=f"r{index}" + "é" * 300, rope_scaling=RopeScaling() if index % 2 else None),
        )
        for index in range(NUM_NAMES + 10)
    ]  # fmt: skip
    for step in range(NUM_PLANS + 7):
        items = [SimpleNamespace(seq_id=index, start=step, num_tokens=2) for index in range(step, step + 200)]
        plan = SimpleNamespace(step=step, new=items if step % 5 == 0 else (), forks=(), sequences=items, num_tokens=400)
        recorder.write(plan, lambda: live)
    found = other.read()
    assert [plan["step"] for plan in found] == list(range(7, NUM_PLANS + 7))
    assert all(plan["num_sequences"] == 200 and len(plan["sequences"]) == MAX_RECORDED_SEQUENCES for plan in found)
    first = found[-1]["sequences"][0]
    assert first["start"] == NUM_PLANS + 6 and first["tokens"] == 2 and re.fullmatch(r"r38[?]{93}", first["request_id"])
    assert first["prompt_tokens"] == 38 and first["scaling"] == "default"


def test_partly_written_plan_is_omitted() -> None:
    number = FlightRecorder.make()
    recorder = FlightRecorder(number)
    os.close(number)
    for step in range(3):
        recorder.write(SimpleNamespace(step=step, new=(), forks=(), sequences=(), num_tokens=0), list)

    def dies() -> Iterator[Any]:
        yield SimpleNamespace(seq_id=1, start=0, num_tokens=1)
        raise KeyboardInterrupt

    class Dying(tuple):
        def __getitem__(self, where: Any) -> Any:
            return dies()

    with pytest.raises(KeyboardInterrupt):
        recorder.write(SimpleNamespace(step=3, new=(), forks=(), sequences=Dying(), num_tokens=1), list)
    assert [plan["step"] for plan in recorder.read()] == [0, 1, 2]


def test_stacks_are_awaited_until_they_are_complete() -> None:
    pieces = ["", "Thread 1\n", "Thread 1\nThread 2\n", "Thread 1\nThread 2\n", "never read"]
    asked: list[str] = []
    stacks = SimpleNamespace(read=lambda: pieces.pop(0))
    child: Any = SimpleNamespace(stacks=stacks, ask_for_stacks=lambda: asked.append("stacks"))
    asyncio.run(wait_for_stacks(child, 60.0))
    assert asked == ["stacks"] and pieces == ["never read"]


def test_waiting_for_missing_stacks_is_limited() -> None:
    child: Any = SimpleNamespace(stacks=SimpleNamespace(read=lambda: ""), ask_for_stacks=lambda: None)
    asyncio.run(wait_for_stacks(child, 0.1))


def test_fatal_signal_records_the_stacks_of_all_threads() -> None:
    number = StackMemory.make()
    memory = StackMemory(number)
    code = f"import faulthandler, os, signal; faulthandler.enable(file={number}); os.kill(os.getpid(), signal.SIGSEGV)"
    done = subprocess.run([sys.executable, "-c", code], pass_fds=[number], capture_output=True, check=False)
    os.close(number)
    assert done.returncode == -signal.SIGSEGV and memory.read().startswith("Fatal Python error: Segmentation fault")
