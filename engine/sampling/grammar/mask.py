"""A mask: which tokens a matcher lets come next, as bits. It knows no samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """bits: int32 [ceil(V / 32)], bit i % 32 of word i // 32 set where token i may come; none are where the matcher failed.

    complete: nothing may follow but an end.
    """

    bits: Tensor
    complete: bool

    def allows(self, token_id: int) -> bool:
        return bool(int(self.bits[token_id // 32]) >> (token_id % 32) & 1)


def no_token(vocab_size: int) -> GrammarMask:
    """The mask of a text that the grammar does not have."""
    return GrammarMask(torch.zeros(-(-vocab_size // 32), dtype=torch.int32), complete=False)


def next_mask(matcher: LLMatcher, vocab_size: int) -> GrammarMask:
    """What may come where the matcher stands. The interpreter's lock is released meanwhile."""
    bits = no_token(vocab_size).bits
    matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.nbytes)
    return GrammarMask(bits, matcher.is_stopped() and not matcher.is_error())
