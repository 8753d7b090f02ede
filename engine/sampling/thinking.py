"""Ends thinking that has taken its budget: at one place of the output, one token is the only one left.

What is forced depends on the tokens before it alone, so it is the same under speculation, preemption and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.engine.api.request import ThinkingBudget

_MOST_LEAD = 2  # tokens, of white space mostly, that may stand before an opening marker


def forced_token(budget: ThinkingBudget, token_ids: Sequence[int], num_prompt_tokens: int) -> int | None:
    """The token that must come next, if one must. token_ids: prompt and output so far."""
    drawn = len(token_ids) - num_prompt_tokens
    opening = list(budget.open)
    for lead in range(_MOST_LEAD + 1 if opening else 1):
        begin = lead + len(opening)
        if drawn != begin + budget.tokens:
            continue
        begin += num_prompt_tokens
        if list(token_ids[begin - len(opening) : begin]) == opening and budget.close not in token_ids[begin:]:
            return budget.close
    return None
