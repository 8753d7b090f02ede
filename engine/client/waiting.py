"""Waits for a child to end or to speak, without blocking the event loop. Ends nobody by itself."""

from __future__ import annotations

import asyncio
import time

from windlass.engine.client.child import ChildProcess

PIECE_SECONDS = 0.05  # between two pieces of stacks, at most


async def wait_ended(child: ChildProcess, timeout: float) -> bool:
    """Wait for the process to end; False if it still runs after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not child.ended:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def wait_for_stacks(child: ChildProcess, timeout: float) -> None:
    """Have it write the stacks of its threads, which one that is stopped cannot; after `timeout` seconds at most.

    It writes them in pieces and does not say which is the last one: they are whole once nothing more comes.
    """
    child.ask_for_stacks()
    deadline = time.monotonic() + timeout
    before, found = "", child.stacks.read()
    while not (found and found == before) and time.monotonic() < deadline:
        await asyncio.sleep(PIECE_SECONDS)
        before, found = found, child.stacks.read()
