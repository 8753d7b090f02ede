"""Simulated text processes: they run the real tasks in this process, and may die, be slow or run out of memory.

They replace `windlass.server.text.workers.pool`, the boundary to the operating system.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING

from helpers.live_server import SPECIAL_TOKENS, TEMPLATE
from helpers.toy_tokenizers import byte_level

from windlass.engine.errors import RequestError
from windlass.server.text.chat_template import ChatTemplate, ChatTemplateError
from windlass.server.text.tokenizer import Tokenizer
from windlass.server.text.workers.frames import Limits, Result, WorkerSource
from windlass.server.text.workers.pool import ForkError, ProcessDiedError, TooSlowError
from windlass.server.text.workers.tasks import TextTasks

if TYPE_CHECKING:
    from simulation.world import World


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), SPECIAL_TOKENS, {"default": TEMPLATE})


@functools.cache
def tasks() -> TextTasks:
    return TextTasks(tokenizer(), ChatTemplate(TEMPLATE, SPECIAL_TOKENS))


class SimulatedForkServer:
    alive = True

    def __init__(self, world: World, source: WorkerSource) -> None:
        self._world = world

    def wait_loaded(self) -> None:
        pass

    def fork(self) -> SimulatedTextProcess:
        if self._world.happens("no process can be started"):
            raise ForkError("Resource temporarily unavailable")
        return SimulatedTextProcess(self._world)

    def kill(self) -> None:
        pass


class SimulatedTextProcess:
    def __init__(self, world: World) -> None:
        self._world = world
        self.needs_recycling = self.exited = False

    def run(self, body: bytes, limits: Sequence[Limits]) -> Result:
        task, _ = pickle.loads(body)
        if self._world.happens("text process dies"):
            self.exited = True
            raise ProcessDiedError("SIGSEGV")
        if self._world.happens("text process is slow"):
            self.exited = True
            raise TooSlowError
        if self._world.happens("text process has no memory"):
            return Result(error="memory")
        try:
            return Result(task(tasks()))
        except (RequestError, ChatTemplateError) as error:
            return Result(error="input", message=error.message)

    def interrupt(self) -> None:
        self.exited = True

    def kill(self) -> None:
        self.exited = True
