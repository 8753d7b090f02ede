"""Byte-level BPE (`gpt2` in GGUF files) as tokenizer.json has it: model, pre-tokenizer, decoder.

Responsible for the merges and for cutting a text into words. Knows nothing of added tokens.
"""

from __future__ import annotations

from typing import Any

from windlass.engine.errors import did_you_mean
from windlass.server.text.gguf.fields import GgufVocabulary
from windlass.server.text.gguf.word_rules import DEFAULT, WORD_RULES, WordRules


def word_rules(vocabulary: GgufVocabulary) -> WordRules:
    """The rules of the file's kind; those of "default" where it names none. Raises LoadError for an unknown kind."""
    kind = vocabulary.pre or DEFAULT
    if kind not in WORD_RULES:
        vocabulary.refuse(
            f"it cuts words in a way that is not known here, tokenizer.ggml.pre is {kind[:80]!r}"
            f"{did_you_mean(kind, WORD_RULES)}; known are {', '.join(sorted(WORD_RULES))}"
        )
    return WORD_RULES[kind]


def byte_level_parts(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The parts of tokenizer.json by name. Raises LoadError."""
    rules = word_rules(vocabulary)
    splits = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in rules.splits
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": merging_model(vocabulary, given_merges(vocabulary), whole_words=rules.whole_words),
    }


def given_merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """The file's merges. Raises LoadError where there are none, or one is not made of tokens."""
    if vocabulary.merges is None:
        vocabulary.refuse("its merges are missing (tokenizer.ggml.merges)")
    ids = vocabulary.ids
    for first, second in vocabulary.merges:
        if first not in ids or second not in ids or first + second not in ids:
            vocabulary.refuse(f"the merge of {first[:40]!r} and {second[:40]!r} is not of two tokens into a third")
    return vocabulary.merges


def merging_model(
    vocabulary: GgufVocabulary, merges: list[tuple[str, str]], *, whole_words: bool = False, byte_tokens: bool = False
) -> dict[str, Any]:
    """The model of tokenizer.json. byte_tokens: characters that are no tokens become tokens such as `<0xE2>`."""
    unknown = vocabulary.special.get("unk") if byte_tokens else None
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_tokens,
        "byte_fallback": byte_tokens,
        "ignore_merges": whole_words,
        "vocab": vocabulary.ids,
        "merges": merges,
    }
