"""Logits processor of one sequence: masked, biased and penalised tokens, and the thinking budget.

Computes `LogitsChanges` for the backend and changes no logits itself. Per step it reads only new tokens, so its Python work does
not grow with the context. When a thinking budget is used up, the tokens of the closing marker are forced; this depends on
previous tokens only, so it is the same under speculation, preemption and in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from windlass.engine.interface.request import SamplingParams, ThinkingBudget
from windlass.engine.sampling.grammar import GrammarMask
from windlass.engine.sampling.penalties import DryPenalty, TokenCounts
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.kernels import LogitsChanges


def changes_logits(sampling: SamplingParams) -> bool:
    """Whether a row needs a LogitsProcessor (apart from min_tokens, which needs one for the first tokens only)."""
    return bool(
        sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.thinking is not None
        or sampling.grammar is not None
        or uses_penalties(sampling)
    )


def uses_penalties(sampling: SamplingParams) -> bool:
    """Whether a row depends on state that is updated from token to token."""
    return counts_tokens(sampling) or sampling.repeats is not None


def counts_tokens(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


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
        self._counts = TokenCounts(device) if counts_tokens(sampling) else None
        self._repeats = None if sampling.repeats is None else DryPenalty(sampling.repeats)

    def changes(self, slot: SampleSlot, mask: GrammarMask | None = None) -> LogitsChanges:
        """Changes to the slot's row of logits, in tensors that the next call may reuse. mask: that of its grammar."""
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
            # A grammar may require that a character is finished first.
            if forced is not None and (mask is None or mask.allows(forced)):
                allowed, forbidden = self._ids((forced,)), self._nothing
        bias_ids, bias = self._bias_ids, self._bias
        bits = None if mask is None else mask.bits
        return LogitsChanges(allowed, forbidden, bias_ids, bias, counted, in_output, decreased, decrease, bits)

    def _forbidden(self, slot: SampleSlot, *, complete: bool) -> Tensor:
        """Ids to mask: single bad words, the last token of each bad word whose other tokens end the text (prompt included),
        and the ids that end the text while it is too short, unless its grammar is complete."""
        too_short = not complete and len(slot.token_ids) - slot.num_prompt_tokens < self._sampling.min_tokens
        ids = (*self._bad_tokens, *self._completions(slot.token_ids), *(slot.stop_ids if too_short else ()))
        if ids != self._forbidden_now[0]:
            self._forbidden_now = (ids, self._ids(ids))
        return self._forbidden_now[1]

    def _completions(self, token_ids: Sequence[int]) -> list[int]:
        found = []
        for *start, last in self._bad_phrases:
            if len(token_ids) >= len(start) and list(token_ids[-len(start) :]) == start:
                found.append(last)
        return found

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)


# -- thinking budget --

_MAX_LEAD = 2  # tokens, mostly of white space, that may precede an opening marker

_MAX_CALL = 8192  # tokens after the budget that a call in the thinking may take

_MAX_DELAY = 3  # tokens that may finish a character whose first byte was the last of the budget


def forced_token(budget: ThinkingBudget, token_ids: Sequence[int], num_prompt_tokens: int) -> int | None:
    """The forced next token, None if there is none. token_ids: prompt and output so far.

    If a grammar required another token at its position, it is forced at one of the next positions.
    """
    drawn = len(token_ids) - num_prompt_tokens
    longest = _MAX_LEAD + max(map(len, budget.opens), default=0) + len(budget.close) + _MAX_DELAY
    over = drawn - budget.tokens
    if over < 0 or over >= longest + (_MAX_CALL if budget.call_opens else 0):
        return None  # in nearly every step
    output = list(token_ids[num_prompt_tokens:])
    if over >= longest and not any(marker[0] in output[: budget.tokens + longest] for marker in budget.call_opens):
        return None
    begin = _thinking_start(budget, output)
    end = None if begin is None else _end_of_call(budget, output, begin, begin + budget.tokens)
    if begin is None or end is None:
        return None
    for stop in range(end, min(end + _MAX_DELAY, drawn) + 1):
        thought, after = output[begin:stop], output[stop:]
        if any(_contains(thought, marker) for marker in (budget.close, *budget.closes)):
            return None
        left = _remaining_marker(budget.close, thought)
        if len(after) < len(left) and _starts(left, after, 0):
            return left[len(after)]
    return None


def _end_of_call(budget: ThinkingBudget, output: list[int], begin: int, end: int) -> int | None:
    """The end of the call that is open at `end`, `end` if there is none; None if the call is not closed yet."""
    opened = max((at for marker in budget.call_opens for at in _places(output, marker, begin, end)), default=None)
    if opened is None:
        return end
    closed = (
        next((at + len(marker) for at in _places(output, marker, opened, len(output))), None)
        for marker in budget.call_closes
    )
    found = min((at for at in closed if at is not None), default=None)
    if found is None or found > end + _MAX_CALL:
        return None if len(output) < end + _MAX_CALL else end + _MAX_CALL
    return max(found, end)


def _places(tokens: list[int], marker: Sequence[int], start: int, stop: int) -> Iterator[int]:
    """The places of a marker that begin in a range."""
    try:
        while (start := tokens.index(marker[0], start, stop)) < stop:
            if _starts(tokens, marker, start):
                yield start
            start += 1
    except ValueError:
        return


def _remaining_marker(close: Sequence[int], thought: list[int]) -> list[int]:
    """The tokens of the closing marker that the end of the thinking does not contain yet."""
    longest = min(len(close) - 1, len(thought))
    num_present = next(n for n in range(longest, -1, -1) if thought[len(thought) - n :] == [*close[:n]])
    return [*close[num_present:]]


def _thinking_start(budget: ThinkingBudget, output: list[int]) -> int | None:
    """The index at which thinking begins, None if no marker opens it."""
    if not budget.opens:
        return 0
    for lead in range(_MAX_LEAD + 1):
        ends = [lead + len(opening) for opening in budget.opens if _starts(output, opening, lead)]
        if ends:
            return max(ends)
    return None


def _starts(tokens: list[int], marker: Sequence[int], at: int) -> bool:
    return tokens[at : at + len(marker)] == [*marker]


def _contains(tokens: list[int], marker: Sequence[int]) -> bool:
    return any(_starts(tokens, marker, at) for at in range(len(tokens) - len(marker) + 1))
