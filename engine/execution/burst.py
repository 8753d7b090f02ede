"""The passes of a step that has several: what each drew is what the next one computes.

Responsible for what a pass is told and for putting together what all of them drew. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from windlass.engine.execution.sequences import InputBatch
from windlass.engine.scheduling.plan import SchedulerOutput, StepResult


class MultiStepState:
    """plan: of several passes, followed already. next_pass: the same as a plan of one, moved on by what was drawn so far.

    The drawn tokens stand behind those of `sequences` meanwhile; the next plan says which of them count.
    """

    def __init__(self, plan: SchedulerOutput, sequences: InputBatch) -> None:
        self.next_pass = replace(plan, num_passes=1)
        self._passes_left, self._live = plan.num_passes, sequences.by_id
        self._results: list[list[StepResult]] = [[] for _ in plan.sequences]

    @property
    def has_next(self) -> bool:
        """Whether there is another pass to make."""
        return self._passes_left > 0

    def add(self, results: Sequence[StepResult]) -> None:
        """What a pass drew, in the order of the plan's sequences."""
        self._passes_left -= 1
        for item, sampled, result in zip(self.next_pass.sequences, self._results, results, strict=True):
            if result.error is not None:
                self._passes_left = 0
                if sampled:
                    continue  # what fails after drawn tokens fails again in the next step, when those are out
            elif result.token_ids[0] in self._live[item.seq_id].slot.stop_ids:
                self._passes_left = 0
            sampled.append(result)
        if self._passes_left:
            self._advance(results)

    def results(self) -> list[StepResult]:
        """What every sequence drew in all passes."""
        return [sampled[0] if len(sampled) == 1 else _joined(sampled) for sampled in self._results]

    def _advance(self, results: Sequence[StepResult]) -> None:
        items = []
        for item, result in zip(self.next_pass.sequences, results, strict=True):
            self._live[item.seq_id].token_ids.append(result.token_ids[0])
            items.append(item._replace(start=item.start + 1, num_known_tokens=item.num_known_tokens + 1))
        self.next_pass = replace(self.next_pass, sequences=tuple(items))


def _joined(sampled: Sequence[StepResult]) -> StepResult:
    token_ids = tuple([result.token_ids[0] for result in sampled])
    logprobs = (
        None if sampled[0].logprobs is None else tuple([entry for one in sampled for entry in one.logprobs or ()])
    )
    return replace(sampled[0], token_ids=token_ids, logprobs=logprobs)
