"""Sampler: logits to tokens for every sample of a step.

Order: log-probabilities from the raw logits, penalties, sampling. One request's error does not affect the others. The arithmetic is
the backend's. Settings are written once per sequence; a step adds the row, the uniform number and the logits processor's changes.
Random numbers are functions of seed, sample index and position only, so neither preemption nor batching changes a token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.engine.errors import EngineError, RequestError
from windlass.engine.interface.outputs import TokenLogprobs
from windlass.engine.interface.request import SamplingParams
from windlass.engine.sampling.grammar import GrammarMask, GrammarMasks
from windlass.engine.sampling.logits_processor import LogitsProcessor, changes_logits
from windlass.engine.sampling.penalties import penalties_of
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.scheduling.scheduler_output import StepResult
from windlass.kernels import Backend, Filters, SamplingRow, SamplingStatus

__all__ = ["SampledToken", "Sampler", "token_logprobs"]

_NO_TOKEN_LEFT = (
    "no token is left to draw: the allowed ids, the grammar, bad_words, min_tokens and penalties of this request "
    "exclude everything, or the grammar has become too complex to follow"
)

BAD_LOGITS = "the model produced NaN or infinite logits for this request"

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


def filters_of(sampling: SamplingParams, vocab_size: int) -> Filters:
    """How its rows are narrowed, exclusions of top choices aside, which change from draw to draw."""
    s = sampling
    return Filters(s.temperature, s.min_p, s.top_k if s.top_k < vocab_size else 0, s.top_p, s.typical_p)


@dataclass(slots=True)
class _SequenceSampling:
    """call: the last call that used it, so that two slots of one sequence in one call do not share it."""

    slot: SampleSlot
    draw: SamplingRow
    processor: LogitsProcessor | None
    call: int = -1


class SamplingState:
    """Draws from rows of `vocab_size` logits. masks: of the samples that have a grammar."""

    def __init__(self, vocab_size: int, backend: Backend, masks: GrammarMasks | None) -> None:
        self._masks = masks
        self._vocab_size, self._device = vocab_size, backend.device
        self._drawer = backend.token_sampler(vocab_size)
        self._entries: dict[int, _SequenceSampling] = {}
        self._calls = 0

    def __len__(self) -> int:
        return len(self._entries)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence; unknown ids are ignored."""
        self._entries.pop(seq_id, None)

    def sample(self, logits: Tensor, slots: Sequence[tuple[int, SampleSlot]]) -> list[tuple[int, int]]:
        """(token id, or -1; `SamplingStatus`) of each slot; arguments as of `Sampler.sample`, logits float32."""
        self._calls += 1
        draws = []
        for row, slot in slots:
            entry = self._sampling_state(slot)
            one = entry.draw
            one.row = row
            drawn = len(slot.token_ids) - slot.num_prompt_tokens
            if slot.sampling.temperature > 0:
                one.uniform = uniform(slot.seed, slot.index, drawn)
                if slot.sampling.xtc_probability > 0:
                    excludes = xtc_uniform(slot.seed, slot.index, drawn) < slot.sampling.xtc_probability
                    one.exclude_from = slot.sampling.xtc_threshold if excludes else 1.0
            if entry.processor is None and drawn < slot.sampling.min_tokens:
                entry.processor = LogitsProcessor(slot, self._device)
            if entry.processor is not None:
                one.change(entry.processor.changes(slot, self._mask(slot)))
            draws.append(one)
        self._drawer.sample(logits, draws)
        return [(one.token, one.status) for one in draws]

    def _mask(self, slot: SampleSlot) -> GrammarMask | None:
        if slot.sampling.grammar is None or self._masks is None:
            return None
        return self._masks.mask(slot)

    def _sampling_state(self, slot: SampleSlot) -> _SequenceSampling:
        entry = self._entries.get(slot.seq_id)
        if entry is not None and entry.call == self._calls:
            return self._prepare(slot)  # another slot of a sequence that this call has met
        if entry is None:
            entry = self._entries[slot.seq_id] = self._prepare(slot)
        elif entry.slot is not slot:
            same = entry.slot.sampling is slot.sampling or entry.slot.sampling == slot.sampling
            if not same or entry.slot.stop_ids != slot.stop_ids:
                entry = self._entries[slot.seq_id] = self._prepare(slot)
            entry.slot = slot
        entry.call = self._calls
        return entry

    def _prepare(self, slot: SampleSlot) -> _SequenceSampling:
        s = slot.sampling
        draw = self._drawer.new(filters_of(s, self._vocab_size), penalties_of(s))
        return _SequenceSampling(slot, draw, LogitsProcessor(slot, self._device) if changes_logits(s) else None)


def token_logprobs(
    backend: Backend, logits: Tensor, targets: Tensor, k: int, rows: Tensor | None = None
) -> list[TokenLogprobs]:
    """What the model thought of each row's target and of its k most likely tokens.

    logits: [R, V]. targets: [N] int64. rows: [N] int64, the row of each target; all R in order when None. k: 0 .. V. The
    rank counts the tokens with a strictly larger logit, plus 1; equal alternatives are listed by id. Raises EngineError
    where a row holds NaN or +inf.
    """
    if rows is None:
        rows = torch.arange(len(targets))
    found = backend.token_logprobs(logits.float(), rows, targets, min(k, logits.shape[1]))
    ranks: list[int] = found.ranks.tolist()
    if 0 in ranks:
        raise EngineError(BAD_LOGITS)
    tops = zip(found.top_ids.tolist(), found.top.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(*top, strict=True)))
        for token, logprob, rank, top in zip(targets.tolist(), found.chosen.tolist(), ranks, tops, strict=True)
    ]


_XTC = b"exclusion"


def xtc_uniform(seed: int, index: int, position: int) -> float:
    """The number that decides whether top choices are excluded: another one than the draw's at the same place."""
    return _number(seed, index, position, _XTC)


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments alone: 53 bits of BLAKE2b over them.

    position counts the tokens already drawn; so neither preemption nor batching can change a draw.
    """
    return _number(seed, index, position, b"")


def _number(seed: int, index: int, position: int, purpose: bytes) -> float:
    place = b"%d:%d:%d" % (seed, index, position)
    digest = hashlib.blake2b(place, digest_size=8, person=purpose).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
