"""What `--record` keeps of a generation request: its shape, and only where it is asked for its tokens.

Makes the line out of the job, the plan and what came of it; writes nothing itself. docs/replay.md has the form.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windlass._version import __version__
from windlass.engine.rotary.auto_scaling import AUTO
from windlass.server.errors import from_exception
from windlass.server.exchange.recording import Line, WorkloadRecorder
from windlass.server.generation.deltas import Delta, GenerationPlan, Tally
from windlass.server.generation.request_rotation import Rotation
from windlass.server.routes.job import GenerationJob, RequestJob

FORM = 1  # of the lines; the first field of a file's first line
OK = "ok"


def digest(token_ids: Sequence[int]) -> str:
    """Of an answer's tokens: the same ids in the same order, and nothing else, give the same one."""
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()[:32]


def with_seed(job: GenerationJob) -> GenerationJob:
    """The job with a seed that can be written down, where it is drawn and has none.

    Several prompts keep drawing their own: one seed for all would give equal prompts equal answers.
    """
    if job.sampling.seed is not None or job.sampling.temperature == 0:
        return job
    return replace(job, sampling=replace(job.sampling, seed=secrets.randbits(53)))


def outcome_of(error: BaseException | None, cut_short: str) -> str:
    """OK, or the code of what ended a request. cut_short: the code where `error` is a cancellation."""
    if error is None:
        return OK
    known = from_exception(error)
    return cut_short if known is None else known.code or str(known.status)


def put_line(recorder: WorkloadRecorder, job: RequestJob, clock: float, line: Line) -> None:
    """Have a request's line written, where needed behind the one that tells of the server."""
    recorder.put(line, head=lambda: _head(recorder, job, clock))


def first_fields(job: RequestJob, route: str, now: float, clock: float) -> dict[str, Any]:
    """What every request's line begins with. now, clock: the same moment, monotonic and as the clock has it, in seconds."""
    return {
        "at": round(clock - (now - job.arrival), 6),
        "request_id": job.request_id,
        "route": route,
        "caller": job.state.callers.of(job.caller).name or None,
        "model": job.model_name,
    }


def rotation_fields(rotation: Rotation, asked: Any) -> dict[str, Any]:
    """The scaling as a request names it, and the rule of its updates. asked: the body's `rope_scaling`."""
    fields: dict[str, Any] = {}
    if rotation.update is not None:
        fields["rope_update"] = {"policy": rotation.update, "exact": rotation.exact or None}
    if isinstance(asked, str) or rotation.scaling is AUTO:
        fields["rope_scaling"] = asked
    elif rotation.scaling is not None:
        fields["rope_scaling"] = rotation.scaling.to_dict()
    return fields


class RecordedRequest:
    """One request while it runs. `take` its deltas, `end` it once.

    route: as it was asked for. With text the line has the ids of prompts and the digests of answers, and the whole body where
    something that was made of its texts, such as a grammar, goes into the answer.
    """

    def __init__(
        self, recorder: WorkloadRecorder, job: GenerationJob, plan: GenerationPlan, tally: Tally, route: str
    ) -> None:
        self._recorder, self._job, self._plan, self._tally, self._route = recorder, job, plan, tally, route
        self._first_at: float | None = None
        self._ids: dict[int, array[int]] = {}
        self._reasons: dict[int, str | None] = {}

    def take(self, delta: Delta) -> None:
        """What came now."""
        if self._first_at is None:
            self._first_at = time.monotonic()
        self._ids.setdefault(delta.choice, array("q")).extend(delta.token_ids)
        self._reasons[delta.choice] = delta.finish_reason

    def end(self, error: BaseException | None, cut_short: str) -> None:
        """Have it written. cut_short: the code of what ended it from outside, where `error` is a cancellation."""
        outcome, now, clock = outcome_of(error, cut_short), time.monotonic(), time.time()
        put_line(self._recorder, self._job, clock, lambda: self._line(outcome, now, clock))

    def _line(self, outcome: str, now: float, clock: float) -> dict[str, Any]:
        job, text = self._job, self._recorder.settings.text
        line: dict[str, Any] = {
            **first_fields(job, self._route, now, clock),
            "stream": bool(job.body.stream),
            "prompt_tokens": [len(prompt.token_ids) for prompt in self._plan.prompts],
            "cached_tokens": self._tally.cached_tokens,
            "fields": _fields(job),
            "outcome": outcome,
            "first_token_seconds": None if self._first_at is None else round(self._first_at - job.arrival, 6),
            "seconds": round(now - job.arrival, 6),
            "answers": [self._answer(choice, text) for choice in sorted(self._ids)],
        }
        if text:
            line["prompt_token_ids"] = [prompt.token_ids for prompt in self._plan.prompts]
            line["texts"] = _texts(job)
            line["exact"] = job.line_limits is None and (job.sampling.seed is not None or job.sampling.temperature == 0)
            if _made_of_texts(job):
                line["body"] = job.body.model_dump(mode="json", exclude_none=True, by_alias=True)
                line["chat"] = job.chat
        return {name: value for name, value in line.items() if value is not None}

    def _answer(self, choice: int, text: bool) -> dict[str, Any]:
        ids = self._ids[choice]
        answer = {"choice": choice, "tokens": len(ids), "finish_reason": self._reasons[choice]}
        # Without text there is none either: few tokens could be guessed from it.
        return answer | {"digest": digest(ids)} if text else answer


def _head(recorder: WorkloadRecorder, job: RequestJob, clock: float) -> dict[str, Any]:
    settings = recorder.settings
    return {
        "windlass_record": FORM,
        "version": __version__,
        "at": round(clock, 6),
        "model": job.state.settings.served_model_name,
        "fingerprint": job.state.fingerprint(job.info),
        "deterministic": settings.deterministic,
        "text": settings.text,
    }


def _fields(job: GenerationJob) -> dict[str, Any]:
    """Fields of a completion that asks for the same: numbers, kinds and names that the operator chose."""
    sampling, rule, reuse, rotation, body = job.sampling, job.rule, job.reuse, job.rotation, job.body
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "seed": sampling.seed,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "prompt_logprobs": sampling.prompt_logprobs,
        "context_overflow": rule.overflow,
        "keep_tokens": rule.keep_tokens if rule.overflow == "shift" else None,
        "attention_window": rule.attention_window,
        "attention_sinks": rule.attention_sinks if rule.attention_window is not None else None,
        "cache_reuse": reuse.at_least,
        "cache_reuse_recompute": reuse.recompute if reuse.is_enabled else None,
        "passages": [{"start": start, "end": end} for start, end in reuse.passages] or None,
        "priority": job.priority or None,
        **rotation_fields(rotation, body.rope_scaling),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _texts(job: GenerationJob) -> dict[str, Any]:
    """Further fields, which may tell something of a text."""
    sampling, body = job.sampling, job.body
    fields: dict[str, Any] = {
        "stop": list(body.stop) if body.stop else None,
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "skip_special_tokens": body.skip_special_tokens,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "allowed_token_ids": None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids),
        "logit_bias": None if sampling.logit_bias is None else {str(k): v for k, v in sampling.logit_bias.items()},
        "cache_salt": body.cache_salt,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _made_of_texts(job: GenerationJob) -> bool:
    """Whether something goes into the answer that fields of a completion by tokens cannot say."""
    return bool(
        job.structured is not None
        or job.body.bad_words
        or job.sampling.repeats is not None
        or job.sampling.thinking is not None
        or job.line_limits is not None
    )
