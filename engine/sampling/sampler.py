"""Turns logits into tokens for every sample of a step.

Responsible for the order of things: log-probabilities from the raw logits, penalties, the draw, and for keeping one
request's trouble away from the others. The arithmetic is the backend's; of the scheduler it knows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.engine.api.request import TokenLogprobs
from windlass.engine.errors import EngineError, RequestError
from windlass.engine.sampling.grammar.masks import GrammarMasks
from windlass.engine.sampling.logprobs import BAD_LOGITS, token_logprobs
from windlass.engine.sampling.penalties import changes_logits
from windlass.engine.sampling.prepared_draws import SamplingState
from windlass.engine.sampling.slot import SampleSlot
from windlass.engine.scheduling.plan import StepResult
from windlass.kernels import Backend, SamplingStatus

__all__ = ["SampledToken", "Sampler", "token_logprobs"]

_NO_TOKEN_LEFT = (
    "no token is left to draw: the allowed ids, the grammar, bad_words, min_tokens and penalties of this request "
    "exclude everything, or the grammar has become too complex to follow"
)
_ERRORS: dict[int, str] = {
    SamplingStatus.BAD_LOGITS: BAD_LOGITS,
    SamplingStatus.NOTHING_LEFT: _NO_TOKEN_LEFT,
    SamplingStatus.NO_SUCH_ID: "this request names a token id outside the vocabulary",
}


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one slot drew. error: set when nothing could be drawn for it; then token_id is -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: EngineError | None = None


def is_greedy(slot: SampleSlot) -> bool:
    """Whether what it draws is the largest logit as it comes from the model."""
    sampling = slot.sampling
    if sampling.temperature > 0 or len(slot.token_ids) - slot.num_prompt_tokens < sampling.min_tokens:
        return False
    return not changes_logits(sampling)


def uses_filters_only(slot: SampleSlot) -> bool:
    """Whether its draws follow from its logits and `Filters` alone, from the next one on, by numbers that are known before."""
    sampling = slot.sampling
    if len(slot.token_ids) - slot.num_prompt_tokens < sampling.min_tokens or sampling.logprobs is not None:
        return False
    return sampling.typical_p >= 1 and sampling.xtc_probability <= 0 and not changes_logits(sampling)


def multi_step_result(seq_id: int, tokens: Sequence[int], statuses: Sequence[int]) -> StepResult:
    """What a sequence's passes drew, as far as they count. statuses: a `SamplingStatus` of each."""
    count = next((i for i, status in enumerate(statuses) if status != SamplingStatus.OK), len(tokens))
    if count == 0:
        return StepResult(seq_id, error=_failure(_ERRORS.get(statuses[0])))
    return StepResult(seq_id, tuple(tokens[:count]))  # what fails after drawn tokens fails again when those are out


def _failure(message: str | None) -> EngineError:
    """The request's own fault unless the model's numbers are none."""
    if message is None or message == BAD_LOGITS:
        return EngineError(BAD_LOGITS)
    return RequestError(message, None, "no_token_left")


class Sampler:
    """Keeps the penalty counts and settings of live sequences between steps; call `forget` as they end.

    masks: of the samples that have a grammar; without it no sample may have one.
    """

    def __init__(self, vocab_size: int, backend: Backend, masks: GrammarMasks | None = None) -> None:
        self._vocab_size, self._backend, self._masks = vocab_size, backend, masks
        self._sampling_state = SamplingState(vocab_size, backend, masks)

    @property
    def num_tracked(self) -> int:
        """Sequences with state held here."""
        return len(self._sampling_state)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence; unknown ids are ignored."""
        self._sampling_state.forget(seq_id)
        if self._masks is not None:
            self._masks.forget(seq_id)

    def prepare(self, slots: Sequence[SampleSlot]) -> None:
        """Say which slots the next rows are for, before there are logits: the masks of grammars are made meanwhile."""
        if self._masks is not None:
            self._masks.prepare([slot for slot in slots if slot.sampling.grammar is not None])

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[tuple[int, SampleSlot]],
        maxima: tuple[Tensor, Tensor] | None = None,
    ) -> list[SampledToken]:
        """Draw one token per slot.

        logits: [R, V] float32, left unchanged. slots: (row of logits, slot); several slots may share a row. maxima: the
        logits' `Backend.row_maxima`, if known.
        A row with NaN or +inf, or one with every token forbidden, gives a Drawn with an error and touches no other slot.
        """
        if not slots:
            return []
        if logits.shape[1] != self._vocab_size:
            raise ValueError(f"logits have {logits.shape[1]} columns, the vocabulary {self._vocab_size}")
        if logits.dtype != torch.float32:
            logits = logits.float()
        tokens: list[int | None]
        errors: list[str | None]
        if all(is_greedy(slot) for _, slot in slots):
            best_ids, highest = (found.tolist() for found in maxima or self._backend.row_maxima(logits))
            tokens = [best_ids[row] if math.isfinite(highest[row]) else None for row, _ in slots]
            errors = [None] * len(slots)
        else:
            drawn = self._sampling_state.sample(logits, slots)
            tokens = [token if status == SamplingStatus.OK else None for token, status in drawn]
            errors = [_ERRORS.get(status) for _, status in drawn]
        found = self._logprobs(logits, slots, tokens)
        return [
            SampledToken(-1, None, _failure(error)) if token is None else SampledToken(token, found.get(i))
            for i, (token, error) in enumerate(zip(tokens, errors, strict=True))
        ]

    def _logprobs(
        self, logits: Tensor, slots: Sequence[tuple[int, SampleSlot]], tokens: Sequence[int | None]
    ) -> dict[int, TokenLogprobs]:
        """Log-probabilities of the drawn tokens where asked for, by slot."""
        asked = [i for i, (_, slot) in enumerate(slots) if slot.sampling.logprobs is not None and tokens[i] is not None]
        if not asked:
            return {}
        widths = [slots[i][1].sampling.logprobs or 0 for i in asked]
        rows = torch.tensor([slots[i][0] for i in asked])
        targets = torch.tensor([tokens[i] or 0 for i in asked])
        found = token_logprobs(self._backend, logits, targets, max(widths), rows)
        return {
            i: TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top[:width])
            for i, entry, width in zip(asked, found, widths, strict=True)
        }
