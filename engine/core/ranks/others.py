"""The other ranks as the first one has them: processes that it starts, tells what to compute, and ends.

All of them end together: where one is gone, steps fail in all that wait for it; where the first one is gone, the system ends
the others, whatever they are doing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from typing import Any, TypeVar

from windlass.engine.api.child_output import child_output
from windlass.engine.api.config import EngineConfig
from windlass.engine.cache.budget import CachePlan
from windlass.engine.core.black_box import create_memory_file
from windlass.engine.core.ranks.messages import (
    AllocateCache,
    AvailableMemory,
    LoadShard,
    ProfileMemory,
    ShardFailed,
    ShardLoaded,
)
from windlass.engine.core.threads import thread_wait_environment
from windlass.engine.errors import LoadError
from windlass.kernels import RankGroup, shared_memory_bytes

_END_SECONDS = 2.0  # that a rank has to end by itself once nobody holds the other end of its pipe

Gone = Callable[[str], None]
T = TypeVar("T")


class _RankHandle:
    """A process, the pipe to it, and what it has answered; None once it is gone."""

    def __init__(self, rank: int, memory: int, store: int, log_level: str) -> None:
        self.rank = rank
        self.pipe, theirs = Pipe()
        output = child_output()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "windlass.engine.core.ranks.process"),
                    *(f"--fd={theirs.fileno()}", f"--memory={memory}", f"--store={store}"),
                    *(f"--parent={os.getpid()}", f"--log-level={log_level}"),
                ],
                pass_fds=[theirs.fileno(), memory, store],
                env={**os.environ, **thread_wait_environment(os.environ)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.answers: SimpleQueue[Any] = SimpleQueue()

    def describe_end(self) -> str:
        """How it ended, for people."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        code = self.process.returncode
        if code is None:
            return "it closed its connection"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class RankProcesses:
    """They begin to load at once. `close` it, or end this process."""

    def __init__(self, config: EngineConfig, log_level: str = "warning") -> None:
        self.count = config.compute.tensor_parallel
        self.memory, self.store = create_memory_file(shared_memory_bytes(self.count)), create_memory_file(0)
        self._gone: Gone | None = None
        self._collectives: RankGroup | None = None
        self._fault: str | None = None
        self._closing = False
        self._ranks: list[_RankHandle] = []
        try:
            for rank in range(1, self.count):
                other = _RankHandle(rank, self.memory, self.store, log_level)
                self._ranks.append(other)
                other.pipe.send(LoadShard(config, rank))
                threading.Thread(target=self._read, args=(other,), name=f"rank-{rank}", daemon=True).start()
        except OSError as error:
            self.close()
            raise LoadError(f"`compute.tensor_parallel`: a process cannot be started: {error.strerror}") from None

    def watch(self, gone: Gone) -> None:
        """Have somebody told, once or twice and by any thread, why a rank is not there any more; one that is gone already too."""
        self._gone = gone
        if self._fault is not None:
            gone(self._fault)

    def attach_collectives(self, ranks: RankGroup | None) -> None:
        """Have steps fail that wait in there for a rank that is gone."""
        self._collectives = ranks
        if self._fault is not None and ranks is not None:
            ranks.end(self._fault)

    def loaded(self) -> list[ShardLoaded]:
        """What each of them has loaded, once all have. Raises LoadError."""
        return [self._answer(other, ShardLoaded) for other in self._ranks]

    def profile_memory(self) -> None:
        """Have them compute the largest step, as the first rank has to at the same time."""
        self.send_command(ProfileMemory())

    def available_memory_of_ranks(self) -> list[AvailableMemory]:
        """What they have found. Raises LoadError."""
        return [self._answer(other, AvailableMemory) for other in self._ranks]

    def allocate_cache(self, plan: CachePlan, rotary_rows: int) -> None:
        """Have them make ready for steps. Raises LoadError."""
        self.send_command(AllocateCache(plan, rotary_rows))
        for other in self._ranks:
            self._answer(other, ShardLoaded)

    def send_command(self, order: object) -> None:
        """Send all of them an order. Raises RuntimeError where one is gone."""
        data = pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
        for other in self._ranks:
            try:
                other.pipe.send_bytes(data)
            except OSError:
                raise RuntimeError(self._fault or f"rank {other.rank} ended: {other.describe_end()}") from None

    def close(self) -> None:
        """End them. Safe to call twice."""
        self._closing = True
        if self._collectives is not None:
            self._collectives.end("the engine was closed")
        for other in self._ranks:
            other.process.kill()
        for other in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.process.wait(_END_SECONDS)
        numbers, self.memory, self.store = (self.memory, self.store), -1, -1
        for number in numbers:
            if number >= 0:
                os.close(number)

    def _answer(self, other: _RankHandle, kind: type[T]) -> T:
        answer = other.answers.get()
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, ShardFailed):
            raise LoadError(answer.message)
        raise LoadError(f"rank {other.rank} ended while it loaded: {other.describe_end()}")

    def _read(self, other: _RankHandle) -> None:
        while True:
            try:
                other.answers.put(other.pipe.recv())
            except (EOFError, OSError):
                break
        other.answers.put(None)
        if self._closing:
            return
        self._fault = fault = self._fault or f"rank {other.rank} ended: {other.describe_end()}"
        if self._collectives is not None:
            self._collectives.end(fault)
        if self._gone is not None:
            self._gone(fault)
