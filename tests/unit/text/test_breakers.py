"""Token ids and sequences of DRY sequence breakers, compared with all tokens of the vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

import windlass
from windlass.server.text.tokenizer import Tokenizer
from windlass.server.text.workers.tasks import dry_breaker_tokens

BREAKERS = ("\n", ":", "###", "the end", "é", "<|end|>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(Path(windlass.__file__).parent / "models" / "demo")


def test_ids_of_tokens_with_a_breaker(tokenizer: Tokenizer) -> None:
    for breaker in BREAKERS:
        ids, _ = dry_breaker_tokens(tokenizer, [breaker])
        every = range(tokenizer.vocab_size)
        assert ids == {i for i in every if breaker.encode() in tokenizer.token_bytes(i)}
    assert len(dry_breaker_tokens(tokenizer, ["e"])[0]) > 100


def test_sequences_with_a_breaker(tokenizer: Tokenizer) -> None:
    found = 0
    for breaker in BREAKERS:
        _, sequences = dry_breaker_tokens(tokenizer, [breaker])
        for sequence in sequences:
            text = b"".join(map(tokenizer.token_bytes, sequence))
            assert breaker.encode() in text and len(sequence) > 1
            assert text.index(breaker.encode()) < len(tokenizer.token_bytes(sequence[0]))
        found += len(sequences)
        if len(breaker) == 1:
            assert not sequences
    assert found > 20
    both = dry_breaker_tokens(tokenizer, BREAKERS)
    assert both[1] == frozenset().union(*(dry_breaker_tokens(tokenizer, [one])[1] for one in BREAKERS))


@pytest.mark.parametrize("breaker", ["\n", ":", "###", "the end", "<|end|>"])
@pytest.mark.parametrize("around", [("", ""), ("Once", " more"), ("a ", "\nb"), ("x#", "#"), ("so", ".")])
def test_texts_with_a_breaker(tokenizer: Tokenizer, breaker: str, around: tuple[str, str]) -> None:
    ids, sequences = dry_breaker_tokens(tokenizer, [breaker])
    tokens = tuple(tokenizer.encode(around[0] + breaker + around[1], add_special_tokens=False))
    pieces = {tokens[i:j] for i in range(len(tokens)) for j in range(i + 2, len(tokens) + 1)}
    assert ids & set(tokens) or sequences & pieces
