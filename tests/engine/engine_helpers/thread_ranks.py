"""Ranks of a model as threads of this process, so that tests need no processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from helpers.device import DEVICE
from helpers.engines import make_core

from windlass.engine.cache.kv_cache_budget import CachePlan
from windlass.engine.core import engine_core
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.core.messages import AvailableMemory, ShardLoaded
from windlass.engine.core.ranks import RankShard
from windlass.engine.errors import LoadError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.process_setup import create_memory_file
from windlass.kernels import RankGroup, shared_memory_bytes


class ThreadRanks:
    """The interface of `RankProcesses`, with the steps of each rank in a thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.memory, self.store = (
            create_memory_file(shared_memory_bytes(config.compute.tensor_parallel)),
            create_memory_file(0),
        )
        self.parts = [
            RankShard(config, rank, self.memory, self.store) for rank in range(1, config.compute.tensor_parallel)
        ]
        self._queues = [SimpleQueue[Any]() for _ in self.parts]
        self._threads = [
            threading.Thread(target=self._run, args=pair) for pair in zip(self.parts, self._queues, strict=True)
        ]
        self._meeting: RankGroup | None = None
        self.failed: list[BaseException] = []

    def watch(self, gone: Callable[[str], None]) -> None:
        pass

    def attach_collectives(self, ranks: RankGroup | None) -> None:
        self._meeting = ranks

    def loaded(self) -> list[ShardLoaded]:
        return [ShardLoaded(part.weight_bytes) for part in self.parts]

    def profile_memory(self) -> None:
        self._found: list[AvailableMemory | LoadError] = []

        def find(part: RankShard) -> None:
            try:
                self._found.append(part.profile_memory())
            except LoadError as error:
                self._found.append(error)
                if self._meeting is not None:
                    self._meeting.end(str(error))

        self._finding = [threading.Thread(target=find, args=(part,)) for part in self.parts]
        for thread in self._finding:
            thread.start()

    def available_memory_of_ranks(self) -> list[AvailableMemory]:
        for thread in self._finding:
            thread.join()
        for one in self._found:
            if isinstance(one, LoadError):
                raise one
        return [one for one in self._found if isinstance(one, AvailableMemory)]

    def allocate_cache(self, plan: CachePlan, rotary_rows: int) -> None:
        for part in self.parts:
            part.allocate_cache(plan, rotary_rows)
        for thread in self._threads:
            thread.start()

    def send_command(self, order: object) -> None:
        for queue in self._queues:
            queue.put(order)

    def close(self) -> None:
        self.send_command(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        os.close(self.memory)
        os.close(self.store)
        assert not self.failed, self.failed

    def _run(self, part: RankShard, queue: SimpleQueue[Any]) -> None:
        while (order := queue.get()) is not None:
            try:
                part.run(order)
            except BaseException as error:
                self.failed.append(error)
                if self._meeting is not None:
                    self._meeting.end(str(error))
                return


@contextmanager
def ranked(directory: Path, ranks: int, **options: Any) -> Iterator[EngineCore]:
    """Return an engine core with this number of ranks, the others as threads of this process."""
    if DEVICE != "cpu":
        pytest.skip("there is one GPU for all")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_core, "RankProcesses", ThreadRanks)
        core = make_core(directory, tensor_parallel=ranks, threads=1, **options)
    try:
        yield core
    finally:
        core.close()
