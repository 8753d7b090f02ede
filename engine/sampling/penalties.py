"""What one sequence's sampling parameters do to its row of logits, with the token counts kept from step to step.

Responsible for masks, biases and penalties of a single sequence. Per step it looks only at the tokens that are new, so
its Python work does not grow with the context. It draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.engine.api.request import SamplingParams
from windlass.engine.scheduling.plan import SampleSlot
from windlass.kernels.cpu import Draw


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
        self._vocab_size = vocab_size
        self._allowed = None if sampling.allowed_token_ids is None else self._ids(sampling.allowed_token_ids)
        self._others: Tensor | None = None  # [V] bool, True where `_allowed` says nothing; made when first needed
        self._allowed_now: Tensor | None = None  # kept for `describe`, as is the next
        self._forbidden_now: tuple[tuple[int, ...], Tensor] = ((), self._ids(()))
        bias = sampling.logit_bias or {}
        self._bias_ids = self._ids(tuple(bias))
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._bad_tokens = tuple(word[0] for word in sampling.bad_words if len(word) == 1)
        self._bad_phrases = [list(word) for word in sampling.bad_words if len(word) > 1]
        self._counts = TokenCounts(device) if penalises(sampling) else None

    def apply(self, row: Tensor, slot: SampleSlot, mask: Tensor | None) -> None:
        """Change a row [V] float32 in place. mask: [V] bool, True where a token is allowed (a grammar), or None.

        Order: masks, logit_bias, repetition, frequency and presence penalties. A masked token stays -inf throughout.
        """
        if self._allowed is not None:
            if self._others is None:
                self._others = torch.ones(self._vocab_size, dtype=torch.bool, device=self._device)
                self._others[self._allowed] = False
            row.masked_fill_(self._others, -math.inf)
        if mask is not None:
            row.masked_fill_(~mask.to(self._device), -math.inf)
        forbidden = self._forbidden(slot)
        if len(forbidden):
            row.index_fill_(0, forbidden, -math.inf)
        if len(self._bias_ids):
            row.index_add_(0, self._bias_ids, self._bias)
        if self._counts is not None:
            self._counts.update(slot.token_ids, slot.num_prompt_tokens)
            self._penalise(row, self._counts)

    def describe(self, draw: Draw, slot: SampleSlot, mask: Tensor | None) -> None:
        """Tell a compiled draw what `apply` would do to its row. The memory it is given is kept until the next call."""
        self._allowed_now = self._allowed
        if mask is not None:
            allowed = mask.nonzero().squeeze(1) if self._allowed is None else self._allowed[mask[self._allowed]]
            self._allowed_now = allowed.contiguous()
        if self._allowed_now is None:
            draw.allowed, draw.num_allowed = None, 0
        else:  # an empty tensor may have no address, which would allow all
            draw.allowed, draw.num_allowed = self._allowed_now.data_ptr() or 8, len(self._allowed_now)
        forbidden = self._forbidden(slot)
        draw.forbidden, draw.num_forbidden = forbidden.data_ptr(), len(forbidden)
        draw.biased, draw.bias, draw.num_biased = self._bias_ids.data_ptr(), self._bias.data_ptr(), len(self._bias_ids)
        sampling = self.sampling
        draw.repetition, draw.frequency = sampling.repetition_penalty, sampling.frequency_penalty
        draw.presence = sampling.presence_penalty
        if self._counts is not None:
            self._counts.update(slot.token_ids, slot.num_prompt_tokens)
            ids, in_output = self._counts.tensors()
            draw.counted, draw.in_output, draw.num_counted = ids.data_ptr(), in_output.data_ptr(), len(ids)

    def _forbidden(self, slot: SampleSlot) -> Tensor:
        """Ids masked now: single bad words, the last token of every word whose beginning stands at the end of the text
        (prompt included), and the ids that end it while it is too short."""
        too_short = len(slot.token_ids) - slot.num_prompt_tokens < self.sampling.min_tokens
        ids = (*self._bad_tokens, *self._completions(slot.token_ids), *(slot.stop_ids if too_short else ()))
        if ids != self._forbidden_now[0]:
            self._forbidden_now = (ids, self._ids(ids))
        return self._forbidden_now[1]

    def _completions(self, token_ids: Sequence[int]) -> list[int]:
        found = []
        for phrase in self._bad_phrases:
            begun = phrase[:-1]
            if len(token_ids) >= len(begun) and list(token_ids[-len(begun) :]) == begun:
                found.append(phrase[-1])
        return found

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
        if len(token_ids) == self._seen + 1 and self._device.type == "cpu":  # a step's token, most often
            place = self._place.get(token_ids[-1])
            if place is not None:
                self._in_output.numpy()[place] += self._seen >= num_prompt_tokens
                self._seen += 1
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
