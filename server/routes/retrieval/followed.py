"""Who follows a request that generates nothing while its texts are pooled: nobody, the recorder, or spans.

Knows counts, times and digests; makes no vectors and no answers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from windlass.engine.interface.outputs import PooledRows, RequestOutput
from windlass.engine.interface.request import PoolingRule
from windlass.server.exchange.recording import WorkloadRecorder
from windlass.server.exchange.streaming import Exchange
from windlass.server.routes.followed import RequestFollower
from windlass.server.routes.recorded import first_fields, outcome_of, put_line, rotation_fields
from windlass.server.routes.retrieval.job import PoolingJob

if TYPE_CHECKING:
    from windlass.server.exchange.tracing import Tracing


def followers_of(
    exchange: Exchange, job: PoolingJob, prompts: Sequence[Collection[int]], rules: Sequence[PoolingRule]
) -> list[RequestFollower[[int, RequestOutput]]]:
    """Who wants to see a request that is pooled. They take each prompt's place and output, in any order."""
    state, followers = job.state, list[RequestFollower[[int, RequestOutput]]]()
    if state.recorder is not None:
        followers.append(RecordedPooling(state.recorder, job, prompts, rules, exchange.path))
    if state.tracing is not None and exchange.span is not None:
        followers.append(TracedPooling(state.tracing, exchange.span, job, sum(map(len, prompts))))
    return followers


class RecordedPooling:
    """The line of one request. With text it has the ids of prompts and the digests of rows."""

    def __init__(
        self,
        recorder: WorkloadRecorder,
        job: PoolingJob,
        prompts: Sequence[Collection[int]],
        rules: Sequence[PoolingRule],
        route: str,
    ) -> None:
        self._recorder, self._job, self._prompts, self._rules, self._route = recorder, job, prompts, rules, route
        self._rows: dict[int, PooledRows] = {}

    def take(self, index: int, output: RequestOutput) -> None:
        """See `followers_of`."""
        if output.pooled is not None:
            self._rows[index] = output.pooled

    def end(self, error: BaseException | None, cut_short: str) -> None:
        """Have it written."""
        outcome, now, clock = outcome_of(error, cut_short), time.monotonic(), time.time()
        put_line(self._recorder, self._job, clock, lambda: self._line(outcome, now, clock))

    def _line(self, outcome: str, now: float, clock: float) -> dict[str, Any]:
        job, text = self._job, self._recorder.settings.text
        fields: dict[str, Any] = {
            "attention_window": job.rule.attention_window,
            "attention_sinks": job.rule.attention_sinks if job.rule.attention_window is not None else None,
            "priority": job.priority or None,
            **rotation_fields(job.rotation, job.body.rope_scaling),
        }
        line: dict[str, Any] = {
            **first_fields(job, self._route, now, clock),
            "prompt_tokens": [len(ids) for ids in self._prompts],
            "fields": {name: value for name, value in fields.items() if value is not None},
            "pooling": {name: value for name, value in asdict(self._rules[0]).items() if name != "second_from"},
            "outcome": outcome,
            "seconds": round(now - job.arrival, 6),
            "answers": [self._answer(index, text) for index in sorted(self._rows)],
        }
        if text:
            line["prompt_token_ids"] = [list(ids) for ids in self._prompts]
            line["texts"] = {} if job.body.cache_salt is None else {"cache_salt": job.body.cache_salt}
            # Where the second text of a pair begins cannot be said in a request of tokens.
            line["exact"] = all(each.second_from is None for each in self._rules)
        return {name: value for name, value in line.items() if value is not None}

    def _answer(self, index: int, text: bool) -> dict[str, Any]:
        rows = self._rows[index]
        answer = {"choice": index, "rows": rows.num_rows, "width": rows.width}
        return answer | {"digest": digest_of_rows(rows.values)} if text else answer


def digest_of_rows(values: bytes) -> str:
    """Of a text's rows, float32 and little-endian: the same numbers to the last bit, and nothing else, give the same one."""
    return hashlib.sha256(values).hexdigest()[:32]


class TracedPooling:
    """The phases of one request as spans: prepared, queued until the first of its texts began, pooled until the last was done."""

    def __init__(self, tracing: Tracing, span: Any, job: PoolingJob, tokens: int) -> None:
        self._tracing, self._span, self._job, self._tokens = tracing, span, job, tokens
        self._handed = time.monotonic()
        self._scheduled: float | None = None
        self._texts = 0

    def take(self, index: int, output: RequestOutput) -> None:
        """See `followers_of`."""
        self._texts += 1
        begun = output.scheduled_at
        if begun is not None and (self._scheduled is None or begun < self._scheduled):
            self._scheduled = begun

    def end(self, error: BaseException | None, cut_short: str) -> None:
        """Write the spans of the phases that have begun."""
        now, job, tracing, span = time.monotonic(), self._job, self._tracing, self._span
        counts = {"gen_ai.usage.input_tokens": self._tokens, "windlass.texts": self._texts}
        tracing.phase(span, "prepare", job.arrival, self._handed, {})
        if self._texts == 0:
            tracing.phase(span, "queue", self._handed, now, {})
        else:
            scheduled = self._handed if self._scheduled is None else max(self._handed, self._scheduled)
            tracing.phase(span, "queue", self._handed, scheduled, {})
            tracing.phase(span, "pool", scheduled, now, counts)
        span.set_attributes(
            {
                "gen_ai.request.model": job.model_name,
                "gen_ai.usage.input_tokens": self._tokens,
                "windlass.scaling": job.rotation.shown_name(job.body.rope_scaling),
                "windlass.outcome": outcome_of(error, cut_short),
            }
        )
