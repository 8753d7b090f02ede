"""What a rank that is not the first has of an engine: its part of the model, pages for its heads, and the steps on them."""

from __future__ import annotations

from dataclasses import replace

import torch

from windlass.engine.api.config import EngineConfig, SpeculationConfig
from windlass.engine.cache.budget import CachePlan
from windlass.engine.core.pages import allocate_kv_storage
from windlass.engine.core.ranks.messages import AvailableMemory
from windlass.engine.core.ranks.room import rank_available_memory
from windlass.engine.core.threads import threads_per_rank
from windlass.engine.execution.rank_runner import RankRunner
from windlass.engine.execution.runner import ApplyPlan, ExecutePlan, RankCommand
from windlass.engine.model.loading.loader import RankPlacement, load_model
from windlass.engine.rotary.tables import RotaryTables


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
