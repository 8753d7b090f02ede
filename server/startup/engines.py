"""Engine processes of a server: one or several replicas, started before the model to load is known."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from windlass.engine.client.child_process import ChildProcess, ProcessPlacement, preload_module
from windlass.engine.client.process_client import ProcessClient
from windlass.engine.client.replicated_client import ReplicaPlacement, ReplicatedClient
from windlass.engine.host_resources import split_cores
from windlass.engine.interface.config import EngineConfig
from windlass.server.config.engine_options import EngineOptions

# Private: names the engine core (see windlass.engine.core.engine_process), for tests without a model.
CORE_VARIABLE = "_WINDLASS_ENGINE_CORE"

SupervisedEngine: TypeAlias = ProcessClient | ReplicatedClient


class Engines:
    """Engine processes, to be closed with `close`. Raises LoadError if this machine has too few cores for the replicas.

    The first process begins to import its modules immediately, which takes most of a start.
    """

    def __init__(self, engine: EngineOptions, log_level: str, replicas: int = 1) -> None:
        self._core = os.environ.get(CORE_VARIABLE)
        self._log_level = log_level
        self.replicas = replicas
        self._placement = ReplicaPlacement(replicas, leave_one=engine.pin_cores) if replicas > 1 else None
        if self._placement is None:
            self._placements = [ProcessPlacement(split_cores()[0] if engine.pin_cores else None)]
        else:
            self._placements = self._placement.placements
        self._children = [self._start(self._placements[0])]

    def client(
        self, engine: EngineOptions, path: Path, crash_folder: Path | None = None, *, engines_per_machine: int = 1
    ) -> SupervisedEngine:
        """A client for the model in `path`, which owns the processes from now on. Its `spawn` makes them load the model.

        engines_per_machine: engines that may share this machine's memory, started by other processes.
        """
        config = engine.to_config(path)
        if self._placement is None:
            return self._single(replace(config, replicas=engines_per_machine), self._children[0], crash_folder)
        # The others import their modules while the first one loads.
        self._children += [self._start(process_placement) for process_placement in self._placements[1:]]
        configs = self._placement.configs(config)
        clients = [self._single(each, child, crash_folder) for each, child in zip(configs, self._children, strict=True)]
        return ReplicatedClient(clients, config)

    def close(self) -> None:
        """End all processes."""
        for child in self._children:
            child.close()
        if self._placement is not None:
            self._placement.close()

    def _start(self, process_placement: ProcessPlacement) -> ChildProcess:
        return ChildProcess(
            self._core, self._log_level, preload=preload_module(self._core), process_placement=process_placement
        )

    def _single(self, config: EngineConfig, child: ChildProcess, crash_folder: Path | None) -> ProcessClient:
        return ProcessClient(config, log_level=self._log_level, core=self._core, child=child, crash_folder=crash_folder)
