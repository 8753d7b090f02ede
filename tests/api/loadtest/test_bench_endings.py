"""Outcomes of load tests are written despite failing outputs, signals and file limits."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from helpers.scripted_http import Generation, full_stream, scripted_llm

from windlass.clients.loadtest import commands
from windlass.clients.loadtest.display import ProgressDisplay
from windlass.clients.loadtest.load_plan import LoadPlan, WorkloadSpec
from windlass.clients.loadtest.runner import RunProgress, measure
from windlass.clients.loadtest.target import Target
from windlass.clients.loadtest.timed_requests import Pool

pytestmark = pytest.mark.usefixtures("clean_environment")


def plan(url: str, **options) -> LoadPlan:
    return LoadPlan(target=Target(url=url), workload=WorkloadSpec(), vocab_size=900, **options)


@contextmanager
def broken(name: str, how: str, monkeypatch) -> Iterator[None]:
    """Replace a standard stream by one that refuses writes: a full disk, or a pipe without a reader."""
    if how == "full":
        end = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, end = os.pipe()
        os.close(reading)
    with os.fdopen(end, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, name, stream)
        yield
        os.dup2(os.open(os.devnull, os.O_WRONLY), end)  # discards the buffered output


@pytest.mark.parametrize("lost", ["stdout", "stderr"])
@pytest.mark.parametrize("how", ["full", "closed pipe"])
def test_files_are_written_when_a_standard_stream_is_lost(lost, how, tmp_path, monkeypatch, capfd):
    command = ["--num-prompts", "2", "--json", str(tmp_path / "run.json"), "--csv", str(tmp_path / "run.csv")]
    with scripted_llm(full_stream) as llm, broken(lost, how, monkeypatch):
        try:
            code = commands.run(["serve", "--url", llm.url, *command])
        except SystemExit as end:  # raised by rich for a closed pipe
            code = end.code
    assert json.loads((tmp_path / "run.json").read_text())["completed"] == 2
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 3
    said = capfd.readouterr()
    if lost == "stderr":
        assert code == 0 and "2 completed" in said.out
    else:
        assert code == (2 if how == "full" else 1)
        assert ("error: cannot write: No space left" in said.err) == (how == "full")


def test_failing_progress_callback_does_not_end_the_run():
    def fails(snapshot: RunProgress) -> None:
        raise BrokenPipeError(errno.EPIPE, "no reader")

    with scripted_llm(full_stream) as llm:
        assert len(measure(plan(llm.url, count=3), fails).completed) == 3


def test_progress_bar_survives_a_lost_terminal(monkeypatch):
    with broken("stderr", "full", monkeypatch):
        display = ProgressDisplay(terminal=True)
        display(RunProgress(phase="running", total=2))
        display(RunProgress(phase="running", total=2))
        display.stop()


def test_every_file_is_attempted_and_failures_are_named(tmp_path, capsys):
    """The error of a full disk is raised by `write` and does not name the file."""
    with scripted_llm(full_stream) as llm:
        command = ["serve", "--url", llm.url, "--num-prompts", "2", "--json", "/dev/full"]
        assert commands.run([*command, "--csv", str(tmp_path / "run.csv")]) == 2
        assert len((tmp_path / "run.csv").read_text().splitlines()) == 3
        captured = capsys.readouterr()
        assert "error: cannot write --json /dev/full: No space left on device\n" in captured.err
        assert "2 completed" in captured.out  # the table is printed nevertheless


def test_signal_ends_the_run_without_loop_support(monkeypatch, tmp_path):
    def none(*arguments: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", none)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "remove_signal_handler", none)
    before = signal.getsignal(signal.SIGTERM)

    async def second_hangs(generation: Generation) -> None:
        if len(llm.generations) == 1:
            await full_stream(generation)
            return
        threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        await generation.wait_disconnect()

    with scripted_llm(second_hangs) as llm:
        command = ["serve", "--url", llm.url, "--num-prompts", "2", "--json", str(tmp_path / "run.json")]
        assert commands.run(command) == 128 + signal.SIGTERM
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["interrupted"] is True and data["completed"] == 1
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("limits", "most", "set_to"),
    [
        ((256, 2**63 - 1), 10_240, 10_240),  # macOS
        ((256, 2**63 - 1), 5_000, 4_096),
        ((256, -1), None, -1),
        ((1024, 4096), None, 4096),
        ((1024, 1024), None, None),
        ((20_000, -1), 20_000, None),
    ],
)
def test_file_limit_is_raised_as_far_as_the_system_allows(limits, most, set_to, monkeypatch):
    taken = []
    endless = limits[1] if limits[1] > 4096 else -1

    def set_limit(what: int, wanted: tuple[int, int]) -> None:
        if most is not None and (wanted[0] == endless or wanted[0] > most):
            raise ValueError("current limit exceeds maximum limit")
        assert wanted[1] == limits[1]
        taken.append(wanted[0])

    monkeypatch.setattr(resource, "RLIM_INFINITY", endless)
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    commands._raise_file_limit()
    assert taken == ([] if set_to is None else [set_to])


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_missing_files_limit_the_generator_and_are_not_server_failures(number, monkeypatch):
    connect, tries = Pool._connect, []

    async def scarce(pool: Pool):
        tries.append(pool)
        if len(tries) > 3:  # the first resolves the address
            raise OSError(number, os.strerror(number))
        return await connect(pool)

    monkeypatch.setattr(Pool, "_connect", scarce)
    with scripted_llm(full_stream) as llm:
        result = measure(plan(llm.url, count=4, concurrency=4))
    assert result.errors == {} and result.abandoned == {"unsent": 4 - len(result.completed)}
    assert 0 < len(result.completed) < 4 and result.generator["limited"] is True
    assert "ulimit -Hn" in result.generator["reasons"][0]
