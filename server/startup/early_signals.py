"""Signals before the event loop handles them. Imports little, since it is needed before everything else."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit immediately with code 0 on SIGTERM, until another handler replaces this one.

    It waits for nothing, such as downloading threads: child processes end when their socket closes.
    """

    def leave(signum: int, frame: object) -> None:
        os._exit(0)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def exit_on_signals(*numbers: signal.Signals, code: int = 0) -> Iterator[None]:
    """Raise SystemExit on these signals, until other handlers replace this one. No effect outside the main thread."""

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(code)

    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def record_signal(number: signal.Signals | None) -> Iterator[Callable[[], bool]]:
    """Record whether this signal arrives, until another handler replaces this one. None: no signal."""
    received: list[int] = []
    if number is None:
        yield lambda: False
        return
    previous = signal.signal(number, lambda signum, frame: received.append(signum))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(number, previous)
