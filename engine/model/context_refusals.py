"""Which contexts a model cannot have, as far as its description tells, and why. Imports no torch."""

from __future__ import annotations

from typing import TypedDict

from windlass.engine.model.spec import ModelSpec

_BIDIRECTIONAL = "every token of this model sees the whole text, of which none can be left out"
_CHUNKS = "layers of this model see chunks that begin at fixed positions, so that none of its tokens can move"
_LEARNED = "the positions of this model are learned and part of every key and value, none of which can move"
_SINKS = (
    "scores of this model lose by the distance of their keys, so that it would see nothing of tokens kept from far away"
)
_STATES = (
    "layers of this model carry a state from token to token, which is none of a passage alone: what it has read counts for one "
    "place only"
)


class ContextRefusals(TypedDict):
    """The fields of `ContextSizes` and `ModelInfo` that say so; None where nothing is against it."""

    shift_refusal: str | None
    reuse_refusal: str | None
    window_refusal: str | None
    sinks_refusal: str | None


def context_refusals(spec: ModelSpec) -> ContextRefusals:
    """Why no sequence of this model may drop tokens, take up passages that stood elsewhere, have an attention window, or sinks
    beside it."""
    bidirectional = _BIDIRECTIONAL if spec.is_bidirectional else None
    chunks = _CHUNKS if spec.has_chunked_attention else None
    fixed = bidirectional or chunks or (_LEARNED if spec.positions else None)
    return ContextRefusals(
        shift_refusal=fixed,
        reuse_refusal=fixed or (None if spec.state_group is None else _STATES),
        window_refusal=bidirectional or chunks,
        sinks_refusal=bidirectional or chunks or (_SINKS if spec.uses_alibi else None),
    )
