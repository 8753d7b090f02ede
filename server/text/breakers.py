"""The tokens at which a text that holds a sequence breaker breaks (DRY).

Knows a tokenizer's vocabulary; knows nothing of requests or sampling. Its cost grows with the vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from windlass.server.text.tokenizer import Tokenizer

MAX_TAIL = 19  # tokens of a breaker after the one in which it begins


def breaker_tokens(tokenizer: Tokenizer, breakers: Sequence[str]) -> tuple[frozenset[int], frozenset[tuple[int, ...]]]:
    """(ids of tokens that hold a breaker, sequences of two ids and more that do).

    A sequence is a token that ends with a breaker's beginning, and the tokens of the rest.
    """
    pieces = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    by_last: defaultdict[int, list[int]] = defaultdict(list)
    for token_id, piece in enumerate(pieces):
        if piece:
            by_last[piece[-1]].append(token_id)
    ids: set[int] = set()
    sequences: set[tuple[int, ...]] = set()
    for breaker in breakers:
        whole = breaker.encode()
        ids.update(token_id for token_id, piece in enumerate(pieces) if whole in piece)
        for cut in range(1, len(breaker)):
            tail = tuple(tokenizer.encode(breaker[cut:], add_special_tokens=False)[:MAX_TAIL])
            begun = breaker[:cut].encode()
            if tail:
                heads = (token_id for token_id in by_last[begun[-1]] if pieces[token_id].endswith(begun))
                sequences.update((head, *tail) for head in heads)
    return frozenset(ids), frozenset(sequences)
