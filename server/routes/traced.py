"""The phases of a generation request as spans: prepared, queued, prefilled, decoded. Knows times and counts, and no text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.server.generation.deltas import Delta, GenerationPlan, Tally
from windlass.server.routes.recorded import outcome_of

if TYPE_CHECKING:
    from windlass.server.exchange.tracing import Tracing
    from windlass.server.routes.job import GenerationJob


@dataclass(slots=True)
class _TracedPrompt:
    """Times on the monotonic clock, None before they come."""

    scheduled: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0


class TracedRequest:
    """One request while it runs. `take` its deltas, `end` it once. span: of its exchange, the parent of the phases."""

    def __init__(self, tracing: Tracing, span: Any, job: GenerationJob, plan: GenerationPlan, tally: Tally) -> None:
        self._tracing, self._span, self._job, self._plan, self._tally = tracing, span, job, plan, tally
        self._handed = time.monotonic()
        self._prompts = [_TracedPrompt() for _ in plan.prompts]

    def take(self, delta: Delta) -> None:
        """What came now."""
        prompt = self._prompts[delta.choice // self._plan.samples]
        prompt.last = time.monotonic()
        if prompt.first is None:
            prompt.first, prompt.scheduled = prompt.last, delta.scheduled_at
        prompt.tokens += len(delta.token_ids)

    def end(self, error: BaseException | None, cut_short: str) -> None:
        """Write the spans of the phases that have begun. cut_short: see `RecordedRequest.end`."""
        now, job = time.monotonic(), self._job
        outcome = outcome_of(error, cut_short)
        self._phase("prepare", job.arrival, self._handed, {})
        for index, prompt in enumerate(self._prompts):
            seen: dict[str, Any] = {"windlass.prompt": index} if len(self._prompts) > 1 else {}
            prompt_tokens = len(self._plan.prompts[index].token_ids)
            scheduled = self._handed if prompt.scheduled is None else max(self._handed, prompt.scheduled)
            if prompt.first is None:  # it ended in the queue or in its prefill: which of them is not known here
                self._phase("queue", self._handed, now, seen)
                continue
            self._phase("queue", self._handed, scheduled, seen)
            self._phase("prefill", scheduled, prompt.first, {**seen, "gen_ai.usage.input_tokens": prompt_tokens})
            tokens = {**seen, "gen_ai.usage.output_tokens": prompt.tokens}
            self._phase("decode", prompt.first, prompt.last or now, tokens)
        self._span.set_attributes(
            {
                "gen_ai.request.model": job.model_name,
                "gen_ai.usage.input_tokens": self._tally.prompt_tokens,
                "gen_ai.usage.output_tokens": self._tally.completion_tokens,
                "windlass.cached_tokens": self._tally.cached_tokens,
                "windlass.scaling": job.rotation.shown_name(job.body.rope_scaling),
                "windlass.outcome": outcome,
            }
        )

    def _phase(self, name: str, start: float, end: float, attributes: dict[str, Any]) -> None:
        self._tracing.phase(self._span, name, start, end, attributes)
