"""Small tiktoken and tekken files, trained in a few milliseconds."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from helpers import toy_tokenizers as toys
from tokenizers import models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from windlass.server.text.vocabularies.vocabulary import WORD_RULES


@cache
def ranked_tokens(words: str, size: int = 600) -> tuple[bytes, ...]:
    """Return tokens by rank, bytes first, trained on a corpus split by the word rules of that name."""
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(pattern(words)), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        toys.CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    to_bytes = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab = backend.get_vocab()
    merged = [
        bytes(to_bytes[char] for char in token) for token in sorted(vocab, key=vocab.__getitem__) if len(token) > 1
    ]
    return (*(bytes([byte]) for byte in range(256)), *merged)


def pattern(words: str) -> str:
    """Return the regular expression of word rules by their name in GGUF files."""
    (found,) = WORD_RULES[words].splits
    return found


def write_tiktoken(file: Path, tokens: tuple[bytes, ...], config: dict[str, Any], **tokenizer_config: Any) -> Path:
    """Write a tiktoken file, config.json and, if not empty, tokenizer_config.json; return the directory."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    return _write_configs(file, config, tokenizer_config)


def write_tekken(file: Path, tokens: tuple[bytes, ...], special: list[str] | None, count: int, **config: Any) -> Path:
    """Write tekken.json with `count` special tokens, where the last 20 tokens exceed the vocabulary's size."""
    content: dict[str, Any] = {
        "config": {
            "pattern": pattern("tekken"),
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + count - 20,
            "default_num_special_tokens": count,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
    }
    if special is not None:
        content["special_tokens"] = [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)
        ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")
    return _write_configs(file, {}, config)


def _write_configs(file: Path, config: dict[str, Any], tokenizer_config: dict[str, Any]) -> Path:
    (file.parent / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tokenizer_config:
        (file.parent / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    return file.parent
