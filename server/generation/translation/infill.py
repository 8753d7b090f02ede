"""From a body of `/infill` to that of a completion: llama.cpp's names, and what it says of samplers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from windlass.server.errors import bad_request
from windlass.server.generation.translation.names import FieldNames
from windlass.server.protocol.base import INT32_MAX
from windlass.server.protocol.completions import CompletionRequest
from windlass.server.protocol.generation_request import SharedRequest
from windlass.server.protocol.infill import SAMPLERS, InfillRequest
from windlass.server.text.line_limits import LineLimits

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
