"""What ends a command's work before its time, so that it can still report. Knows no work."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def stopped_by_signals(stop: asyncio.Event, received: list[signal.Signals]) -> Iterator[None]:
    """The first ctrl-C or SIGTERM sets `stop` and is put into `received`; a second one ends the program."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def receive(number: signal.Signals) -> None:
        received.append(number)
        stop.set()
        restore()

    def receive_in_loop(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(receive, signal.Signals(number))

    for number in before:
        try:
            loop.add_signal_handler(number, receive, number)
        except NotImplementedError:  # on Windows
            signal.signal(number, receive_in_loop)
    try:
        yield
    finally:
        restore()
