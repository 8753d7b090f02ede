"""The tokens by which a model says whether a document fits a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from windlass.engine.errors import LoadError

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer


def answer_ids(tokenizer: Tokenizer, tokens: Sequence[str | int]) -> tuple[int, ...]:
    """Their ids. Raises LoadError for a text that is no single token, and for an id that the tokenizer does not have."""
    found = tuple(_id_of(tokenizer, token) for token in tokens)
    if len(set(found)) != len(found):
        raise LoadError(f"reranking: {' and '.join(map(repr, tokens))} are one and the same token: name two")
    return found


def _id_of(tokenizer: Tokenizer, token: str | int) -> int:
    if isinstance(token, int):
        if token >= tokenizer.vocab_size:
            raise LoadError(
                f"reranking: the model's files name the token id {token}, and its tokenizer has {tokenizer.vocab_size} ids"
            )
        return token
    known = tokenizer.backend.token_to_id(token)
    if known is not None:
        return known
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1:
        raise LoadError(
            f"reranking: {token!r} is {len(ids)} tokens of this model's tokenizer, and an answer is one: name another with "
            "--rerank-tokens"
        )
    return ids[0]
