"""Tensor-parallel ranks: the first rank's group of rank processes, and the model shard of each other rank.

All ranks end together: if one exits, steps that wait for it fail; if the first one exits, the system kills the others.
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
from dataclasses import replace
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from windlass.engine.cache.kv_cache_budget import CachePlan, bytes_per_token
from windlass.engine.core.memory_budget import allocate_kv_storage, draft_bytes_per_token, dtype_name, profile_kv_memory
from windlass.engine.core.messages import (
    AllocateCache,
    AvailableMemory,
    LoadShard,
    ProfileMemory,
    ShardFailed,
    ShardLoaded,
)
from windlass.engine.errors import LoadError
from windlass.engine.execution.model_runner import ApplyPlan, ExecutePlan, RankCommand, RankRunner
from windlass.engine.host_resources import thread_wait_environment, threads_per_rank
from windlass.engine.interface.config import EngineConfig, SpeculationConfig
from windlass.engine.model.loading.loader import LoadedModel, RankPlacement, load_model
from windlass.engine.process_setup import child_output, create_memory_file
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.kernels import RankEndedError, RankGroup, shared_memory_bytes

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
                    *(sys.executable, "-P", "-m", "windlass.engine.core.rank_process"),
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


def rank_available_memory(
    config: EngineConfig, model: LoadedModel, draft: LoadedModel | None = None
) -> AvailableMemory:
    """What the device of one rank has left: see `profile_kv_memory`, which all ranks call at the same time. Raises LoadError."""
    memory = model.decoder.backend.device_memory
    assert memory is not None
    num_bytes = profile_kv_memory(config, model, draft, memory)
    groups, dtype = model.decoder.spec.kv_groups, dtype_name(model.cache_dtype)
    return AvailableMemory(
        num_bytes, sum(bytes_per_token(group, dtype) for group in groups) + draft_bytes_per_token(draft)
    )


def group_kv_memory(
    config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, others: RankProcesses | None
) -> int | None:
    """Bytes of the pages of all ranks together, none of which has more than its device has room for. Raises LoadError.

    None where there is nothing to be found out: the operator says it, or there are no devices with memory of their own, or no
    other ranks.
    """
    if others is None or config.cache.memory is not None or model.decoder.backend.device_memory is None:
        return None
    others.profile_memory()
    try:
        own = rank_available_memory(config, model, draft)
    except RankEndedError:
        others.available_memory_of_ranks()  # raises what that rank said of it, if it did
        raise
    groups, dtype = model.spec.kv_groups, dtype_name(model.cache_dtype)
    whole = sum(bytes_per_token(group, dtype) for group in groups) + draft_bytes_per_token(draft)
    return min(part.num_bytes * whole // part.bytes_per_kv_token for part in (own, *others.available_memory_of_ranks()))


class RankShard:
    """Loads at once; raises LoadError. memory, store: descriptors of what the ranks meet in."""

    def __init__(self, config: EngineConfig, rank: int, memory: int, store: int) -> None:
        torch.set_num_threads(threads_per_rank(config.compute))
        # Drafts are made by the first rank.
        self._config = replace(config, scheduling=replace(config.scheduling, speculation=SpeculationConfig()))
        self._model = load_model(self._config, placement=RankPlacement(rank, memory, store))
        self._runner: RankRunner | None = None

    @property
    def weight_bytes(self) -> int:
        return self._model.decoder.weight_bytes()

    def profile_memory(self) -> AvailableMemory:
        """What its device has left, by a step that all ranks compute together. Raises LoadError."""
        return rank_available_memory(self._config, self._model)

    def allocate_cache(self, plan: CachePlan, rotary_rows: int) -> None:
        """Make what steps need, as large as the first rank has it. Raises LoadError."""
        decoder = self._model.decoder
        cache = allocate_kv_storage(self._config, self._model, self._model, plan)
        tables = RotaryTables(rotary_rows, [group.base for group in decoder.spec.rotary_groups], decoder.backend)
        self._runner = RankRunner(decoder, cache, tables, self._config.cache.block_size)

    def do(self, order: RankCommand) -> None:
        """What the first rank says."""
        assert self._runner is not None
        match order:
            case ExecutePlan(plan):
                self._runner.execute_rank(plan)
            case ApplyPlan(plan):
                self._runner.apply(plan)
            case _:
                self._runner.restore(order)
