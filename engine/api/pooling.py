"""What a request wants that generates nothing: its prompt's hidden states, pooled or one by one, or what a head makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How the states behind the final norm become one row: the last token's, the mean of all, the first token's. "all": a row for
# each token. "classify": what the model's classification head makes of the text; "classify tokens": of each token. "answer": how
# much likelier the model goes on with one token than with another.
PoolingKind = Literal["last", "mean", "first", "all", "classify", "classify tokens", "answer"]
POOLING_KINDS: tuple[PoolingKind, ...] = ("last", "mean", "first", "all", "classify", "classify tokens", "answer")


@dataclass(frozen=True, slots=True)
class PoolingRule:
    """dimensions: leading values of each row that are kept, None for all. normalize: to length 1, after that.

    second_from: the token with which the second text of a pair begins, for models that tell the two apart; None: there is one.
    answers: of "answer", the token whose logit behind the prompt is told, and perhaps one whose logit is taken off it.
    """

    kind: PoolingKind = "last"
    dimensions: int | None = None
    normalize: bool = False
    second_from: int | None = None
    answers: tuple[int, ...] = ()

    @property
    def reads_every_token(self) -> bool:
        """Whether states of others than the last token are needed: then none may come from the prefix cache."""
        return self.kind in ("mean", "first", "all", "classify tokens")


@dataclass(frozen=True, slots=True)
class PooledRows:
    """values: float32, little-endian, row by row; `width` of them each."""

    values: bytes
    width: int

    @property
    def num_rows(self) -> int:
        return len(self.values) // (4 * self.width)
