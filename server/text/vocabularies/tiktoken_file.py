"""Reads tiktoken's files: a line for each token, its bytes in base64 and its rank.

Responsible for the form, and for what such files do not say: how each model cuts a text into words, and its special tokens.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.engine.errors import LoadError
from windlass.server.text.gguf.word_rules import WORD_RULES
from windlass.server.text.vocabularies.ranked_bytes import ranked_parts, refuse
from windlass.server.text.vocabularies.reading import ReadVocabulary, added_token

FILE = "tiktoken.model"
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|\Z)")


def is_tiktoken(data: bytes) -> bool:
    """Whether a file's bytes are in tiktoken's form, by its first line."""
    return _LINE.match(data) is not None


def read_tiktoken(data: bytes, file: Path, config: Mapping[str, Any], model_type: str) -> ReadVocabulary:
    """The vocabulary in a file's bytes.

    config: of tokenizer_config.json; model_type: of config.json. They and the file's name tell whose it is. Raises LoadError, one
    line, where they do not, or the file is damaged.
    """
    kind = _kind(file, str(config.get("tokenizer_class") or ""), model_type)
    tokens = _tokens(data, str(file))
    parts = ranked_parts(tokens, WORD_RULES[kind.words].splits, str(file))
    if kind.composes:
        parts["normalizer"] = {"type": "NFC"}
    special = _special(len(tokens), config.get("added_tokens_decoder") or {}, kind)
    parts["added_tokens"] = [added_token(index, text, special=flag) for index, (text, flag) in special.items()]
    return ReadVocabulary(parts, len(tokens) + len(special), dict(kind.named), add_bos=kind.add_bos)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a model's code knows of its vocabulary.

    words: the rules by their name in GGUF files. special: texts of the tokens behind the last rank. total: how many those are
    with the reserved ones. composes: a text is brought into NFC first.
    """

    words: str
    special: tuple[str, ...] = ()
    total: int = 0
    named: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool = False
    composes: bool = False


# QwenLM/Qwen, tokenization_qwen.py.
_QWEN = _Kind(
    words="qwen2",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))),
    named={"eos_token": "<|endoftext|>"},
    composes=True,
)
# meta-llama/llama-models, models/llama3/tokenizer.py: the names since Llama 3.1, which only renamed what was reserved before.
_LLAMA3 = _Kind(
    words="llama-bpe",
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        *("<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{number}|>" for number in range(2, 247))),
    ),
    named={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    add_bos=True,
)
# moonshotai/Kimi-K2-Instruct, tokenization_kimi.py: tokenizer_config.json has the names.
_KIMI = _Kind(words="kimi-k2", total=256)


def _kind(file: Path, tokenizer_class: str, model_type: str) -> _Kind:
    if tokenizer_class == "QWenTokenizer" or file.name == "qwen.tiktoken":
        return _QWEN
    if tokenizer_class == "TikTokenTokenizer" and model_type in ("kimi_k2", "deepseek_v3"):
        return _KIMI
    if file.name == "tokenizer.model" and model_type in ("llama", "mllama", "llama4"):
        return _LLAMA3
    raise LoadError(
        f"{file} does not say how a text is cut into words, and the tiktoken files whose rules are known here are those of Qwen "
        "(qwen.tiktoken), Llama 3 and Kimi K2: save the tokenizer as tokenizer.json"
    )


def _tokens(data: bytes, source: str) -> list[bytes]:
    """Tokens by rank."""
    found: dict[int, bytes] = {}
    for line in data.splitlines():
        if not line:
            continue
        try:
            token, rank = line.split()
            found[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error):
            refuse(source, f"a line of it is no token in base64 and its rank ({line[:40]!r})")
    if sorted(found) != list(range(len(found))) or not found:
        refuse(source, "the ranks of its tokens are not 0, 1, 2, …")
    return [found[rank] for rank in range(len(found))]


def _special(first: int, declared: Mapping[str, Any], kind: _Kind) -> dict[int, tuple[str, bool]]:
    """Tokens behind the ranks, by id without a gap: their text, and whether they are left out of decoded text."""
    found = {first + place: (text, True) for place, text in enumerate(kind.special)}
    for name, token in declared.items():
        if int(name) >= first:
            found[int(name)] = (token["content"], bool(token.get("special", False)))
    end = max(found, default=first - 1) + 1
    if end - first > 2**16:
        raise ValueError(f"token {end - 1} of added_tokens_decoder stands far behind the vocabulary's {first} tokens")
    for index in range(first, max(end, first + kind.total)):
        found.setdefault(index, (f"<|reserved_token_{index}|>", True))
    return dict(sorted(found.items()))
