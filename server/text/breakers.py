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
    ids: set[int] = set()
    tails: defaultdict[bytes, set[tuple[int, ...]]] = defaultdict(set)  # by what the token before them ends with
    for breaker in dict.fromkeys(breakers):
        whole = breaker.encode()
        ids.update([token_id for token_id, piece in enumerate(pieces) if whole in piece])
        for cut in range(1, len(breaker)):
            rest = tuple(tokenizer.encode(breaker[cut:], add_special_tokens=False)[:MAX_TAIL])
            if rest:
                tails[breaker[:cut].encode()].add(rest)
    longest = max(map(len, tails), default=0)
    sequences: set[tuple[int, ...]] = set()
    for token_id, piece in enumerate(pieces):
        for start in range(max(0, len(piece) - longest), len(piece)):
            if (end := piece[start:]) in tails:
                sequences.update((token_id, *rest) for rest in tails[end])
    return frozenset(ids), frozenset(sequences)
