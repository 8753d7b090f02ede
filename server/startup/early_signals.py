"""Signals that come before the event loop is there to take them. Imports little: it is needed before all else."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """End at once on SIGTERM, with exit code 0, until another handler takes its place.

    As process 1 of a container a program that installs no handler is not ended by SIGTERM at all. Nothing is waited for, as
    threads that download would be: what was started ends when its socket closes.
    """

    def leave(signum: int, frame: object) -> None:
        os._exit(0)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def record_signal(number: signal.Signals | None) -> Iterator[Callable[[], bool]]:
    """Whether this signal has come, which is all that it does until another handler takes its place. None: no signal."""
    received: list[int] = []
    if number is None:
        yield lambda: False
        return
    previous = signal.signal(number, lambda signum, frame: received.append(signum))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(number, previous)
