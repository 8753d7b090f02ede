"""Penalties: token counts for repetition, frequency and presence penalties, and the DRY penalty.

DRY: if a token would extend a sequence that ends the text and also occurs earlier, its logit is lowered by
multiplier * base ** (length - allowed_length). length is that of the longest such sequence, without the token (p-e-w,
oobabooga/text-generation-webui pull request 5677). A sequence contains no breaker and is part of the last `last_n` tokens. The
result depends on the tokens only, not on the steps in which they arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.interface.request import MAX_REPEAT_WINDOW, DryParams, SamplingParams
from windlass.kernels import Penalties


def penalties_of(sampling: SamplingParams) -> Penalties:
    return Penalties(sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)


class TokenCounts:
    """The distinct tokens of one sequence and their counts in its output, updated from new tokens only."""

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
        """Count tokens after those counted before. A shorter list is counted from its beginning."""
        if len(token_ids) < self._num_counted:
            self._reset()
        if len(token_ids) == self._num_counted:
            return
        if len(token_ids) == self._num_counted + 1 and self._device.type == "cpu":  # the usual step
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
        new = [token for token in added if token not in self._index_of]
        if new:
            end = self._used + len(new)
            self._index_of.update(zip(new, range(self._used, end), strict=True))
            self._reserve(end)
            self._ids[self._used : end] = torch.tensor(new, device=self._device)
            self._used = end
        indices = torch.tensor([self._index_of[token] for token in added], device=self._device)
        counts = torch.tensor(list(added.values()), dtype=torch.float32, device=self._device)
        self._in_output.index_add_(0, indices, counts)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Distinct token ids [n] int64, and their counts in the output [n] float32."""
        return self._ids[: self._used], self._in_output[: self._used]

    def _reserve(self, size: int) -> None:
        """Grow by doubling, so that the cost of a token stays constant on average."""
        if size <= len(self._ids):
            return
        extra = max(size, 2 * len(self._ids), 64) - len(self._ids)
        self._ids = torch.cat((self._ids, self._ids.new_zeros(extra)))
        self._in_output = torch.cat((self._in_output, self._in_output.new_zeros(extra)))


MAX_DECREASE = 1e38  # of a logit, so that it does not become infinite

_LENGTH_BITS = MAX_REPEAT_WINDOW.bit_length()


class DryPenalty:
    """Stores a run for every distance back: how many tokens before that position equal those at the end of the text.

    A new token extends the runs of the distances at which it occurs, and ends the others. A step costs a few passes over at
    most `last_n` numbers. The text is stored backwards, so that the token at distance d is `_text[_start + d - 1]`.
    """

    def __init__(self, settings: DryParams) -> None:
        self._settings = settings
        self._breaking = frozenset(tuple(reversed(sequence)) for sequence in settings.breaker_sequences)
        self._lengths = sorted({len(sequence) for sequence in self._breaking})
        self._last_ids = frozenset(sequence[0] for sequence in self._breaking)
        self._window = settings.last_n + max(self._lengths, default=0)  # a breaker may begin before the window
        self._reset()

    def _reset(self) -> None:
        self._num_tokens = 0
        self._text: NDArray[np.int64] = np.zeros(0, np.int64)
        self._runs: NDArray[np.int32] = np.zeros(0, np.int32)  # at d - 1 the run of distance d
        self._start = 0
        self._since_breaker = 0

    def update(self, token_ids: Sequence[int]) -> None:
        """Add tokens after those added before. A shorter list is read from its beginning."""
        if len(token_ids) < self._num_tokens:
            self._reset()
        if self._num_tokens == 0:
            self._load(token_ids)
        else:
            for position in range(self._num_tokens, len(token_ids)):
                self._append(token_ids[position])
        self._num_tokens = len(token_ids)

    def decreases(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids [n] int64, each once, and the decreases of their logits [n] float32."""
        s = self._settings
        distances = min(self._size, s.last_n) - 1
        if distances < 1 or self._since_breaker < s.allowed_length:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        found = np.flatnonzero(self._runs[:distances] >= s.allowed_length)
        # A sequence does not extend beyond the last `last_n` tokens, nor beyond the last breaker.
        lengths = np.minimum(self._runs[found], s.last_n - 1 - found)
        lengths = np.minimum(lengths, self._since_breaker)
        ids = self._text[self._start + found]
        allowed = lengths >= s.allowed_length
        if not allowed.all():
            ids, lengths = ids[allowed], lengths[allowed]
        # Sorted by id and then by length: the last entry of each id has the greatest length.
        both = np.sort(ids << _LENGTH_BITS | lengths)
        distinct = both >> _LENGTH_BITS
        last = np.append(distinct[1:] != distinct[:-1], True)[: len(both)]
        distinct, longest = distinct[last], both[last] & (1 << _LENGTH_BITS) - 1
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
            self._runs[: size - 1] = _z_function(text[:size])
        ends = self._settings.breaker_ids | self._last_ids
        candidates = (i for i, token in enumerate(text[:size].tolist()) if token in ends) if ends else iter(())
        self._since_breaker = next((i for i in candidates if self._breaks(text, i)), len(token_ids))

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

    def _grow(self, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        """Reallocate the text with these tokens, in their order, and at least as many free entries, so that this is rare."""
        self._text = np.zeros(2 * max(len(tokens), 128), np.int64)
        self._start = len(self._text) - len(tokens)
        self._text[self._start :] = np.asarray(tokens, np.int64)[::-1]
        runs = np.zeros(min(len(self._text), self._settings.last_n), np.int32)
        runs[: min(len(runs), len(self._runs))] = self._runs[: len(runs)]
        self._runs = runs

    def _breaks(self, text: NDArray[np.int64], at: int) -> bool:
        """Whether a breaker ends with the token at an index of the reversed text."""
        token = int(text[at])
        if token in self._settings.breaker_ids:
            return True
        if token not in self._last_ids:
            return False
        return any(tuple(map(int, text[at : at + length])) in self._breaking for length in self._lengths)


def _z_function(tokens: NDArray[np.int64]) -> list[int]:
    """For every index from 1, how many tokens from there equal those from the beginning (Z-function).

    Visits only the occurrences of the first token; elsewhere the value is 0.
    """
    text = tokens.tolist()
    lengths = [0] * len(text)
    left = right = 0  # the known match that ends last
    for index in (np.flatnonzero(tokens[1:] == text[0]) + 1).tolist():
        length = min(right - index, lengths[index - left]) if index < right else 0
        while index + length < len(text) and text[length] == text[index + length]:
            length += 1
        lengths[index] = length
        if index + length > right:
            left, right = index, index + length
    return lengths[1:]
