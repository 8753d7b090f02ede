"""Answers of `/infill`, in llama.cpp's form."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.answers.base import AnswerOptions, Result
from windlass.server.answers.rotary_layouts import sample_object
from windlass.server.errors import answer_too_large
from windlass.server.generation.deltas import Delta, Tally


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
