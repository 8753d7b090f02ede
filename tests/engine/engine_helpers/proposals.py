"""Engines with an MTP layer, and a record of its proposals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.engines import make_core
from helpers.prediction_layers import PredictionOracle

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.proposers import MTPProposer
from windlass.engine.scheduling.scheduler_output import SchedulerOutput


def mtp_engine(directory: Path, **options: Any) -> EngineCore:
    return make_core(directory, **{"speculative_mtp": True, "speculative_adaptive": False, **options})


def predictor_of(core: EngineCore) -> MTPProposer:
    assert isinstance(core.runner.proposer, MTPProposer)
    return core.runner.proposer


class Proposed:
    """Record of later proposals and their contexts. Hidden states are overwritten at the end of a step, as the next step may
    overwrite them."""

    def __init__(self, core: EngineCore) -> None:
        self.found: list[tuple[list[int], tuple[int, ...], list[torch.Tensor]]] = []
        self._runs: list[torch.Tensor] = []
        self._logits: dict[int, list[torch.Tensor]] = {}
        self._predictor = predictor_of(core)
        self._propose, self._observe = self._predictor.propose, self._predictor.observe
        self._draft, self._run = self._predictor._draft, self._predictor._run
        self._predictor.propose = self._record  # type: ignore[method-assign]
        self._predictor.observe = self._spoil  # type: ignore[method-assign]
        self._predictor._draft = self._watch_draft  # type: ignore[method-assign]
        self._predictor._run = self._watch_run  # type: ignore[method-assign]

    def _spoil(self, plan: SchedulerOutput, hidden: torch.Tensor) -> None:
        self._observe(plan, hidden)
        hidden.fill_(torch.nan)

    def _record(self, plan: SchedulerOutput) -> SchedulerOutput:
        filled = self._propose(plan)
        for asked, item in zip(plan.sequences, filled.sequences, strict=True):
            if asked.num_drafted:
                assert len(item.draft) == asked.num_drafted
                known = self._predictor.input_batch.by_id[item.seq_id].token_ids
                assert len(known) == item.start + 1
                self.found.append((list(known), item.draft, self._logits[item.seq_id]))
        return filled

    def _watch_run(self, *given: Any) -> tuple[torch.Tensor, Any]:
        hidden, outputs = self._run(*given)
        self._runs.append(hidden.clone())
        return hidden, outputs

    def _watch_draft(self, items: list[Any]) -> dict[int, list[int]]:
        self._runs.clear()
        drafts = self._draft(items)
        self._logits = {item.seq_id: [] for item, _ in items}
        rows = torch.tensor([len(waiting.states) for _, waiting in items]).cumsum(0) - 1
        for step, hidden in enumerate(self._runs):
            wanted = [item.seq_id for item, _ in items if item.num_drafted > step]
            for seq_id, row in zip(wanted, self._predictor.decoder.logits(hidden[rows]).cpu(), strict=True):
                self._logits[seq_id].append(row)
            rows = torch.arange(sum(item.num_drafted > step + 1 for item, _ in items))
        return drafts

    def check(self, oracle: PredictionOracle, least: int) -> None:
        """Compare proposals and their logits with those of the oracle for the entire text."""
        assert len(self.found) >= least
        for known, draft, logits in self.found:
            want = oracle.proposals(known, len(draft))
            assert tuple(int(one.argmax()) for one in want) == draft
            torch.testing.assert_close(torch.stack(logits), torch.stack(want), rtol=1e-4, atol=1e-4)
