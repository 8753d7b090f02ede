"""Commands whose output cannot be written: one line of error, or none if the reader has closed the output."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import typer

from windlass.clients.terminal import print_status, run_app, stderr_is_terminal

app = typer.Typer()


@app.command()
def many(count: int) -> None:
    print("x" * count)


@app.command()
def arrow() -> None:
    print("a → b")


@app.command()
def other() -> None:
    raise FileNotFoundError(2, "something else")


@app.command()
def unreadable() -> None:
    raise OSError(errno.EIO, "a bad block")


@contextmanager
def printing_into(fd: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with open(fd, "w", encoding="utf-8") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        yield  # closing the stream afterwards, as the interpreter does, must not raise


@pytest.mark.parametrize("count", [1, 100_000])  # less and more than the buffer
def test_full_disk_is_reported_in_one_line(
    count: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with printing_into(os.open("/dev/full", os.O_WRONLY), monkeypatch):
        assert run_app(app, "toy", ["many", str(count)]) == 2
    assert capfd.readouterr().err == "error: cannot write: No space left on device\n"


def test_closed_pipe_is_not_reported(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with printing_into(writing, monkeypatch):
        assert run_app(app, "toy", ["many", "1"]) == 1
    assert capfd.readouterr().err == ""


def gone_terminal() -> int:
    """A terminal whose window was closed: writing to it raises EIO."""
    window, terminal = os.openpty()
    os.close(window)
    return terminal


@pytest.mark.parametrize("count", [1, 100_000])
def test_closed_terminal_is_not_reported(
    count: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with printing_into(gone_terminal(), monkeypatch):
        assert run_app(app, "toy", ["many", str(count)]) == 1
    assert capfd.readouterr().err == ""


def test_read_error_is_not_a_closed_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    window, terminal = os.openpty()
    for fd in (terminal, os.open(os.devnull, os.O_WRONLY)):
        with printing_into(fd, monkeypatch), pytest.raises(OSError, match="a bad block"):
            run_app(app, "toy", ["unreadable"])
    os.close(window)


def test_characters_outside_the_encoding_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(taken, encoding="cp1252"))
        assert run_app(app, "toy", ["arrow"]) == 0
        assert taken.getvalue().split() == [b"a", b"?", b"b"]


def test_other_os_errors_are_raised() -> None:
    with pytest.raises(OSError, match="something else"):
        run_app(app, "toy", ["other"])


STREAMS = """
import os, socket, subprocess, sys, typer
from windlass.clients.terminal import print_status, run_app, stderr_is_terminal

app = typer.Typer()

@app.command()
def command() -> None:
    print_status("a line")
    assert not stderr_is_terminal()
    print("hello")
    assert sys.stdin.read() == ""
    assert socket.socket().fileno() > 2
    subprocess.run(["sh", "-c", "echo gone >&2"], check=True)
    raise typer.Exit(7)

assert None in (sys.stdin, sys.stdout, sys.stderr)
sys.exit(run_app(app, "toy", []))
"""


@pytest.mark.parametrize(("closed", "output"), [("2>&-", b"hello\n"), (">&-", b""), ("<&- 2>&-", b"hello\n")])
def test_command_started_with_a_closed_stream(closed: str, output: bytes) -> None:
    shell = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, STREAMS]
    done = subprocess.run(shell, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (7, output)


def test_host_without_standard_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    print_status("a line")
    assert not stderr_is_terminal()
    assert capfd.readouterr() == ("", "")
