"""Sample slot: settings and tokens of one sample, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, overload

from windlass.engine.interface.request import SamplingParams


class ExtendedTokens(Sequence[int]):
    """Token ids followed by further ones, without a copy."""

    __slots__ = ("_more", "_token_ids")

    def __init__(self, token_ids: Sequence[int], more: Sequence[int]) -> None:
        self._token_ids, self._more = token_ids, more

    def __len__(self) -> int:
        return len(self._token_ids) + len(self._more)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError(index)
        known = len(self._token_ids)
        return self._token_ids[index] if index < known else self._more[index - known]


@dataclass(frozen=True, slots=True)
class SampleSlot:
    """One sample for which a token is sampled.

    It has the sampling fields of a `NewSequence`, but a token list that grows with the sequence, and exists for tests and
    proposed tokens without one. token_ids: `num_prompt_tokens` tokens of the prompt, then the output so far. stop_ids: ids that
    `sampling.min_tokens` masks (eos unless ignored, and stop ids).
    """

    seq_id: int
    index: int
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    token_ids: Sequence[int]
    stop_ids: tuple[int, ...] = ()

    def after(self, more: Sequence[int]) -> Self:
        """The same slot with further tokens appended."""
        return replace(self, token_ids=ExtendedTokens(self.token_ids, more))
