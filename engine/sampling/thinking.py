"""Ends thinking that has taken its budget: at one place of the output the tokens of a marker are the only ones left.

What is forced depends on the tokens before it alone, so it is the same under speculation, preemption and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.engine.api.request import ThinkingBudget

_MOST_LEAD = 2  # tokens, of white space mostly, that may stand before an opening marker


def forced_token(budget: ThinkingBudget, token_ids: Sequence[int], num_prompt_tokens: int) -> int | None:
    """The token that must come next, if one must. token_ids: prompt and output so far."""
    drawn, close = len(token_ids) - num_prompt_tokens, budget.close
    longest = _MOST_LEAD + max(map(len, budget.opens), default=0)
    if not budget.tokens <= drawn < longest + budget.tokens + len(close):
        return None  # as at nearly every step
    output = list(token_ids[num_prompt_tokens:])
    begin = _begin(budget, output)
    if begin is None or drawn < begin + budget.tokens:
        return None
    thought, forced = output[begin : begin + budget.tokens], output[begin + budget.tokens :]
    if any(_stands_in(thought, marker) for marker in (close, *budget.closes)):
        return None
    # The thinking may be about to close by itself: what stands of the marker is not said twice.
    said = next(
        n for n in range(min(len(close) - 1, len(thought)), -1, -1) if thought[len(thought) - n :] == [*close[:n]]
    )
    left = close[said:]
    return left[len(forced)] if len(forced) < len(left) and (*forced,) == left[: len(forced)] else None


def _begin(budget: ThinkingBudget, output: list[int]) -> int | None:
    """Where the thinking begins; None where nothing opens it."""
    if not budget.opens:
        return 0
    for lead in range(_MOST_LEAD + 1):
        ends = [lead + len(opening) for opening in budget.opens if _starts(output, opening, lead)]
        if ends:
            return max(ends)
    return None


def _starts(tokens: list[int], marker: Sequence[int], at: int) -> bool:
    return tokens[at : at + len(marker)] == [*marker]


def _stands_in(tokens: list[int], marker: Sequence[int]) -> bool:
    return any(_starts(tokens, marker, at) for at in range(len(tokens) - len(marker) + 1))
