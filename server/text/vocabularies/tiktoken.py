"""Readers of tiktoken and tekken files."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from windlass.engine.bounded_files import has_too_many_entries
from windlass.engine.errors import LoadError
from windlass.server.text.token_pieces import byte_level_text
from windlass.server.text.vocabularies.bpe import WORD_RULES, byte_level_parts, merging_model
from windlass.server.text.vocabularies.vocabulary import (
    MAX_CHARACTERS,
    MAX_TOKEN_CHARACTERS,
    MAX_TOKENS,
    TokenizerParts,
    added_token,
    refuse_vocabulary,
)

TEKKEN_FILE = "tekken.json"
TIKTOKEN_FILE = "tiktoken.model"
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|\Z)")
_TOO_LARGE = "its vocabulary is larger than that of any model"
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Special tokens of tekken.json before version 7 (mistral-common, tokens/tokenizers/tekken.py).
_LEGACY_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


@dataclass(frozen=True, slots=True)
class _KnownVocabulary:
    """Properties of a vocabulary that only the model's code specifies.

    word_rules: name in GGUF files. special: texts of the tokens after the last rank. total: number of special tokens
    including reserved ones. normalizes_nfc: a text is normalized to NFC first.
    """

    word_rules: str
    special: tuple[str, ...] = ()
    total: int = 0
    named: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool = False
    normalizes_nfc: bool = False


# QwenLM/Qwen, tokenization_qwen.py.
_QWEN = _KnownVocabulary(
    word_rules="qwen2",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))),
    named={"eos_token": "<|endoftext|>"},
    normalizes_nfc=True,
)

# meta-llama/llama-models, models/llama3/tokenizer.py: names since Llama 3.1, which renamed reserved tokens.
_LLAMA3 = _KnownVocabulary(
    word_rules="llama-bpe",
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        *("<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{number}|>" for number in range(2, 247))),
    ),
    named={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    add_bos=True,
)

# moonshotai/Kimi-K2-Instruct, tokenization_kimi.py: the names are in tokenizer_config.json.
_KIMI = _KnownVocabulary(word_rules="kimi-k2", total=256)


def read_tekken(data: bytes, source: str) -> TokenizerParts:
    """Read the bytes of tekken.json. source: path for messages. Raises LoadError, one line."""
    if has_too_many_entries(data):
        _refuse(source, _TOO_LARGE)
    try:
        content = json.loads(data)
        config = content["config"]
        pattern, count, size = config["pattern"], config["default_num_special_tokens"], config["default_vocab_size"]
        special = _tekken_special_tokens(content.get("special_tokens"), count)
        tokens = [base64.b64decode(token["token_bytes"], validate=True) for token in content["vocab"][: size - count]]
        ranks = [token["rank"] for token in content["vocab"][: size - count]]
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        _refuse(
            source,
            f"it is not in the format of tekken.json ({type(error).__name__}: {' '.join(str(error).split())[:100]})",
        )
    if ranks != list(range(len(ranks))) or not tokens or not isinstance(pattern, str):
        _refuse(source, "the ranks of its tokens are not 0, 1, 2, …")
    parts = tiktoken_parts(tokens, [pattern], source, first_id=count)
    parts["added_tokens"] = [added_token(index, text, special=True) for index, text in enumerate(special)]
    parts["model"]["vocab"] |= {text: index for index, text in enumerate(special)}
    return TokenizerParts(
        parts, count + len(tokens), {name: text for name, text in _NAMED.items() if text in special}, add_bos=True
    )


def is_tiktoken(data: bytes) -> bool:
    """Return whether the first line has tiktoken's format."""
    return _LINE.match(data) is not None


def read_tiktoken(data: bytes, file: Path, config: Mapping[str, Any], model_type: str) -> TokenizerParts:
    """Read the bytes of a tiktoken file.

    config: of tokenizer_config.json. model_type: of config.json. Raises LoadError, one line, if these and the file's name
    do not identify a known vocabulary, or if the file is damaged.
    """
    kind = _known_vocabulary(file, str(config.get("tokenizer_class") or ""), model_type)
    if data.count(b"\n") > MAX_TOKENS:
        _refuse(str(file), _TOO_LARGE)
    tokens = _tokens(data, str(file))
    parts = tiktoken_parts(tokens, WORD_RULES[kind.word_rules].splits, str(file))
    if kind.normalizes_nfc:
        parts["normalizer"] = {"type": "NFC"}
    special = _tiktoken_special_tokens(len(tokens), config.get("added_tokens_decoder") or {}, kind)
    parts["added_tokens"] = [added_token(index, text, special=flag) for index, (text, flag) in special.items()]
    return TokenizerParts(parts, len(tokens) + len(special), dict(kind.named), add_bos=kind.add_bos)


def _tekken_special_tokens(entries: Any, count: int) -> list[str]:
    """Return `count` special tokens by id. Unnamed ones get the names of mistral-common."""
    legacy = enumerate(_LEGACY_SPECIAL_TOKENS)
    named = dict(legacy if entries is None else ((int(token["rank"]), str(token["token_str"])) for token in entries))
    if len(named) > count or any(not 0 <= index < count for index in named):
        raise ValueError(f"{len(named)} special tokens, where {count} are permitted")
    return [named.get(index, f"<SPECIAL_{index}>") for index in range(count)]


def tiktoken_parts(tokens: Sequence[bytes], splits: Sequence[str], source: str, *, first_id: int = 0) -> dict[str, Any]:
    """Return the parts of tokenizer.json without added tokens. Raises LoadError.

    tokens: by rank, including all single bytes. splits: see `WordRules`. first_id: id of the token with rank 0.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if (
        len(tokens) > MAX_TOKENS
        or sum(map(len, tokens)) > MAX_CHARACTERS
        or max(map(len, tokens)) > MAX_TOKEN_CHARACTERS
    ):
        _refuse(source, _TOO_LARGE)
    if len(ranks) != len(tokens) or b"" in ranks:
        _refuse(source, "two of its tokens are equal, or one is empty")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        _refuse(source, "not every byte is a token")
    texts = [byte_level_text(token) for token in tokens]
    ids = {text: first_id + rank for rank, text in enumerate(texts)}
    return byte_level_parts(splits, merging_model(ids, _merges(ranks), whole_words=True))


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that form a token, ordered by its rank, which is tiktoken's merge order.

    Here each pair has its own rank: of the pairs that form the same token, the one with the longer left token is first.
    """
    texts = {token: byte_level_text(token) for token in ranks}
    return [
        (texts[token[:cut]], texts[token[cut:]])
        for token in ranks
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ranks and token[cut:] in ranks
    ]


def _known_vocabulary(file: Path, tokenizer_class: str, model_type: str) -> _KnownVocabulary:
    if tokenizer_class == "QWenTokenizer" or file.name == "qwen.tiktoken":
        return _QWEN
    if tokenizer_class == "TikTokenTokenizer" and model_type in ("kimi_k2", "deepseek_v3"):
        return _KIMI
    if file.name == "tokenizer.model" and model_type in ("llama", "mllama", "llama4"):
        return _LLAMA3
    raise LoadError(
        f"{file} does not name its word rules, and only those of Qwen (qwen.tiktoken), Llama 3 and Kimi K2 are known: save "
        "the tokenizer as tokenizer.json"
    )


def _tokens(data: bytes, source: str) -> list[bytes]:
    """Return the tokens by rank."""
    found: dict[int, bytes] = {}
    for line in data.splitlines():
        if not line:
            continue
        try:
            token, rank = line.split()
            found[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error):
            _refuse(source, f"a line is not a token in base64 and its rank ({line[:40]!r})")
    if sorted(found) != list(range(len(found))) or not found:
        _refuse(source, "the ranks of its tokens are not 0, 1, 2, …")
    return [found[rank] for rank in range(len(found))]


def _tiktoken_special_tokens(
    first: int, declared: Mapping[str, Any], kind: _KnownVocabulary
) -> dict[int, tuple[str, bool]]:
    """Return text and `special` flag of the tokens after the last rank, by id without gaps."""
    found = {first + offset: (text, True) for offset, text in enumerate(kind.special)}
    for name, token in declared.items():
        if int(name) >= first:
            found[int(name)] = (token["content"], bool(token.get("special", False)))
    end = max(found, default=first - 1) + 1
    if end - first > 2**16:
        raise ValueError(f"token {end - 1} of added_tokens_decoder is far beyond the vocabulary's {first} tokens")
    for index in range(first, max(end, first + kind.total)):
        found.setdefault(index, (f"<|reserved_token_{index}|>", True))
    return dict(sorted(found.items()))


def _refuse(source: str, reason: str) -> NoReturn:
    refuse_vocabulary(source, f"{reason}; fetch the file again")
