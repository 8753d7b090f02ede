"""Tensor-parallel ranks: the first rank's handle on the rank processes, and the model shard of each other rank.

All ranks end together: if one exits, steps that wait for it fail; if the first one exits, the system kills the others.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from windlass.engine.cache.kv_cache_budget import CachePlan
from windlass.engine.core import messages
from windlass.engine.core.memory_budget import (
    allocate_kv_cache,
    kv_bytes_per_token,
    make_rotary_tables,
    profile_kv_memory,
)
from windlass.engine.errors import LoadError
from windlass.engine.execution.model_runner import RankCommand, RankPlan, RankRunner
from windlass.engine.host_resources import thread_wait_environment, threads_per_rank
from windlass.engine.interface.config import EngineConfig, SpeculationConfig
from windlass.engine.model.loading.loader import LoadedModel, RankPlacement, load_model
from windlass.engine.process_setup import child_output_fd, create_memory_file, describe_exit
from windlass.kernels import RankEndedError, RankGroup, shared_memory_bytes

_END_SECONDS = 2.0  # that a rank has to end by itself after its pipe is closed

Gone = Callable[[str], None]

T = TypeVar("T")


class _RankHandle:
    """A rank process, the pipe to it, and its answers, which end with None once it is gone."""

    def __init__(self, rank: int, memory: int, store: int) -> None:
        self.rank = rank
        self.pipe, theirs = Pipe()
        output = child_output_fd()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "windlass.engine.core.rank_process"),
                    *(f"--fd={theirs.fileno()}", f"--memory={memory}", f"--store={store}", f"--parent={os.getpid()}"),
                ],
                pass_fds=[theirs.fileno(), memory, store],
                env={**os.environ, **thread_wait_environment(os.environ)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.answers: SimpleQueue[Any] = SimpleQueue()

    def describe_end(self) -> str:
        """How the process ended, for people. Waits a moment for it to end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        return describe_exit(self.process.returncode)


class RankProcesses:
    """All ranks but the first. They start to load at once, and run until `close` or the end of this process."""

    def __init__(self, config: EngineConfig) -> None:
        self.count = config.compute.tensor_parallel
        self.memory, self.store = create_memory_file(shared_memory_bytes(self.count)), create_memory_file(0)
        self._gone: Gone | None = None
        self._collectives: RankGroup | None = None
        self._fault: str | None = None
        self._closing = False
        self._ranks: list[_RankHandle] = []
        try:
            for rank in range(1, self.count):
                other = _RankHandle(rank, self.memory, self.store)
                self._ranks.append(other)
                other.pipe.send(messages.LoadShard(config, rank))
                threading.Thread(target=self._read, args=(other,), name=f"rank-{rank}", daemon=True).start()
        except OSError as error:
            self.close()
            raise LoadError(f"`compute.tensor_parallel`: a process cannot be started: {error.strerror}") from None

    def watch(self, gone: Gone) -> None:
        """Call `gone`, once or twice and from any thread, with the reason when a rank ends or has ended already."""
        self._gone = gone
        if self._fault is not None:
            gone(self._fault)

    def attach_collectives(self, ranks: RankGroup | None) -> None:
        """Make steps fail that wait in `ranks` for a rank that has ended."""
        self._collectives = ranks
        if self._fault is not None and ranks is not None:
            ranks.end(self._fault)

    def loaded(self) -> list[messages.ShardLoaded]:
        """Wait until all ranks have loaded. Raises LoadError."""
        return [self._answer(other, messages.ShardLoaded) for other in self._ranks]

    def profile_memory(self) -> None:
        """Start memory profiling on all ranks; the first rank must run the same step at the same time."""
        self.send_command(messages.ProfileMemory())

    def available_memory_of_ranks(self) -> list[messages.AvailableMemory]:
        """Wait for the results of `profile_memory`. Raises LoadError."""
        return [self._answer(other, messages.AvailableMemory) for other in self._ranks]

    def allocate_cache(self, plan: CachePlan, rotary_rows: int) -> None:
        """Allocate the KV cache and the rotary tables of all ranks. Raises LoadError."""
        self.send_command(messages.AllocateCache(plan, rotary_rows))
        for other in self._ranks:
            self._answer(other, messages.ShardLoaded)

    def send_command(self, command: object) -> None:
        """Send a command to all ranks. Raises RuntimeError if one has ended."""
        data = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        for other in self._ranks:
            try:
                other.pipe.send_bytes(data)
            except OSError:
                raise RuntimeError(self._fault or f"rank {other.rank} ended: {other.describe_end()}") from None

    def close(self) -> None:
        """Kill all rank processes. Safe to call twice."""
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
        if isinstance(answer, messages.LoadFailed):
            raise LoadError(answer.message)
        raise LoadError(f"rank {other.rank} ended while loading: {other.describe_end()}")

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
) -> messages.AvailableMemory:
    """Available KV memory on the device of one rank; all ranks must call this at the same time. Raises LoadError."""
    return messages.AvailableMemory(profile_kv_memory(config, model, draft), kv_bytes_per_token(model, draft))


def group_kv_memory(
    config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, others: RankProcesses | None
) -> int | None:
    """KV memory of all ranks together in bytes, limited by the rank with the least available memory. Raises LoadError.

    None if it is not measured here: it is configured, the device has no memory of its own, or there are no other ranks.
    """
    if others is None or config.cache.memory is not None or model.decoder.backend.device_memory is None:
        return None
    others.profile_memory()
    try:
        own = rank_available_memory(config, model, draft)
    except RankEndedError:
        others.available_memory_of_ranks()  # raises the reason that the ended rank reported, if any
        raise
    total = kv_bytes_per_token(model, draft, all_ranks=True)
    return min(each.num_bytes * total // each.bytes_per_kv_token for each in (own, *others.available_memory_of_ranks()))


class RankShard:
    """The part of the model that one rank holds. Loads it at once; raises LoadError.

    memory, store: descriptors of the ranks' shared memory and rendezvous file, see `windlass.kernels.RankGroup`.
    """

    def __init__(self, config: EngineConfig, rank: int, memory: int, store: int) -> None:
        torch.set_num_threads(threads_per_rank(config.compute))
        # The first rank computes the drafts.
        self._config = replace(config, scheduling=replace(config.scheduling, speculation=SpeculationConfig()))
        self._model = load_model(self._config, placement=RankPlacement(rank, memory, store))
        self._runner: RankRunner | None = None

    @property
    def weight_bytes(self) -> int:
        return self._model.decoder.weight_bytes()

    def profile_memory(self) -> messages.AvailableMemory:
        """Available KV memory, measured by a step that all ranks compute together. Raises LoadError."""
        return rank_available_memory(self._config, self._model)

    def allocate_cache(self, plan: CachePlan, rotary_rows: int) -> None:
        """Allocate the KV cache and rotary tables, as large as those of the first rank. Raises LoadError."""
        decoder = self._model.decoder
        cache = allocate_kv_cache(self._config, self._model, self._model, plan)
        tables = make_rotary_tables(decoder, rotary_rows)
        self._runner = RankRunner(decoder, cache, tables, self._config.cache.block_size)

    def run(self, command: RankCommand) -> None:
        """Run a command of the first rank."""
        assert self._runner is not None
        match command:
            case RankPlan(plan, compute=True):
                self._runner.execute_rank(plan)
            case RankPlan(plan):
                self._runner.apply(plan)
            case _:
                self._runner.restore(command)
