"""Engines whose model's own prediction layer proposes, and what it proposes behind which tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.engines import make_core
from helpers.prediction_layers import PredictionOracle

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.predictor import Predictor
from windlass.engine.scheduling.plan import SchedulerOutput


def predicting(directory: Path, **options: Any) -> EngineCore:
    return make_core(directory, **{"speculative_mtp": True, "speculative_adaptive": False, **options})


def predictor_of(core: EngineCore) -> Predictor:
    assert isinstance(core.runner.drafter, Predictor)
    return core.runner.drafter


class Proposed:
    """What an engine proposes from now on, and behind which tokens. States of a step are spoiled at its end, as the next one may
    overwrite them."""

    def __init__(self, core: EngineCore) -> None:
        self.found: list[tuple[list[int], tuple[int, ...]]] = []
        self._predictor = predictor_of(core)
        self._propose, self._observe = self._predictor.propose, self._predictor.observe
        self._predictor.propose = self._record  # type: ignore[method-assign]
        self._predictor.observe = self._spoil  # type: ignore[method-assign]

    def _spoil(self, plan: SchedulerOutput, hidden: torch.Tensor) -> None:
        self._observe(plan, hidden)
        hidden.fill_(torch.nan)

    def _record(self, plan: SchedulerOutput) -> SchedulerOutput:
        filled = self._propose(plan)
        for asked, item in zip(plan.sequences, filled.sequences, strict=True):
            if asked.num_drafted:
                assert len(item.draft) == asked.num_drafted
                known = self._predictor._sequences.by_id[item.seq_id].token_ids
                assert len(known) == item.start + 1
                self.found.append((list(known), item.draft))
        return filled

    def check(self, oracle: PredictionOracle, least: int) -> None:
        """Each is what the oracle predicts from the whole text."""
        assert len(self.found) >= least
        for known, draft in self.found:
            assert tuple(int(one.argmax()) for one in oracle.proposals(known, len(draft))) == draft
