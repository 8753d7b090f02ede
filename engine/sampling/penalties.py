"""Penalties: token counts for repetition, frequency and presence penalties, and the DRY penalty.

DRY: a token that would extend a sequence which ends the text and occurs earlier loses
multiplier * base ** (length - allowed_length), where length counts that sequence without the token, and the longest counts (p-e-w,
oobabooga/text-generation-webui pull request 5677). A sequence contains no breaker and lies within the last `last_n` tokens. The
result depends on the tokens only, not on the steps in which they arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.interface.request import MAX_REPEAT_WINDOW, RepeatPenalty, SamplingParams
from windlass.kernels import Penalties


def penalties_of(sampling: SamplingParams) -> Penalties:
    return Penalties(sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)


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


# More is taken off no logit, so that none becomes infinite by it.
MAX_DECREASE = 1e38

_BITS = MAX_REPEAT_WINDOW.bit_length()  # of a length


class DryPenalty:
    """Keeps, for every distance back, how long the text before that place equals the text's end.

    A new token lengthens the runs of the distances at which it stands, and ends the others: a step costs a few passes over at
    most `last_n` numbers. The text lies backwards, so that the token at distance d is `_text[_start + d - 1]`.
    """

    def __init__(self, settings: RepeatPenalty) -> None:
        self._settings = settings
        self._breaking = frozenset(tuple(reversed(sequence)) for sequence in settings.breaker_sequences)
        self._lengths = sorted({len(sequence) for sequence in self._breaking})
        self._last_ids = frozenset(sequence[0] for sequence in self._breaking)
        self._window = settings.last_n + max(self._lengths, default=0)  # a breaker may begin before the last tokens
        self._reset()

    def _reset(self) -> None:
        self._num_tokens = 0
        self._text: NDArray[np.int64] = np.zeros(0, np.int64)
        self._runs: NDArray[np.int32] = np.zeros(0, np.int32)  # at d - 1 the run of distance d
        self._start = 0
        self._since_breaker = 0

    def update(self, token_ids: Sequence[int]) -> None:
        """Take in what lies beyond the tokens seen before; a shorter list starts over."""
        if len(token_ids) < self._num_tokens:
            self._reset()
        if self._num_tokens == 0:
            self._load(token_ids)
        else:
            for position in range(self._num_tokens, len(token_ids)):
                self._append(token_ids[position])
        self._num_tokens = len(token_ids)

    def decreases(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(ids, what each loses), each id once."""
        s = self._settings
        distances = min(self._size, s.last_n) - 1
        if distances < 1 or self._since_breaker < s.allowed_length:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        found = np.flatnonzero(self._runs[:distances] >= s.allowed_length)
        # A sequence reaches back no further than the last `last_n` tokens do, nor than the last breaker.
        lengths = np.minimum(self._runs[found], s.last_n - 1 - found)
        lengths = np.minimum(lengths, self._since_breaker)
        ids = self._text[self._start + found]
        allowed = lengths >= s.allowed_length
        if not allowed.all():
            ids, lengths = ids[allowed], lengths[allowed]
        # Sorted by id and then by length: the last of each id has its longest.
        both = np.sort(ids << _BITS | lengths)
        distinct = both >> _BITS
        last = np.append(distinct[1:] != distinct[:-1], True)[: len(both)]
        distinct, longest = distinct[last], both[last] & (1 << _BITS) - 1
        if s.breaker_ids:
            others = [token not in s.breaker_ids for token in distinct.tolist()]
            distinct, longest = distinct[others], longest[others]
        with np.errstate(over="ignore"):
            amounts = s.multiplier * np.float64(s.base) ** (longest - s.allowed_length)
        return distinct, np.minimum(amounts, MAX_DECREASE).astype(np.float32)

    @property
    def _size(self) -> int:
        return len(self._text) - self._start

    def _load(self, token_ids: Sequence[int]) -> None:
        self._grow(token_ids[-self._window :])
        text = self._text[self._start :]
        size = min(len(text), self._settings.last_n)
        self._runs[:] = 0
        if size:
            self._runs[: size - 1] = _runs(text[:size])
        ends = self._settings.breaker_ids | self._last_ids
        places = (i for i, token in enumerate(text[:size].tolist()) if token in ends) if ends else iter(())
        self._since_breaker = next((i for i in places if self._breaks(text, i)), len(token_ids))

    def _append(self, token: int) -> None:
        if self._start == 0:
            self._grow(self._text[: self._window][::-1])
        distances = min(self._size, self._settings.last_n - 1)
        runs = self._runs[:distances]
        runs += 1
        runs *= self._text[self._start : self._start + distances] == token
        self._start -= 1
        self._text[self._start] = token
        ended = self._breaks(self._text, self._start)
        self._since_breaker = 0 if ended else self._since_breaker + 1

    def _grow(self, kept: Sequence[int] | NDArray[np.int64]) -> None:
        """Hold these tokens, in the order of the text, with at least as much room before them, so that moves are rare."""
        self._text = np.zeros(2 * max(len(kept), 128), np.int64)
        self._start = len(self._text) - len(kept)
        self._text[self._start :] = np.asarray(kept, np.int64)[::-1]
        runs = np.zeros(min(len(self._text), self._settings.last_n), np.int32)
        runs[: min(len(runs), len(self._runs))] = self._runs[: len(runs)]
        self._runs = runs

    def _breaks(self, text: NDArray[np.int64], at: int) -> bool:
        """Whether a breaker ends with the token at a place of the text as it lies here."""
        token = int(text[at])
        if token in self._settings.breaker_ids:
            return True
        if token not in self._last_ids:
            return False
        return any(tuple(map(int, text[at : at + length])) in self._breaking for length in self._lengths)


def _runs(backwards: NDArray[np.int64]) -> list[int]:
    """For every distance from 1 on, how many tokens from there on equal those from the beginning on (the Z-function).

    Looks only at the places of the first token, for the others' runs are 0.
    """
    text = backwards.tolist()
    runs = [0] * len(text)
    left = right = 0  # the known run that reaches furthest
    for place in (np.flatnonzero(backwards[1:] == text[0]) + 1).tolist():
        length = min(right - place, runs[place - left]) if place < right else 0
        while place + length < len(text) and text[length] == text[place + length]:
            length += 1
        runs[place] = length
        if place + length > right:
            left, right = place, place + length
    return runs[1:]
