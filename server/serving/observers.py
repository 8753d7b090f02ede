"""Observers of a request: the workload recorder and the tracer."""

from __future__ import annotations

import hashlib
import secrets
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol

from windlass._version import __version__
from windlass.engine.interface.outputs import PooledRows, RequestOutput
from windlass.engine.interface.request import PoolingRule
from windlass.engine.rotary.auto_scaling import AUTO
from windlass.server.errors import to_api_error
from windlass.server.observability.recording import WorkloadRecorder
from windlass.server.schemas.base import without_nulls
from windlass.server.schemas.chat import ChatRequest
from windlass.server.serving.job import Delta, GenerationJob, PoolingJob, RequestJob, TokenUsage
from windlass.server.serving.request_rotation import Rotation
from windlass.server.serving.streaming import Exchange
from windlass.server.text.service import Prompt

if TYPE_CHECKING:
    from windlass.server.observability.tracing import Tracing


RECORD_VERSION = 1  # of the lines; the first field of a file's first line
OK = "ok"
_SAMPLING_FIELDS = (
    *("max_tokens", "n", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "xtc_probability", "xtc_threshold", "seed", "min_tokens", "ignore_eos"),
    *("prompt_logprobs",),
)
P = ParamSpec("P")


class RequestObserver(Protocol[P]):
    """Receives the outputs of a request, and once its end. interruption_code: error code if `error` is a cancellation."""

    def observe_output(self, *args: P.args, **kwargs: P.kwargs) -> None: ...

    def end(self, error: BaseException | None, interruption_code: str) -> None: ...


@contextmanager
def observe_request(exchange: Exchange, observers: Sequence[RequestObserver[P]]) -> Iterator[Callable[P, None] | None]:
    """Scope of a request. Yields a function that passes outputs to the observers, None without observers."""
    if not observers:
        yield None
        return

    def observe_output(*args: P.args, **kwargs: P.kwargs) -> None:
        for observer in observers:
            observer.observe_output(*args, **kwargs)

    failure: BaseException | None = None
    try:
        yield observe_output
    except BaseException as error:
        failure = error
        raise
    finally:
        for observer in observers:
            observer.end(failure, exchange.interruption_code)


def generation_observers(
    exchange: Exchange, job: GenerationJob, prompts: Sequence[Prompt], token_usage: TokenUsage
) -> list[RequestObserver[[Delta]]]:
    """The observers of a generation request, which receive its deltas."""
    state, observers = job.state, list[RequestObserver[[Delta]]]()
    if state.recorder is not None:
        observers.append(GenerationRecorder(state.recorder, exchange.path, job, prompts, token_usage))
    if state.tracing is not None and exchange.span is not None:
        observers.append(GenerationTracer(state.tracing, exchange.span, job, prompts, token_usage))
    return observers


def pooling_observers(
    exchange: Exchange, job: PoolingJob, prompts: Sequence[Collection[int]], rules: Sequence[PoolingRule]
) -> list[RequestObserver[[int, RequestOutput]]]:
    """The observers of a pooling request, which receive the index and the output of each prompt, in any order."""
    state, observers = job.state, list[RequestObserver[[int, RequestOutput]]]()
    if state.recorder is not None:
        observers.append(PoolingRecorder(state.recorder, exchange.path, job, prompts, rules))
    if state.tracing is not None and exchange.span is not None:
        observers.append(PoolingTracer(state.tracing, exchange.span, job, sum(map(len, prompts))))
    return observers


def with_explicit_seed(job: GenerationJob) -> GenerationJob:
    """The job with a seed that can be recorded, if it samples and has none.

    Only for a single prompt: with one seed for all, equal prompts would get equal responses.
    """
    if job.sampling.seed is not None or job.sampling.temperature == 0:
        return job
    return replace(job, sampling=replace(job.sampling, seed=secrets.randbits(53)))


def outcome_code(error: BaseException | None, interruption_code: str) -> str:
    """OK or an error code. interruption_code: the code if `error` is a cancellation."""
    if error is None:
        return OK
    known = to_api_error(error)
    return interruption_code if known is None else known.code or str(known.status)


# ---- recorder ---------------------------------------------------------------------------------------------------------
def digest(token_ids: Sequence[int]) -> str:
    """Digest of token ids."""
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()[:32]


def rows_digest(values: bytes) -> str:
    """Digest of the rows of a text, float32 and little-endian."""
    return hashlib.sha256(values).hexdigest()[:32]


@dataclass
class _Recorder(ABC):
    """Writes the line of a request at its end. route: path of the request."""

    recorder: WorkloadRecorder
    route: str
    job: RequestJob

    def end(self, error: BaseException | None, interruption_code: str) -> None:
        outcome, now, clock = outcome_code(error, interruption_code), time.monotonic(), time.time()

        def line() -> dict[str, Any]:  # built on the recorder's thread
            return without_nulls(self._line(outcome, now, clock))

        self.recorder.put(line, header=lambda: _header(self.recorder, self.job, clock))

    @abstractmethod
    def _line(self, outcome: str, now: float, clock: float) -> dict[str, Any]:
        """Fields of the line. now, clock: the same time as monotonic and as wall-clock seconds."""


@dataclass
class GenerationRecorder(_Recorder):
    """Records a generation request.

    With text the line has the ids of prompts and the digests of responses, and the entire body if the response depends on its
    texts, for example through a grammar.
    """

    job: GenerationJob
    prompts: Sequence[Prompt]
    token_usage: TokenUsage
    _first_at: float | None = field(default=None, init=False)
    _ids: dict[int, array[int]] = field(default_factory=dict, init=False)
    _reasons: dict[int, str | None] = field(default_factory=dict, init=False)

    def observe_output(self, delta: Delta) -> None:
        if self._first_at is None:
            self._first_at = time.monotonic()
        self._ids.setdefault(delta.choice, array("q")).extend(delta.token_ids)
        self._reasons[delta.choice] = delta.finish_reason

    def _line(self, outcome: str, now: float, clock: float) -> dict[str, Any]:
        job, text = self.job, self.recorder.settings.text
        line: dict[str, Any] = {
            **_common_fields(job, self.route, now, clock),
            "stream": bool(job.body.stream),
            "prompt_tokens": [len(prompt.token_ids) for prompt in self.prompts],
            "cached_tokens": self.token_usage.cached_tokens,
            "fields": _fields(job),
            "outcome": outcome,
            "first_token_seconds": None if self._first_at is None else round(self._first_at - job.arrival, 6),
            "seconds": round(now - job.arrival, 6),
            "answers": [self._answer(choice, text) for choice in sorted(self._ids)],
        }
        if text:
            line["prompt_token_ids"] = [prompt.token_ids for prompt in self.prompts]
            line["texts"] = _text_fields(job)
            line["exact"] = job.line_limits is None and (job.sampling.seed is not None or job.sampling.temperature == 0)
            if _depends_on_texts(job):
                line["body"] = job.body.model_dump(mode="json", exclude_none=True, by_alias=True)
                line["chat"] = isinstance(job.body, ChatRequest)
        return line

    def _answer(self, choice: int, text: bool) -> dict[str, Any]:
        ids = self._ids[choice]
        answer = {"choice": choice, "tokens": len(ids), "finish_reason": self._reasons[choice]}
        # Only with text: short outputs could be guessed from their digest.
        return answer | {"digest": digest(ids)} if text else answer


@dataclass
class PoolingRecorder(_Recorder):
    """Records a pooling request. With text the line has the ids of prompts and the digests of rows."""

    job: PoolingJob
    prompts: Sequence[Collection[int]]
    rules: Sequence[PoolingRule]
    _rows: dict[int, PooledRows] = field(default_factory=dict, init=False)

    def observe_output(self, index: int, output: RequestOutput) -> None:
        if output.pooled is not None:
            self._rows[index] = output.pooled

    def _line(self, outcome: str, now: float, clock: float) -> dict[str, Any]:
        job, text = self.job, self.recorder.settings.text
        fields: dict[str, Any] = {
            "attention_window": job.rule.attention_window,
            "attention_sinks": job.rule.attention_sinks if job.rule.attention_window is not None else None,
            "priority": job.priority or None,
            **_rope_fields(job.rotation, job.body.rope_scaling),
        }
        line: dict[str, Any] = {
            **_common_fields(job, self.route, now, clock),
            "prompt_tokens": [len(ids) for ids in self.prompts],
            "fields": without_nulls(fields),
            "pooling": {name: value for name, value in asdict(self.rules[0]).items() if name != "second_from"},
            "outcome": outcome,
            "seconds": round(now - job.arrival, 6),
            "answers": [self._answer(index, text) for index in sorted(self._rows)],
        }
        if text:
            line["prompt_token_ids"] = [list(ids) for ids in self.prompts]
            line["texts"] = {} if job.body.cache_salt is None else {"cache_salt": job.body.cache_salt}
            # A request of token ids cannot express the beginning of a pair's second text.
            line["exact"] = all(each.second_from is None for each in self.rules)
        return line

    def _answer(self, index: int, text: bool) -> dict[str, Any]:
        rows = self._rows[index]
        answer = {"choice": index, "rows": rows.num_rows, "width": rows.width}
        return answer | {"digest": rows_digest(rows.values)} if text else answer


def _header(recorder: WorkloadRecorder, job: RequestJob, clock: float) -> dict[str, Any]:
    settings = recorder.settings
    return {
        "windlass_record": RECORD_VERSION,
        "version": __version__,
        "at": round(clock, 6),
        "model": job.state.settings.served_model_name,
        "fingerprint": job.state.fingerprint(job.info),
        "deterministic": settings.deterministic,
        "text": settings.text,
    }


def _common_fields(job: RequestJob, route: str, now: float, clock: float) -> dict[str, Any]:
    """First fields of every request's line. now, clock: the same time as monotonic and as wall-clock seconds."""
    return {
        "at": round(clock - (now - job.arrival), 6),
        "request_id": job.request_id,
        "route": route,
        "caller": job.state.callers.key_of(job.caller).name or None,
        "model": job.model_name,
    }


def _rope_fields(rotation: Rotation, requested: Any) -> dict[str, Any]:
    """Scaling and update policy of a request. requested: `rope_scaling` of the body."""
    fields: dict[str, Any] = {}
    if rotation.update is not None:
        fields["rope_update"] = {"policy": rotation.update, "exact": rotation.exact or None}
    if isinstance(requested, str) or rotation.scaling is AUTO:
        fields["rope_scaling"] = requested
    elif rotation.scaling is not None:
        fields["rope_scaling"] = rotation.scaling.to_dict()
    return fields


def _fields(job: GenerationJob) -> dict[str, Any]:
    """Fields of an equivalent completion request that contain no text of the client."""
    sampling, rule, reuse, rotation, body = job.sampling, job.rule, job.reuse, job.rotation, job.body
    fields: dict[str, Any] = {
        **{name: getattr(sampling, name) for name in _SAMPLING_FIELDS},
        "context_overflow": rule.overflow,
        "keep_tokens": rule.keep_tokens if rule.overflow == "shift" else None,
        "attention_window": rule.attention_window,
        "attention_sinks": rule.attention_sinks if rule.attention_window is not None else None,
        "cache_reuse": reuse.at_least,
        "cache_reuse_recompute": reuse.recompute if reuse.is_enabled else None,
        "passages": [{"start": start, "end": end} for start, end in reuse.passages] or None,
        "priority": job.priority or None,
        **_rope_fields(rotation, body.rope_scaling),
    }
    return without_nulls(fields)


def _text_fields(job: GenerationJob) -> dict[str, Any]:
    """Further fields, which may reveal something about a text."""
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
    return without_nulls(fields)


def _depends_on_texts(job: GenerationJob) -> bool:
    """Whether the response depends on something that a completion request of token ids cannot express."""
    return bool(
        job.structured is not None
        or job.body.bad_words
        or job.sampling.repeats is not None
        or job.sampling.thinking is not None
        or job.line_limits is not None
    )


# ---- tracer -----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _PromptTimes:
    """Times in monotonic seconds, None until they are known."""

    scheduled: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0


@dataclass
class GenerationTracer:
    """Traces the phases of a generation request as spans. span: of its exchange, their parent."""

    tracing: Tracing
    span: Any
    job: GenerationJob
    prompts: Sequence[Prompt]
    token_usage: TokenUsage
    _submitted_at: float = field(default_factory=time.monotonic, init=False)
    _times: list[_PromptTimes] = field(init=False)

    def __post_init__(self) -> None:
        self._times = [_PromptTimes() for _ in self.prompts]

    def observe_output(self, delta: Delta) -> None:
        prompt = self._times[delta.choice // self.job.sampling.n]
        prompt.last = time.monotonic()
        if prompt.first is None:
            prompt.first, prompt.scheduled = prompt.last, delta.scheduled_at
        prompt.tokens += len(delta.token_ids)

    def end(self, error: BaseException | None, interruption_code: str) -> None:
        now, job = time.monotonic(), self.job
        outcome = outcome_code(error, interruption_code)
        phases: list[tuple[str, float, float, dict[str, Any]]] = [("prepare", job.arrival, self._submitted_at, {})]
        for index, prompt in enumerate(self._times):
            seen: dict[str, Any] = {"windlass.prompt": index} if len(self._times) > 1 else {}
            prompt_tokens = len(self.prompts[index].token_ids)
            scheduled = self._submitted_at if prompt.scheduled is None else max(self._submitted_at, prompt.scheduled)
            if prompt.first is None:  # it ended in the queue or in prefill
                phases.append(("queue", self._submitted_at, now, seen))
                continue
            phases.append(("queue", self._submitted_at, scheduled, seen))
            phases.append(("prefill", scheduled, prompt.first, {**seen, "gen_ai.usage.input_tokens": prompt_tokens}))
            tokens = {**seen, "gen_ai.usage.output_tokens": prompt.tokens}
            phases.append(("decode", prompt.first, prompt.last or now, tokens))
        self.tracing.phases(self.span, phases)
        self.span.set_attributes(
            {
                "gen_ai.request.model": job.model_name,
                "gen_ai.usage.input_tokens": self.token_usage.prompt_tokens,
                "gen_ai.usage.output_tokens": self.token_usage.completion_tokens,
                "windlass.cached_tokens": self.token_usage.cached_tokens,
                "windlass.scaling": job.rotation.metric_label,
                "windlass.outcome": outcome,
            }
        )


@dataclass
class PoolingTracer:
    """Traces a pooling request: prepared, queued until its first text was scheduled, pooled until its last one was done."""

    tracing: Tracing
    span: Any
    job: PoolingJob
    tokens: int
    _submitted_at: float = field(default_factory=time.monotonic, init=False)
    _scheduled: float | None = field(default=None, init=False)
    _num_texts: int = field(default=0, init=False)

    def observe_output(self, index: int, output: RequestOutput) -> None:
        self._num_texts += 1
        begun = output.scheduled_at
        if begun is not None and (self._scheduled is None or begun < self._scheduled):
            self._scheduled = begun

    def end(self, error: BaseException | None, interruption_code: str) -> None:
        now, job, span = time.monotonic(), self.job, self.span
        counts = {"gen_ai.usage.input_tokens": self.tokens, "windlass.texts": self._num_texts}
        phases: list[tuple[str, float, float, dict[str, Any]]] = [("prepare", job.arrival, self._submitted_at, {})]
        if self._num_texts == 0:
            phases.append(("queue", self._submitted_at, now, {}))
        else:
            scheduled = self._submitted_at if self._scheduled is None else max(self._submitted_at, self._scheduled)
            phases.append(("queue", self._submitted_at, scheduled, {}))
            phases.append(("pool", scheduled, now, counts))
        self.tracing.phases(span, phases)
        span.set_attributes(
            {
                "gen_ai.request.model": job.model_name,
                "gen_ai.usage.input_tokens": self.tokens,
                "windlass.scaling": job.rotation.metric_label,
                "windlass.outcome": outcome_code(error, interruption_code),
            }
        )
