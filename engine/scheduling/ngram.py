"""Prompt lookup: where in a sequence's own tokens its last few stood before, and what followed them there.

Responsible for the index and the proposal alone. It knows token ids; nothing of requests, models or of whether what it
proposes is any good. As arXiv 2304.04487 and prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_MAX_CANDIDATES = 16  # earlier places looked at per proposal, latest first


class NgramIndex:
    """Where each run of `min_match` tokens stood, kept up to date token by token: about 200 bytes a token.

    A dictionary leads to the latest place, an array from each place to the one before it. So neither taking in a token
    nor a proposal costs more as the text grows. max_match: more agreement than this is not looked for.
    """

    __slots__ = ("_latest", "_max_match", "_min_match", "_previous")

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._latest: dict[tuple[int, ...], int] = {}
        # A place is the index of the token after the run. The first `min_match` tokens are no such place.
        self._previous = array("q", [-1] * min_match)

    def extend(self, token_ids: Sequence[int], max_tokens: int) -> bool:
        """Take in up to `max_tokens` tokens not seen yet, and tell whether that was all. token_ids: the growing list."""
        n, latest, previous = self._min_match, self._latest, self._previous
        for position in range(len(previous), min(len(token_ids), len(previous) + max_tokens)):
            run = tuple(token_ids[position - n : position])
            previous.append(latest.get(run, -1))
            latest[run] = position
        return len(previous) >= len(token_ids)

    def propose(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """Up to `count` tokens that followed where the last tokens stood before; none if they are new.

        The place with the longest agreement counts, of equal ones the latest. Where the text from there to the end is
        shorter than `count`, it is taken to repeat itself.
        """
        length = len(token_ids)
        if length < self._min_match or count < 1:
            return ()
        position = self._latest.get(tuple(token_ids[length - self._min_match :]), -1)
        best, longest = -1, 0
        for _ in range(_MAX_CANDIDATES):
            if position < 0:
                break
            agreed = self._agreement(token_ids, position)
            if agreed > longest:
                best, longest = position, agreed
            if agreed == self._max_match:
                break
            position = self._previous[position]
        if best < 0:
            return ()
        period = length - best
        return tuple(token_ids[best + i % period] for i in range(count))

    def _agreement(self, token_ids: Sequence[int], position: int) -> int:
        """How many tokens before `position` equal those before the end, min_match .. max_match."""
        length, agreed = len(token_ids), self._min_match
        while (
            agreed < min(self._max_match, position)
            and token_ids[position - 1 - agreed] == token_ids[length - 1 - agreed]
        ):
            agreed += 1
        return agreed
