"""Where the replicas of one model run on this machine: their cores, and the memory that their weights have in common."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from windlass.engine.api.config import EngineConfig
from windlass.engine.api.machine import processor_quota
from windlass.engine.client.child import ProcessPlacement
from windlass.engine.core.black_box import create_memory_file
from windlass.engine.core.threads import partition_cores, threads_per_rank

_MODELS = 2  # a model and a draft model


class ReplicaPlacement:
    """Seats for so many engines; raises LoadError where there are not. leave_one: the last core is the server's. `close` it.

    Nothing lies in the memory files until the first engine loads.
    """

    def __init__(self, replicas: int, *, leave_one: bool = False) -> None:
        self._cores = partition_cores(replicas, leave_one=leave_one)
        self._files = tuple(create_memory_file(0) for _ in range(_MODELS))

    @property
    def placements(self) -> list[ProcessPlacement]:
        return [ProcessPlacement(cores, self._files) for cores in self._cores]

    def configs(self, config: EngineConfig) -> list[EngineConfig]:
        """What each engine loads."""
        engines, loading = len(self._cores), replace(config.loading, shared_memory=self._files)
        placements = [replace(config.compute, cores=cores) for cores in self._cores]
        if processor_quota() is not None:  # an engine knows its cores, and not with how many it shares the quota
            placements = [
                replace(compute, threads=threads_per_rank(compute, engines=engines)) for compute in placements
            ]
        return [replace(config, replicas=engines, loading=loading, compute=compute) for compute in placements]

    def close(self) -> None:
        """Give the descriptors back; engines that run keep what they have mapped. Safe to call twice."""
        files, self._files = self._files, ()
        for number in files:
            with contextlib.suppress(OSError):
                os.close(number)
