"""What one sequence's sampling parameters do to its row of logits, with the token counts kept from step to step.

Responsible for masks, biases and penalties of a single sequence. Per step it looks only at the tokens that are new, so
its Python work does not grow with the context. It draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.engine.request import SamplingParams
from windlass.engine.schedule import SampleSlot


def changes_logits(sampling: SamplingParams) -> bool:
    """Whether a row needs a LogitsProcessor at all (min_tokens aside, which ends by itself)."""
    return bool(
        sampling.logit_bias or sampling.allowed_token_ids is not None or sampling.bad_words or penalises(sampling)
    )


def penalises(sampling: SamplingParams) -> bool:
    """Whether a row depends on counts of the tokens before it, which are kept from row to row."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


class LogitsProcessor:
    """Masks, biases and penalties of one sequence, applied to its row in place."""

    def __init__(self, slot: SampleSlot, vocab_size: int, device: torch.device) -> None:
        self.sampling = sampling = slot.sampling
        self._device = device
        self._forbidden: Tensor | None = None
        if sampling.allowed_token_ids is not None:
            self._forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self._forbidden[self._ids(sampling.allowed_token_ids)] = False
        self._stop_ids = self._ids(slot.stop_ids)
        bias = sampling.logit_bias or {}
        self._bias_ids = self._ids(tuple(bias))
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._bad_tokens = self._ids(tuple(word[0] for word in sampling.bad_words if len(word) == 1))
        self._bad_phrases = [list(word) for word in sampling.bad_words if len(word) > 1]
        self._counts = TokenCounts(device) if penalises(sampling) else None

    def apply(self, row: Tensor, slot: SampleSlot, mask: Tensor | None) -> None:
        """Change a row [V] float32 in place. mask: [V] bool, True where a token is allowed (a grammar), or None.

        Order: masks, logit_bias, repetition, frequency and presence penalties. A masked token stays -inf throughout.
        """
        if self._forbidden is not None:
            row.masked_fill_(self._forbidden, -math.inf)
        if mask is not None:
            row.masked_fill_(~mask.to(self._device), -math.inf)
        self._mask_bad_words(row, slot.token_ids)
        if len(slot.token_ids) - slot.num_prompt_tokens < self.sampling.min_tokens and len(self._stop_ids):
            row.index_fill_(0, self._stop_ids, -math.inf)
        if len(self._bias_ids):
            row.index_add_(0, self._bias_ids, self._bias)
        if self._counts is not None:
            self._counts.update(slot.token_ids, slot.num_prompt_tokens)
            self._penalise(row, self._counts)

    def _mask_bad_words(self, row: Tensor, token_ids: Sequence[int]) -> None:
        """Mask the last token of every word whose beginning stands at the end of the text (prompt included)."""
        if len(self._bad_tokens):
            row.index_fill_(0, self._bad_tokens, -math.inf)
        for phrase in self._bad_phrases:
            begun = phrase[:-1]
            if len(token_ids) >= len(begun) and list(token_ids[-len(begun) :]) == begun:
                row[phrase[-1]] = -math.inf

    def _penalise(self, row: Tensor, counts: TokenCounts) -> None:
        """Repetition over prompt and output (arXiv 1909.05858, as transformers and vLLM), then the two over output."""
        ids, in_output = counts.tensors()
        if not len(ids):
            return
        sampling = self.sampling
        scores = row[ids]
        if sampling.repetition_penalty != 1:
            penalty = sampling.repetition_penalty
            scores = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores -= sampling.frequency_penalty * in_output
        scores -= sampling.presence_penalty * (in_output > 0)
        row.index_copy_(0, ids, scores)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)


class TokenCounts:
    """The distinct tokens of one sequence and how often its output holds each, fed by what is new in `token_ids`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_over()

    def _start_over(self) -> None:
        self._place: dict[int, int] = {}
        self._seen = 0
        self._used = 0
        self._ids = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._in_output = torch.zeros(0, dtype=torch.float32, device=self._device)

    def update(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Count what lies beyond the tokens counted before; a shorter list starts over."""
        if len(token_ids) < self._seen:
            self._start_over()
        if len(token_ids) == self._seen:
            return
        added: dict[int, int] = {}
        for position in range(self._seen, len(token_ids)):
            token = token_ids[position]
            added[token] = added.get(token, 0) + (position >= num_prompt_tokens)
        self._seen = len(token_ids)
        fresh = [token for token in added if token not in self._place]
        if fresh:
            self._place.update(zip(fresh, range(self._used, self._used + len(fresh)), strict=True))
            self._reserve(self._used + len(fresh))
            self._ids[self._used : self._used + len(fresh)] = torch.tensor(fresh, device=self._device)
            self._used += len(fresh)
        places = torch.tensor([self._place[token] for token in added], device=self._device)
        counts = torch.tensor(list(added.values()), dtype=torch.float32, device=self._device)
        self._in_output.index_add_(0, places, counts)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(distinct token ids [n] int64, their number in the output [n] float32)."""
        return self._ids[: self._used], self._in_output[: self._used]

    def _reserve(self, size: int) -> None:
        """Grow by doubling, so that adding tokens one by one stays cheap."""
        if size <= len(self._ids):
            return
        extra = max(size, 2 * len(self._ids), 64) - len(self._ids)
        self._ids = torch.cat((self._ids, self._ids.new_zeros(extra)))
        self._in_output = torch.cat((self._in_output, self._in_output.new_zeros(extra)))
