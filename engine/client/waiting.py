"""Waits for a child to end or to speak, without blocking the event loop. Ends nobody by itself."""

from __future__ import annotations

import asyncio
import time

from windlass.engine.client.child import ChildProcess


async def wait_ended(child: ChildProcess, timeout: float) -> bool:
    """Wait for the process to end; False if it still runs after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not child.ended:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def wait_for_stacks(child: ChildProcess, timeout: float) -> None:
    """Have it write the stacks of its threads, which one that is stopped cannot; after `timeout` seconds at most."""
    child.ask_for_stacks()
    deadline = time.monotonic() + timeout
    while not child.stacks.read() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
