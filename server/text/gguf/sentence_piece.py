"""SentencePiece's BPE (`llama` in GGUF files), and Gemma 4's, as tokenizer.json has them.

Responsible for merges, for spaces written as "▁" and for tokens that stand for bytes. Knows nothing of added tokens.
"""

from __future__ import annotations

from typing import Any

from windlass.server.text.gguf.byte_level import given_merges, merging_model
from windlass.server.text.gguf.fields import GgufVocabulary

SPACE = "▁"
_LONGEST_MERGED = 256  # characters; a token is tried at each of its cuts


def scored_parts(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The parts of tokenizer.json by name, for a vocabulary whose scores say what is merged first. Raises LoadError."""
    prefix = vocabulary.space_prefix is not False
    return _parts(vocabulary, merges_from_scores(vocabulary), space_before=prefix)


def ranked_parts(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The same for a vocabulary with a list of merges, as Gemma 4's. Raises LoadError."""
    return _parts(vocabulary, given_merges(vocabulary), space_before=bool(vocabulary.space_prefix))


def merges_from_scores(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """The pairs of tokens that make a token, the best score of the made token first.

    SentencePiece merges the neighbours whose token has the best score, the leftmost of equal ones. Here every pair has
    a rank of its own: of the pairs that make one token the longer left one comes first, as transformers has them.
    """
    scores, ids = vocabulary.scores, vocabulary.ids
    if scores is None:
        vocabulary.refuse("the scores of its tokens are missing (tokenizer.ggml.scores)")
    pairs: list[tuple[float, int, str, str]] = []
    for token, score in zip(vocabulary.tokens, scores, strict=True):
        if len(token) > _LONGEST_MERGED:
            vocabulary.refuse(f"a token has {len(token)} characters, and its merges are tried up to {_LONGEST_MERGED}")
        for cut in range(1, len(token)):
            if (left := token[:cut]) in ids and (right := token[cut:]) in ids:
                pairs.append((-score, -cut, left, right))
    pairs.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in pairs]


def _parts(vocabulary: GgufVocabulary, merges: list[tuple[str, str]], *, space_before: bool) -> dict[str, Any]:
    escape: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if space_before:
        escape = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, escape]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": escape,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": merging_model(vocabulary, merges, byte_tokens=True),
    }
