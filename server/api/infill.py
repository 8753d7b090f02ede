"""`POST /infill`: llama.cpp's fill-in-the-middle API."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.api.router import GENERATION_ERRORS, ApiRouter, FieldNames
from windlass.server.app.request_body import read_body
from windlass.server.app.state import state_of
from windlass.server.errors import bad_request
from windlass.server.schemas.base import INT32_MAX
from windlass.server.schemas.completions import (
    SAMPLERS,
    CompletionRequest,
    Infill,
    InfillEvent,
    InfillRequest,
    InfillTimings,
)
from windlass.server.schemas.generation import SharedRequest
from windlass.server.schemas.response_parts import Rotary
from windlass.server.serving.generation import check_generation, run_generation
from windlass.server.serving.job import Delta, GenerationJob, TokenUsage, admit_request
from windlass.server.serving.prompts import fit_infill_prompt, require_fill_in
from windlass.server.serving.response_writer import CollectedChoice, Writer
from windlass.server.serving.streaming import Exchange, StreamFormat
from windlass.server.text.detokenizer import LineLimits

_FIELD_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "return_token_ids": "return_tokens"}
_UNSUPPORTED_FIELDS = ("truncate_prompt_tokens", "truncation_side", "passages")

# Values of the fields of a disabled sampler.
_DISABLED_VALUES: dict[str, dict[str, Any]] = {
    "dry": {"dry_multiplier": 0.0},
    "top_k": {"top_k": 0},
    "typical_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
    "penalties": {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
}

_SAMPLER_NAMES = frozenset(SAMPLERS.values())
DEFAULT_TOKENS = 1024  # of an answer, as many models never end one in a gap by themselves

router = ApiRouter("Fill-in-the-middle", "Text for a gap, in the form of llama.cpp's server.")


def completion_request_from_infill(body: InfillRequest) -> tuple[CompletionRequest, FieldNames]:
    """The completion that fills the gap, without its prompt; raises ApiError naming the field."""
    for name in _UNSUPPORTED_FIELDS:
        if getattr(body, name) is not None:
            raise bad_request(f"{name} is not supported by /infill: remove it", name)
    fields = {name: getattr(body, name) for name in SharedRequest.model_fields}
    fields["repetition_penalty"] = body.repeat_penalty
    if body.seed == -1:
        fields["seed"] = None  # llama.cpp's value for a random seed
    for name in _disabled_samplers(body.samplers):
        fields |= _DISABLED_VALUES[name]
    completion = CompletionRequest.model_construct(
        **fields,
        prompt="",
        max_tokens=INT32_MAX if body.n_predict == -1 else body.n_predict,
        stop=body.stop,
        return_token_ids=body.return_tokens,
    )
    return completion, FieldNames(_FIELD_NAMES, [], {})


def read_line_limits(body: InfillRequest) -> LineLimits | None:
    """Limits of the answer by lines, None if there are none."""
    milliseconds = body.t_max_predict_ms or 0
    limits = LineLimits(body.n_indent or 0, milliseconds / 1000 if milliseconds > 0 else None)
    return None if limits == LineLimits() else limits


def _disabled_samplers(samplers: list[str] | str | None) -> Iterable[str]:
    """The samplers that the request disables."""
    if samplers is None:
        return ()
    if isinstance(samplers, str):
        given = {SAMPLERS.get(letter, letter) for letter in samplers}
    else:
        given = {"typical_p" if name == "typ_p" else name for name in samplers}
    unknown = sorted(given - _SAMPLER_NAMES)
    if unknown:
        raise bad_request(
            f"samplers: {unknown[0][:64]!r} is not one of {', '.join(sorted(_SAMPLER_NAMES))}: leave it out", "samplers"
        )
    return [name for name in _DISABLED_VALUES if name not in given]


class InfillWriter(Writer):
    """Writes one answer, complete or as events with the same fields.

    fields: paths of the requested fields, None for all. truncated: whether the prompt was cut to fit.
    """

    def __init__(
        self, job: GenerationJob, token_usage: TokenUsage, *, fields: Sequence[str] | None, truncated: bool
    ) -> None:
        super().__init__(job, token_usage)
        self._returns_tokens = bool(job.body.return_token_ids)
        self._fields = fields
        self._truncated = truncated
        self._result = CollectedChoice()
        self._started_at = time.monotonic()
        self._first_token_at: float | None = None
        self._last_delta_at = self._started_at
        self._has_new_line = False

    # ---- streams -----------------------------------------------------------------------------------------------------
    def event(self, delta: Delta) -> bytes:
        self._record_delta(delta)
        if delta.finish_reason is None:
            return self._delta_event(delta) if delta.text else b""
        self._result.finish_reason, self._result.stop_reason = delta.finish_reason, delta.stop_reason
        self._result.rotary = delta.rotary
        response = self._response()
        response.content, response.tokens = "", []
        last = _event(response.json_bytes())
        return self._delta_event(delta) + last if delta.text else last

    def _delta_event(self, delta: Delta) -> bytes:
        piece = {
            "index": 0,
            "content": delta.text,
            "tokens": list(delta.token_ids) if self._returns_tokens else [],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self.token_usage.completion_tokens,
            "tokens_evaluated": self.token_usage.prompt_tokens,
        }
        return _event(to_json(piece))

    # ---- complete answers -----------------------------------------------------------------------------------------------
    def add(self, delta: Delta) -> None:
        self._record_delta(delta)
        self._result.add(delta)
        self.budget.add(len(delta.text))

    def pieces(self) -> list[bytes]:
        response = self._response()
        if self._fields is None:
            return [response.json_bytes()]
        return [to_json(_select_fields(response.model_dump(exclude_unset=True), self._fields))]

    # ---- parts -------------------------------------------------------------------------------------------------------
    def _record_delta(self, delta: Delta) -> None:
        self._last_delta_at = time.monotonic()
        if self._first_token_at is None and delta.token_ids:
            self._first_token_at = self._last_delta_at
        self._has_new_line = self._has_new_line or "\n" in delta.text

    def _response(self) -> Infill:
        result, token_usage = self._result, self.token_usage
        word = result.stop_reason if isinstance(result.stop_reason, str) else ""
        response = Infill(
            index=0,
            content=result.text,
            tokens=list(result.token_ids) if self._returns_tokens else [],
            id_slot=0,
            stop=True,
            model=self.job.model_name,
            tokens_predicted=token_usage.completion_tokens,
            tokens_evaluated=token_usage.prompt_tokens,
            tokens_cached=token_usage.cached_tokens,
            has_new_line=self._has_new_line,
            truncated=self._truncated,
            stop_type="word" if word else "limit" if result.finish_reason == "length" else "eos",
            stopping_word=word,
            timings=self._timings(),
        )
        if result.rotary is not None:
            response.rotary = Rotary.model_validate(result.rotary)
        return response

    def _timings(self) -> InfillTimings:
        token_usage = self.token_usage
        first = self._last_delta_at if self._first_token_at is None else self._first_token_at
        computed = token_usage.prompt_tokens - token_usage.cached_tokens
        after_first = max(token_usage.completion_tokens - 1, 0)
        prompt_ms, decode_ms = 1000 * (first - self._started_at), 1000 * (self._last_delta_at - first)
        return InfillTimings(
            cache_n=token_usage.cached_tokens,
            prompt_n=computed,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=_ratio(prompt_ms, computed),
            prompt_per_second=_ratio(1000 * computed, prompt_ms),
            predicted_n=token_usage.completion_tokens,
            predicted_ms=decode_ms,
            predicted_per_token_ms=_ratio(decode_ms, after_first),
            predicted_per_second=_ratio(1000 * after_first, decode_ms),
        )


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0


def _select_fields(response: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The fields with these paths, by path. Unknown paths are omitted."""
    selected: dict[str, Any] = {}
    for path in fields:
        found: Any = response
        for name in path.split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            selected[path] = found
    return selected


@router.endpoint(
    "POST",
    "/infill",
    body=InfillRequest,
    response=Infill,
    events=InfillEvent,
    errors=GENERATION_ERRORS,
    examples={
        "plain": (
            "Text between two texts",
            {"input_prefix": "def area(r):\n    return ", "input_suffix": "\n\nprint(area(2))\n", "n_predict": 64},
        ),
        "files": (
            "With a passage of another file, streamed",
            {
                "input_prefix": "from shapes import area\n",
                "input_suffix": "\n",
                "input_extra": [{"filename": "shapes.py", "text": "def area(r):\n    return 3.14 * r * r\n"}],
                "prompt": "print(",
                "n_predict": 50,
                "stream": True,
            },
        ),
    },
    stream_examples=[
        {
            "index": 0,
            "content": "3.14 * r * r",
            "tokens": [],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": 9,
            "tokens_evaluated": 21,
        },
        {
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": True,
            "id_slot": 0,
            "model": "demo",
            "tokens_predicted": 9,
            "tokens_evaluated": 21,
            "tokens_cached": 0,
            "has_new_line": False,
            "truncated": False,
            "stop_type": "eos",
            "stopping_word": "",
        },
    ],
)
async def infill(request: Request) -> Response:
    """Fill the gap between two texts, in the form of llama.cpp's server, as editor plugins expect it."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, InfillRequest)
    info = admit_request(request, body)
    completion, names = completion_request_from_infill(body)
    with names.renamed_errors():
        job = check_generation(
            request,
            completion,
            info,
            arrival=arrival,
            default_max_tokens=state.settings.default_max_tokens or DEFAULT_TOKENS,
            logprobs=None,
            line_limits=read_line_limits(body),
        )
    require_fill_in(job, "input_prefix")

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        with names.renamed_errors():
            prompt, truncated = await fit_infill_prompt(job, body)
            make_writer = partial(InfillWriter, job, fields=body.response_fields, truncated=truncated)
            await run_generation(exchange, job, [prompt], param="input_prefix", make_writer=make_writer)

    return Exchange(state, work, deadline=job.deadline, stream_format=StreamFormat(done=b""))
