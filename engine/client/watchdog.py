"""Tells a child that is stuck from one that is slow: by what the system says of it, and by what was expected of its step.

Knows the child as a process and as messages. It ends nobody, and knows no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from windlass.engine.client.child import ChildProcess
from windlass.engine.client.pulse import ProcessActivity
from windlass.engine.core.forecast import ANNOUNCE_SECONDS
from windlass.engine.core.wire import Message, StepDone, StepStarted

TICK = 0.25  # seconds between two looks
# A child that owes an answer, and was stopped by a signal when first looked at and ever since for so long, is stuck.
STOPPED_SECONDS = 0.75
INACTIVE_SECONDS = 2.5  # a child that owes an answer, and neither computes nor waits for a disk for so long, is stuck
SUSPECT_SECONDS = 1.0  # one that has done nothing for so long may have to be replaced
BUSY_SECONDS = 10.0  # a step that computes may take so long, whatever was expected of it
SLOW_STEP_FACTOR = 20.0  # and so many times what was expected of it


class Watchdog:
    """Watches one child.

    hang_seconds: how long it may be silent where nothing better is known. has_pending_work: whether it has anything to do.
    has_inspections: whether it has questions to answer, which nobody expected. suspect: called at every look with
    whether the child may soon have to be replaced.
    """

    def __init__(
        self,
        child: ChildProcess,
        hang_seconds: float,
        *,
        has_pending_work: Callable[[], bool],
        has_inspections: Callable[[], bool],
        suspect: Callable[[bool], None],
    ) -> None:
        self._child = child
        self._hang_seconds = hang_seconds
        self._owes_answer, self._answers_looks, self._suspect = has_pending_work, has_inspections, suspect
        self._activity = ProcessActivity(child.process.pid)
        self._silent_seconds = 0.0
        self._expected: float | None = None  # seconds of the step that runs; None: nobody can tell

    @property
    def memory(self) -> int | None:
        """Bytes the child had when it was looked at last."""
        return self._activity.memory

    @property
    def stopped(self) -> bool:
        """Whether a signal had stopped the child when it was looked at last."""
        return self._activity.stopped

    def on_message(self, message: Message) -> None:
        """The child has said something."""
        self._silent_seconds = 0.0
        if isinstance(message, StepStarted):
            self._expected = message.seconds
        elif isinstance(message, StepDone):
            self._expected = ANNOUNCE_SECONDS

    async def watch(self) -> str | None:
        """Return why the child has to be killed, once it has; None once it has ended by itself.

        Silence is counted in ticks of this loop rather than read off a clock, so a parent that was itself stopped or
        busy does not blame the engine.
        """
        tick = min(TICK, self._hang_seconds / 10)
        inactive = used_before = 0.0
        stopped, stopped_before = 0.0, False
        while True:
            await asyncio.sleep(tick)
            if self._child.ended:
                return None
            self._activity.refresh()
            if not self._owes_answer():
                self._silent_seconds = inactive = stopped = 0.0
                stopped_before = False
                self._suspect(False)
                continue
            used = self._activity.used_seconds or 0.0
            if self._silent_seconds == 0.0:
                used_before = used
            self._silent_seconds += tick
            inactive = inactive + tick if self._activity.inactive and self._silent_seconds > tick else 0.0
            # The first look at one that is stopped does not tell for how long it has been.
            stopped = stopped + tick if stopped_before and self._activity.stopped and self._activity.inactive else 0.0
            stopped_before = self._activity.stopped
            if stopped >= STOPPED_SECONDS:
                return f"the engine was stopped by a signal for {stopped:g} seconds with requests to answer"
            if inactive >= INACTIVE_SECONDS:
                return f"the engine did nothing for {inactive:g} seconds with requests to answer"
            limit = self._silence_limit(used - used_before)
            if self._silent_seconds >= limit:
                return f"no step of the engine finished for {limit:g} seconds"
            self._suspect(self._activity.stopped or inactive >= SUSPECT_SECONDS)

    def _silence_limit(self, used: float) -> float:
        """Seconds that the engine may be silent which has used so many of processor time since it was last heard.

        One that gets no processor is slow through no fault of its own, and of a step like none before nothing is known.
        """
        if self._expected is None or self._answers_looks():
            return self._hang_seconds
        limit = max(BUSY_SECONDS, SLOW_STEP_FACTOR * self._expected)
        return limit if used >= limit / 2 else max(limit, self._hang_seconds)
