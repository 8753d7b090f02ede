"""What one sequence's sampling parameters do to its row of logits, with the token counts kept from step to step.

Responsible for what is forbidden, biased and penalised in a single sequence. Per step it looks only at the tokens that are
new, so its Python work does not grow with the context; repeats cost a few passes over a bounded window. It changes no logits
and draws nothing: a backend does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.engine.api.request import SamplingParams
from windlass.engine.sampling.grammar.mask import GrammarMask
from windlass.engine.sampling.repeats import DryPenalty
from windlass.engine.sampling.slot import SampleSlot
from windlass.engine.sampling.thinking import forced_token
from windlass.kernels import LogitsChanges, Penalties


def changes_logits(sampling: SamplingParams) -> bool:
    """Whether a row needs a LogitsProcessor at all (min_tokens aside, which ends by itself)."""
    return bool(
        sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.thinking is not None
        or sampling.grammar is not None
        or uses_penalties(sampling)
    )


def uses_penalties(sampling: SamplingParams) -> bool:
    """Whether a row depends on what is kept of the tokens before it from row to row."""
    return _counts(sampling) or sampling.repeats is not None


def _counts(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def penalties_of(sampling: SamplingParams) -> Penalties:
    return Penalties(sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)


class LogitsProcessor:
    """Forbidden ids, biases and penalties of one sequence."""

    def __init__(self, slot: SampleSlot, device: torch.device) -> None:
        self._sampling = sampling = slot.sampling
        self._device = device
        self._allowed = None if sampling.allowed_token_ids is None else self._ids(sampling.allowed_token_ids)
        self._nothing, self._no_numbers = self._ids(()), torch.zeros(0, device=device)
        self._forbidden_now: tuple[tuple[int, ...], Tensor] = ((), self._nothing)
        bias = sampling.logit_bias or {}
        self._bias_ids = self._ids(tuple(bias))
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._bad_tokens = tuple(word[0] for word in sampling.bad_words if len(word) == 1)
        self._bad_phrases = [list(word) for word in sampling.bad_words if len(word) > 1]
        self._counts = TokenCounts(device) if _counts(sampling) else None
        self._repeats = None if sampling.repeats is None else DryPenalty(sampling.repeats)

    def changes(self, slot: SampleSlot, mask: GrammarMask | None = None) -> LogitsChanges:
        """What is to be done to the slot's row of logits now. The tensors are those of the next call too. mask: its grammar's."""
        counted, in_output = self._nothing, self._no_numbers
        if self._counts is not None:
            self._counts.update(slot.token_ids, slot.num_prompt_tokens)
            counted, in_output = self._counts.tensors()
        decreased, decrease = self._nothing, self._no_numbers
        if self._repeats is not None:
            self._repeats.update(slot.token_ids)
            ids, amounts = self._repeats.decreases()
            decreased, decrease = torch.from_numpy(ids).to(self._device), torch.from_numpy(amounts).to(self._device)
        allowed, forbidden = self._allowed, self._forbidden(slot, complete=mask is not None and mask.complete)
        if (budget := self._sampling.thinking) is not None:
            forced = forced_token(budget, slot.token_ids, slot.num_prompt_tokens)
            # A grammar may want a character finished first.
            if forced is not None and (mask is None or mask.allows(forced)):
                allowed, forbidden = self._ids((forced,)), self._nothing
        bias_ids, bias = self._bias_ids, self._bias
        bits = None if mask is None else mask.bits
        return LogitsChanges(allowed, forbidden, bias_ids, bias, counted, in_output, decreased, decrease, bits)

    def _forbidden(self, slot: SampleSlot, *, complete: bool) -> Tensor:
        """Ids masked now: single bad words, the last token of every word whose beginning stands at the end of the text
        (prompt included), and the ids that end it while it is too short, unless its grammar lets nothing else follow."""
        too_short = not complete and len(slot.token_ids) - slot.num_prompt_tokens < self._sampling.min_tokens
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

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)


class TokenCounts:
    """The distinct tokens of one sequence and how often its output holds each, fed by what is new in `token_ids`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reset()

    def _reset(self) -> None:
        self._index_of: dict[int, int] = {}
        self._num_counted = 0
        self._used = 0
        self._ids = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._in_output = torch.zeros(0, dtype=torch.float32, device=self._device)

    def update(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Count what lies beyond the tokens counted before; a shorter list starts over."""
        if len(token_ids) < self._num_counted:
            self._reset()
        if len(token_ids) == self._num_counted:
            return
        if len(token_ids) == self._num_counted + 1 and self._device.type == "cpu":  # a step's token, most often
            index = self._index_of.get(token_ids[-1])
            if index is not None:
                self._in_output.numpy()[index] += self._num_counted >= num_prompt_tokens
                self._num_counted += 1
                return
        added: dict[int, int] = {}
        for position in range(self._num_counted, len(token_ids)):
            token = token_ids[position]
            added[token] = added.get(token, 0) + (position >= num_prompt_tokens)
        self._num_counted = len(token_ids)
        fresh = [token for token in added if token not in self._index_of]
        if fresh:
            self._index_of.update(zip(fresh, range(self._used, self._used + len(fresh)), strict=True))
            self._reserve(self._used + len(fresh))
            self._ids[self._used : self._used + len(fresh)] = torch.tensor(fresh, device=self._device)
            self._used += len(fresh)
        indices = torch.tensor([self._index_of[token] for token in added], device=self._device)
        counts = torch.tensor(list(added.values()), dtype=torch.float32, device=self._device)
        self._in_output.index_add_(0, indices, counts)

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
