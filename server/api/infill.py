"""`POST /infill`: llama.cpp's fill-in-the-middle API."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.api.field_names import FieldNames
from windlass.server.app.request_body import read_body
from windlass.server.app.state import caller_of, state_of
from windlass.server.errors import answer_too_large, bad_request
from windlass.server.http.request_id import request_id, set_request_id
from windlass.server.schemas.base import INT32_MAX
from windlass.server.schemas.completions import SAMPLERS, CompletionRequest, Infill, InfillEvent, InfillRequest
from windlass.server.schemas.generation import SharedRequest
from windlass.server.schemas.openapi import GENERATION_ERRORS, answers, body_of
from windlass.server.serving.deltas import Delta, Tally
from windlass.server.serving.generation import check, run
from windlass.server.serving.prompts import fill_in_of, fitted_prompt
from windlass.server.serving.response_format import sample_object
from windlass.server.serving.response_writer import AnswerOptions, Result
from windlass.server.serving.streaming import Exchange, StreamForm
from windlass.server.text.detokenizer import LineLimits
from windlass.server.text.service import Prompt

_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "return_token_ids": "return_tokens"}

_WITHOUT_A_PLACE = ("truncate_prompt_tokens", "truncation_side", "passages")

# What the fields of a sampler are where it does not count.
_NEUTRAL: dict[str, dict[str, Any]] = {
    "dry": {"dry_multiplier": 0.0},
    "top_k": {"top_k": 0},
    "typical_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
    "penalties": {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
}

_KNOWN = frozenset(SAMPLERS.values())


@dataclass(frozen=True, slots=True)
class TranslatedInfill:
    """A completion in place of the body, without its prompt, and how errors about it are told."""

    body: CompletionRequest
    names: FieldNames


def completion_of_infill(body: InfillRequest) -> TranslatedInfill:
    """The completion that fills the gap; raises ApiError naming the field."""
    for name in _WITHOUT_A_PLACE:
        if getattr(body, name) is not None:
            raise bad_request(f"{name} has no meaning beside a gap: leave it out", name)
    fields = {name: getattr(body, name) for name in SharedRequest.model_fields}
    fields["repetition_penalty"] = body.repeat_penalty
    if body.seed == -1:
        fields["seed"] = None  # llama.cpp's word for any
    for name in _left_out(body.samplers):
        fields |= _NEUTRAL[name]
    completion = CompletionRequest.model_construct(
        **fields,
        prompt="",
        max_tokens=INT32_MAX if body.n_predict == -1 else body.n_predict,
        stop=body.stop,
        return_token_ids=body.return_tokens,
    )
    return TranslatedInfill(completion, FieldNames(_NAMES, [], {}))


def line_limits_of(body: InfillRequest) -> LineLimits | None:
    """How the answer ends by its lines; None for not at all."""
    milliseconds = body.t_max_predict_ms or 0
    limits = LineLimits(body.n_indent or 0, milliseconds / 1000 if milliseconds > 0 else None)
    return None if limits == LineLimits() else limits


def _left_out(samplers: list[str] | str | None) -> Iterable[str]:
    """The samplers that do not count."""
    if samplers is None:
        return ()
    if isinstance(samplers, str):
        given = {SAMPLERS.get(letter, letter) for letter in samplers}
    else:
        given = {"typical_p" if name == "typ_p" else name for name in samplers}
    unknown = sorted(given - _KNOWN)
    if unknown:
        raise bad_request(
            f"samplers: {unknown[0][:64]!r} is not one of {', '.join(sorted(_KNOWN))}: leave it out", "samplers"
        )
    return [name for name in _NEUTRAL if name not in given]


class InfillWriter:
    """One answer, whole or in events, each of which is an object of the same kind.

    fields: those that the caller wants, as paths with slashes; None for all. truncated: whether the prompt was cut to fit.
    """

    def __init__(
        self,
        tally: Tally,
        options: AnswerOptions,
        *,
        model: str,
        fields: Sequence[str] | None,
        truncated: bool,
    ) -> None:
        self._tally = tally
        self._options = options
        self._model = model
        self._fields = fields
        self._truncated = truncated
        self._result = Result()
        self._begun = time.monotonic()
        self._first: float | None = None
        self._last = self._begun
        self._new_line = False
        self.size = 0  # bytes of what is kept

    # ---- streams -----------------------------------------------------------------------------------------------------
    def event(self, delta: Delta) -> bytes:
        """The event of one delta; empty where there is nothing to say yet."""
        self._note(delta)
        if delta.finish_reason is None:
            return _event(self._piece(delta)) if delta.text else b""
        self._result.finish_reason, self._result.stop_reason = delta.finish_reason, delta.stop_reason
        self._result.report = delta.report
        last = _event({**self._whole(), "content": "", "tokens": []})
        return _event(self._piece(delta)) + last if delta.text else last

    def last_event(self) -> bytes:
        """Nothing: the last delta's event says all."""
        return b""

    def _piece(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": 0,
            "content": delta.text,
            "tokens": list(delta.token_ids) if self._options.return_token_ids else [],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self._tally.completion_tokens,
            "tokens_evaluated": self._tally.prompt_tokens,
        }

    # ---- whole answers -----------------------------------------------------------------------------------------------
    def add(self, delta: Delta) -> None:
        """Keep what a delta brings. Raises ApiError where the answer becomes too large."""
        self._note(delta)
        self._result.add(delta)
        self.size += len(delta.text)
        if self.size > self._options.max_bytes:
            raise answer_too_large(self.size, self._options.max_bytes, grown=True)

    def pieces(self) -> list[bytes]:
        """The whole answer's JSON, once all deltas have come."""
        whole = self._whole()
        return [to_json(whole if self._fields is None else _chosen(whole, self._fields))]

    def take_prompt_logprobs(self, prompt_index: int, entries: Sequence[TokenLogprobs | None]) -> None:
        """Never asked for here."""

    # ---- parts -------------------------------------------------------------------------------------------------------
    def _note(self, delta: Delta) -> None:
        self._last = time.monotonic()
        if self._first is None and delta.token_ids:
            self._first = self._last
        self._new_line = self._new_line or "\n" in delta.text

    def _whole(self) -> dict[str, Any]:
        result, tally = self._result, self._tally
        word = result.stop_reason if isinstance(result.stop_reason, str) else ""
        stop_type = "word" if word else "limit" if result.finish_reason == "length" else "eos"
        whole: dict[str, Any] = {
            "index": 0,
            "content": result.text,
            "tokens": result.token_ids if self._options.return_token_ids else [],
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "tokens_predicted": tally.completion_tokens,
            "tokens_evaluated": tally.prompt_tokens,
            "tokens_cached": tally.cached_tokens,
            "has_new_line": self._new_line,
            "truncated": self._truncated,
            "stop_type": stop_type,
            "stopping_word": word,
            "timings": self._timings(),
        }
        if result.report is not None:
            whole["rotary"] = sample_object(result.report, None)
        return whole

    def _timings(self) -> dict[str, Any]:
        tally = self._tally
        first = self._last if self._first is None else self._first
        computed, behind = tally.prompt_tokens - tally.cached_tokens, max(tally.completion_tokens - 1, 0)
        reading, writing = 1000 * (first - self._begun), 1000 * (self._last - first)
        return {
            "cache_n": tally.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": reading,
            "prompt_per_token_ms": _ratio(reading, computed),
            "prompt_per_second": _ratio(1000 * computed, reading),
            "predicted_n": tally.completion_tokens,
            "predicted_ms": writing,
            "predicted_per_token_ms": _ratio(writing, behind),
            "predicted_per_second": _ratio(1000 * behind, writing),
        }


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + to_json(payload) + b"\n\n"


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0


def _chosen(whole: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The fields that paths name, under these; paths to nothing are left out."""
    chosen: dict[str, Any] = {}
    for path in fields:
        found: Any = whole
        for name in path.split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            chosen[path] = found
    return chosen


router = APIRouter(tags=["Fill-in-the-middle"])


@router.post(
    "/infill",
    openapi_extra=body_of(InfillRequest),
    responses=answers(Infill, events=InfillEvent, errors=GENERATION_ERRORS, done=False),
)
async def infill(request: Request) -> Response:
    """Fill the gap between two texts, in the form of llama.cpp's server, which editors' plugins speak."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, InfillRequest, stall_seconds=state.settings.body_stall_seconds)
    if body.request_id is not None:
        set_request_id(request.scope, body.request_id)
    state.check_model(body.model)
    info = state.admit(caller_of(request))
    translated = completion_of_infill(body)
    with translated.names.told():
        job = check(
            state,
            translated.body,
            info,
            request_id=request_id(request.scope),
            caller=caller_of(request),
            arrival=arrival,
            default_max_tokens=state.settings.default_max_tokens,
            logprobs=None,
            chat=False,
            line_limits=line_limits_of(body),
        )
    fill_in_of(job, "input_prefix")

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        with translated.names.told():
            fitted = await fitted_prompt(job, body)

            def make_writer(prompts: Sequence[Prompt], tally: Tally) -> InfillWriter:
                return InfillWriter(
                    tally,
                    job.options,
                    model=job.model_name,
                    fields=body.response_fields,
                    truncated=fitted.truncated,
                )

            await run(exchange, job, [fitted.prompt], param="input_prefix", make_writer=make_writer)

    return Exchange(state, work, deadline=job.deadline, form=StreamForm(done=b""))
