"""Ends thinking that has taken its budget: at one place of the output the tokens of a marker are the only ones left.

What is forced depends on the tokens before it alone, so it is the same under speculation, preemption and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.engine.api.request import ThinkingBudget

_MAX_LEAD = 2  # tokens, of white space mostly, that may stand before an opening marker
_MAX_DELAY = 3  # tokens that may finish a character whose first byte was the last of the budget


def forced_token(budget: ThinkingBudget, token_ids: Sequence[int], num_prompt_tokens: int) -> int | None:
    """The token that must come next, if one must. token_ids: prompt and output so far.

    Where something else came at its place, as a grammar had it, it must come at one of the next.
    """
    drawn = len(token_ids) - num_prompt_tokens
    longest = _MAX_LEAD + max(map(len, budget.opens), default=0) + len(budget.close) + _MAX_DELAY
    if not budget.tokens <= drawn < longest + budget.tokens:
        return None  # as at nearly every step
    output = list(token_ids[num_prompt_tokens:])
    begin = _thinking_start(budget, output)
    if begin is None:
        return None
    for tokens in range(budget.tokens, min(budget.tokens + _MAX_DELAY, drawn - begin) + 1):
        thought, behind = output[begin : begin + tokens], output[begin + tokens :]
        if any(_contains(thought, marker) for marker in (budget.close, *budget.closes)):
            return None
        left = _remaining_marker(budget.close, thought)
        if len(behind) < len(left) and _starts(left, behind, 0):
            return left[len(behind)]
    return None


def _remaining_marker(close: Sequence[int], thought: list[int]) -> list[int]:
    """What closes the thinking: it may have begun to close by itself, and what stands of the marker is not said twice."""
    most = min(len(close) - 1, len(thought))
    said = next(n for n in range(most, -1, -1) if thought[len(thought) - n :] == [*close[:n]])
    return [*close[said:]]


def _thinking_start(budget: ThinkingBudget, output: list[int]) -> int | None:
    """Where the thinking begins; None where nothing opens it."""
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
