"""Sampler: logits to tokens for every sample of a step.

Order: log-probabilities from the raw logits, penalties, sampling. One request's error does not affect the others. The backend
computes; settings are written once per sequence, and a step adds the row, the uniform number and the logits processor's changes.
Random numbers are functions of seed, sample index and position only, so neither preemption nor batching changes a token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.engine.errors import EngineError, NotFiniteError, RequestError
from windlass.engine.interface.outputs import TokenLogprobs
from windlass.engine.interface.request import SamplingParams
from windlass.engine.sampling.grammar import GrammarMasks
from windlass.engine.sampling.logits_processor import LogitsProcessor, changes_logits
from windlass.engine.sampling.penalties import penalties_of
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.scheduling.scheduler_output import StepResult
from windlass.kernels import Backend, Filters, SamplingRow, SamplingStatus

_NO_TOKEN_LEFT = (
    "no token is left to draw: the allowed ids, the grammar, bad_words, min_tokens and penalties of this request "
    "exclude everything, or the grammar has become too complex to follow"
)

BAD_LOGITS = (
    "the model produced NaN or infinite logits for this request: its adapter, its rotary scaling or the model's weights let "
    "numbers overflow; use others"
)

_ERRORS: dict[int, str] = {
    SamplingStatus.BAD_LOGITS: BAD_LOGITS,
    SamplingStatus.NOTHING_LEFT: _NO_TOKEN_LEFT,
    SamplingStatus.NO_SUCH_ID: "this request names a token id outside the vocabulary",
}


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token of one slot. error: set if none could be sampled; then token_id is -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: EngineError | None = None


def is_greedy(slot: SampleSlot) -> bool:
    """Whether its next token is the largest of the model's logits, unchanged."""
    sampling = slot.sampling
    if sampling.temperature > 0 or len(slot.token_ids) - slot.num_prompt_tokens < sampling.min_tokens:
        return False
    return not changes_logits(sampling)


def uses_filters_only(slot: SampleSlot) -> bool:
    """Whether its next tokens depend only on logits, `Filters` and uniform numbers, which are known in advance."""
    sampling = slot.sampling
    if len(slot.token_ids) - slot.num_prompt_tokens < sampling.min_tokens or sampling.logprobs is not None:
        return False
    return sampling.typical_p >= 1 and sampling.xtc_probability <= 0 and not changes_logits(sampling)


def multi_step_result(seq_id: int, tokens: Sequence[int], statuses: Sequence[int]) -> StepResult:
    """The result of a sequence's passes up to the first failed one. statuses: a `SamplingStatus` of each."""
    count = next((i for i, status in enumerate(statuses) if status != SamplingStatus.OK), len(tokens))
    if count == 0:
        return StepResult(seq_id, error=_failure(_ERRORS.get(statuses[0])))
    # An error after sampled tokens is dropped: it occurs again in the next step, after these are returned.
    return StepResult(seq_id, tuple(tokens[:count]))


def _failure(message: str | None) -> EngineError:
    """The error of a request; its own fault unless the logits are bad."""
    if message is None or message == BAD_LOGITS:
        return NotFiniteError(BAD_LOGITS)
    return RequestError(message, None, "no_token_left")


@dataclass(slots=True)
class _SequenceState:
    """State of a sequence between steps. call: the last call that used it, as slots of one call must not share it."""

    slot: SampleSlot
    row: SamplingRow
    processor: LogitsProcessor | None
    call: int = -1


class Sampler:
    """Samples tokens, and holds the settings and token counts of live sequences between steps; call `forget` as they end.

    masks: of the samples that have a grammar; None if no sample may have one.
    """

    def __init__(self, vocab_size: int, backend: Backend, masks: GrammarMasks | None = None) -> None:
        self._vocab_size, self._backend, self._masks = vocab_size, backend, masks
        self._token_sampler = backend.token_sampler(vocab_size)
        self._states: dict[int, _SequenceState] = {}
        self._num_calls = 0

    @property
    def num_tracked(self) -> int:
        """Number of sequences with state."""
        return len(self._states)

    def forget(self, seq_id: int) -> None:
        """Drop the state of a sequence; unknown ids are ignored."""
        self._states.pop(seq_id, None)
        if self._masks is not None:
            self._masks.forget(seq_id)

    def prepare(self, slots: Sequence[SampleSlot]) -> None:
        """Start to compute the grammar masks of the next rows, before their logits are known."""
        if self._masks is not None:
            self._masks.prepare([slot for slot in slots if slot.sampling.grammar is not None])

    def sample(
        self, logits: Tensor, slots: Sequence[tuple[int, SampleSlot]], maxima: tuple[Tensor, Tensor] | None = None
    ) -> list[SampledToken]:
        """Sample one token per slot.

        logits: [R, V] float32, left unchanged. slots: (row of logits, slot); several slots may share a row. maxima: the
        logits' `Backend.row_maxima`, if known.
        A row with NaN or +inf, or with every token forbidden, gives a SampledToken with an error and affects no other slot.
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
            sampled = self._sample(logits, slots)
            tokens = [token if status == SamplingStatus.OK else None for token, status in sampled]
            errors = [_ERRORS.get(status) for _, status in sampled]
        found = self._logprobs(logits, slots, tokens)
        return [
            SampledToken(-1, None, _failure(error)) if token is None else SampledToken(token, found.get(i))
            for i, (token, error) in enumerate(zip(tokens, errors, strict=True))
        ]

    def _sample(self, logits: Tensor, slots: Sequence[tuple[int, SampleSlot]]) -> list[tuple[int, int]]:
        """(token id, or -1; `SamplingStatus`) of each slot."""
        self._num_calls += 1
        rows = []
        for logits_row, slot in slots:
            state = self._state(slot)
            row = state.row
            row.row = logits_row
            position = len(slot.token_ids) - slot.num_prompt_tokens
            if slot.sampling.temperature > 0:
                row.uniform = uniform(slot.seed, slot.index, position)
                if slot.sampling.xtc_probability > 0:
                    excludes = xtc_uniform(slot.seed, slot.index, position) < slot.sampling.xtc_probability
                    row.exclude_from = slot.sampling.xtc_threshold if excludes else 1.0
            if state.processor is None and position < slot.sampling.min_tokens:
                state.processor = LogitsProcessor(slot, self._backend.device)
            if state.processor is not None:
                masks = None if slot.sampling.grammar is None else self._masks
                row.change(state.processor.changes(slot, None if masks is None else masks.mask(slot)))
            rows.append(row)
        self._token_sampler.sample(logits, rows)
        return [(row.token, row.status) for row in rows]

    def _state(self, slot: SampleSlot) -> _SequenceState:
        state = self._states.get(slot.seq_id)
        if state is not None and state.call == self._num_calls:
            return self._new_state(slot)  # another slot of the sequence in this call
        if state is None:
            state = self._states[slot.seq_id] = self._new_state(slot)
        elif state.slot is not slot:
            same = state.slot.sampling is slot.sampling or state.slot.sampling == slot.sampling
            if not same or state.slot.stop_ids != slot.stop_ids:
                state = self._states[slot.seq_id] = self._new_state(slot)
            state.slot = slot
        state.call = self._num_calls
        return state

    def _new_state(self, slot: SampleSlot) -> _SequenceState:
        sampling = slot.sampling
        row = self._token_sampler.new(filters_of(sampling, self._vocab_size), penalties_of(sampling))
        processor = LogitsProcessor(slot, self._backend.device) if changes_logits(sampling) else None
        return _SequenceState(slot, row, processor)

    def _logprobs(
        self, logits: Tensor, slots: Sequence[tuple[int, SampleSlot]], tokens: Sequence[int | None]
    ) -> dict[int, TokenLogprobs]:
        """Log-probabilities of the sampled tokens where requested, by slot."""
        requested = [
            i for i, (_, slot) in enumerate(slots) if slot.sampling.logprobs is not None and tokens[i] is not None
        ]
        if not requested:
            return {}
        widths = [slots[i][1].sampling.logprobs or 0 for i in requested]
        rows = torch.tensor([slots[i][0] for i in requested])
        targets = torch.tensor([tokens[i] or 0 for i in requested])
        found = token_logprobs(self._backend, logits, targets, max(widths), rows)
        return {
            i: TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top[:width])
            for i, entry, width in zip(requested, found, widths, strict=True)
        }


def filters_of(sampling: SamplingParams, vocab_size: int) -> Filters:
    """The filters of its rows, without the exclusion of top choices (XTC), which varies from token to token."""
    s = sampling
    return Filters(s.temperature, s.min_p, s.top_k if s.top_k < vocab_size else 0, s.top_p, s.typical_p)


def token_logprobs(
    backend: Backend, logits: Tensor, targets: Tensor, k: int, rows: Tensor | None = None
) -> list[TokenLogprobs]:
    """Log-probabilities of each row's target and of its k most likely tokens.

    logits: [R, V]. targets: [N] int64. rows: [N] int64, the row of each target; None: all R in order. k: 0 .. V. The rank
    is 1 plus the number of tokens with a strictly larger logit; equal alternatives are sorted by id. Raises NotFiniteError
    if a row holds NaN or +inf.
    """
    if rows is None:
        rows = torch.arange(len(targets))
    found = backend.token_logprobs(logits.float(), rows, targets, min(k, logits.shape[1]))
    ranks: list[int] = found.ranks.tolist()
    if 0 in ranks:
        raise NotFiniteError(BAD_LOGITS)
    tops = zip(found.top_ids.tolist(), found.top.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(*top, strict=True)))
        for token, logprob, rank, top in zip(targets.tolist(), found.chosen.tolist(), ranks, tops, strict=True)
    ]


def uniform(seed: int, index: int, position: int, purpose: bytes = b"") -> float:
    """A number in [0, 1) that is a function of its arguments alone: 53 bits of BLAKE2b over them.

    position: tokens sampled before. Neither preemption nor batching can therefore change a token.
    """
    digest = hashlib.blake2b(b"%d:%d:%d" % (seed, index, position), digest_size=8, person=purpose).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def xtc_uniform(seed: int, index: int, position: int) -> float:
    """The number that decides whether top choices are excluded; independent of the one that samples the token."""
    return uniform(seed, index, position, b"exclusion")
