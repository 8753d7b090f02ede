"""N-gram proposer (prompt lookup) and the draft state of one sequence.

Finds where a sequence's last tokens occurred before and proposes what followed, as in arXiv 2304.04487 and prompt lookup decoding
(github.com/apoorvumang/prompt-lookup-decoding). Also adapts the number of proposed tokens to past acceptance. Uses token ids only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

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


_LONGEST_PAUSE = 64


class DraftLengthController:
    """How many tokens one sequence may propose next, learnt from what became of its earlier proposals.

    Proposals that are accepted double the next one; one that is rejected outright halves it. A sequence whose single
    proposed token is rejected pauses, for 1 step at first, then 2, 4, … up to 64: so a text that never repeats itself ends
    up computing one row in 64 for nothing, which bounds the loss even where every row costs its full price (many streams
    at once).
    """

    __slots__ = ("_limit", "_most", "_pause", "_wait")

    def __init__(self, most: int) -> None:
        self._most = self._limit = most
        self._pause = 0  # length of the last one
        self._wait = 0  # steps left of this one

    def limit(self) -> int:
        """Tokens that may be proposed in this step; call it once per step."""
        if self._wait > 0:
            self._wait -= 1
            return 0
        return self._limit

    def observe(self, proposed: int, accepted: int) -> None:
        """Learn that of `proposed` tokens the first `accepted` were accepted."""
        if accepted:
            self._pause = 0
            self._limit = min(self._most, 2 * proposed if accepted == proposed else accepted + 1)
        elif proposed > 1:
            self._limit = proposed // 2
        else:
            self._limit = 1
            self._pause = self._wait = min(_LONGEST_PAUSE, max(1, 2 * self._pause))


@dataclass(slots=True)
class DraftState:
    """What one sequence remembers of its own text and proposals. drafted: the pace of those of a draft model.

    behind: tokens that the draft model has not computed, since nobody asked it.
    """

    index: NgramIndex
    pace: DraftLengthController
    drafted: DraftLengthController
    draft_lag: int = 0
