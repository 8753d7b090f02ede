"""Byte-level vocabularies in which a token's rank is its place in the merging (tiktoken, tekken), as tokenizer.json has them.

Responsible for the merges that come to the same tokens. Knows no file's form and no special token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from windlass.engine.errors import LoadError
from windlass.server.text.gguf.byte_level import merging_model
from windlass.server.text.gguf.fields import MAX_CHARACTERS, MAX_TOKEN_CHARACTERS, MAX_TOKENS, GgufVocabulary, TokenType
from windlass.server.text.token_pieces import text_of_bytes


def refuse(source: str, what: str) -> NoReturn:
    """Raise the LoadError that says what is wrong with a vocabulary's file."""
    raise LoadError(f"cannot make a tokenizer from {source}: {what}; fetch the file again")


def ranked_parts(tokens: Sequence[bytes], splits: Sequence[str], source: str, *, first_id: int = 0) -> dict[str, Any]:
    """The parts of tokenizer.json by name, without normalizer and added tokens. Raises LoadError.

    tokens: by rank, each single byte among them. splits: regular expressions that cut a text into words, applied in order.
    first_id: the id of the token of rank 0.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if (
        len(tokens) > MAX_TOKENS
        or sum(map(len, tokens)) > MAX_CHARACTERS
        or max(map(len, tokens)) > MAX_TOKEN_CHARACTERS
    ):
        refuse(source, "its vocabulary is larger than any model's")
    if len(ranks) != len(tokens) or b"" in ranks:
        refuse(source, "two of its tokens are the same, or one is empty")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        refuse(source, "not every byte is a token")
    texts = [text_of_bytes(token) for token in tokens]
    vocabulary = GgufVocabulary(
        source=source,
        kind="gpt2",
        pre=None,
        tokens=texts,
        types=[TokenType.NORMAL] * len(texts),
        ids={text: first_id + rank for rank, text in enumerate(texts)},
    )
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in splits
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False})
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": merging_model(vocabulary, _merges(ranks), whole_words=True),
    }


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """The pairs that make a token, by the rank of what they make, which is all that tiktoken goes by.

    Here every pair has a rank of its own: of those that make one token the one with the longer left part comes first.
    """
    texts = {token: text_of_bytes(token) for token in ranks}
    return [
        (texts[token[:cut]], texts[token[cut:]])
        for token in ranks
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ranks and token[cut:] in ranks
    ]
