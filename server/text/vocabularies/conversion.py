"""tokenizer.json and tokenizer_config.json made from another vocabulary file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from windlass.engine.errors import LoadError
from windlass.server.text.tokenizer_files import add_missing_tokens, one_line, read_json, special_tokens, token_content
from windlass.server.text.vocabularies import tiktoken
from windlass.server.text.vocabularies.bpe import byte_level_parts, merge_list_parts, scored_parts, word_rules
from windlass.server.text.vocabularies.vocabulary import (
    GgufVocabulary,
    TokenizerParts,
    bos_eos_ids,
    gguf_added_tokens,
    named_tokens,
    read_bytes,
    read_vocabulary,
)

_TEMPLATE = "tokenizer.chat_template"

# What files of the kind `llama` mean where they name no token (llama.cpp, src/llama-vocab.cpp).
_SENTENCE_PIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """tokenizer, config: the texts of tokenizer.json and tokenizer_config.json. notices: what their user should know, by line."""

    tokenizer: str
    config: str
    notices: tuple[str, ...] = ()


def gguf_tokenizer_files(metadata: Mapping[str, Any], source: str) -> TokenizerFiles:
    """The files of the tokenizer that a GGUF file holds.

    metadata: the file's keys -> bool, int, float, str or a list of these. source: the file's name, for messages.
    Raises LoadError, one line, for what is no vocabulary, is larger than any, or is of a kind not known here.
    """
    vocabulary = read_vocabulary(metadata, source)
    notices: list[str] = []
    bos = False
    if vocabulary.kind == "gpt2":
        parts = byte_level_parts(vocabulary)
        bos = word_rules(vocabulary).add_bos
        if not vocabulary.pre:
            notices.append(
                f"{source} does not say how a text is cut into words (tokenizer.ggml.pre): the tokens may not be those the "
                "model was trained with; a file converted anew says it"
            )
    elif vocabulary.kind == "llama":
        ids = {name: index for name, index in _SENTENCE_PIECE_IDS.items() if index < len(vocabulary.tokens)}
        vocabulary = replace(vocabulary, special=ids | vocabulary.special)
        parts = scored_parts(vocabulary)
        bos = True
    elif vocabulary.kind == "gemma4":
        vocabulary = replace(vocabulary, add_bos=True)  # files say false by mistake; llama.cpp sets it right too
        parts = merge_list_parts(vocabulary)
    else:
        vocabulary.refuse(
            f"tokenizer.ggml.model is {vocabulary.kind[:80]!r}, and gpt2, llama and gemma4 are the kinds read here"
        )
    start, end = bos_eos_ids(vocabulary, bos=bos)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(vocabulary),
        "post_processor": _post_processor(vocabulary, start, end) if start or end else None,
        **parts,
    }
    text = json.dumps(content, ensure_ascii=False)
    _check(text, vocabulary)
    return TokenizerFiles(text, _config(vocabulary, metadata), tuple(notices))


def _added(vocabulary: GgufVocabulary) -> list[dict[str, Any]]:
    return [
        {
            "id": token.id,
            "content": token.text,
            "single_word": False,
            "lstrip": False,
            "rstrip": token.strips_right,
            "normalized": False,
            "special": token.special,
        }
        for token in gguf_added_tokens(vocabulary)
    ]


def _post_processor(vocabulary: GgufVocabulary, start: list[int], end: list[int]) -> dict[str, Any]:
    def one(name: str, kind: int) -> list[dict[str, Any]]:
        def special(ids: list[int]) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": vocabulary.tokens[index], "type_id": kind}} for index in ids]

        return [*special(start), {"Sequence": {"id": name, "type_id": kind}}, *special(end)]

    names = {index: vocabulary.tokens[index] for index in (*start, *end)}
    return {
        "type": "TemplateProcessing",
        "single": one("A", 0),
        "pair": one("A", 0) + one("B", 1),
        "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]} for index, name in names.items()},
    }


def _config(vocabulary: GgufVocabulary, metadata: Mapping[str, Any]) -> str:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: vocabulary.tokens[index] for name, index in named_tokens(vocabulary).items()},
    }
    templates = {
        "default" if key == _TEMPLATE else key[len(_TEMPLATE) + 1 :]: key for key in metadata if _is_template_key(key)
    }
    for key in templates.values():
        if not isinstance(metadata[key], str):
            vocabulary.refuse(f"{key} should be a str, not a {type(metadata[key]).__name__}")
    if set(templates) == {"default"}:
        config["chat_template"] = metadata[_TEMPLATE]
    elif templates:
        config["chat_template"] = [{"name": name, "template": metadata[key]} for name, key in templates.items()]
    return json.dumps(config, indent=2)


def _is_template_key(key: object) -> bool:
    return isinstance(key, str) and (key == _TEMPLATE or key.startswith(_TEMPLATE + "."))


def _check(text: str, vocabulary: GgufVocabulary) -> None:
    """Refuse, while the file's name is known, what the library that reads the text would refuse."""
    try:
        made = tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside the Rust library is not an Exception
        vocabulary.refuse(f"its vocabulary does not hold together ({' '.join(str(error).split())[:200]})")
    if made.get_vocab_size(with_added_tokens=True) != len(vocabulary.tokens):
        vocabulary.refuse("its vocabulary does not hold together")


_CONFIG = "tokenizer_config.json"

# Tokenizers that are no class of transformers, and whose code does no more than what is done here.
_KNOWN_TOKENIZER_CLASSES = frozenset(
    {
        *("BaichuanTokenizer", "InternLMTokenizer", "InternLM2Tokenizer", "InternLM3Tokenizer", "OrionTokenizer"),
        *("QWenTokenizer", "TikTokenTokenizer", "XverseTokenizer", "YiTokenizer"),
    }
)


@dataclass(frozen=True, slots=True)
class _BosEos:
    """Whether a text begins with the bos token and ends with the eos token."""

    bos: bool
    eos: bool


def tokenizer_files(file: Path) -> TokenizerFiles:
    """The files made from a vocabulary and what lies beside it in its directory. Raises LoadError, one line.

    file: tokenizer.model (SentencePiece's or tiktoken's), tekken.json, tiktoken.model or a name that ends with .tiktoken.
    """
    directory = file.parent
    config = read_json(directory / _CONFIG)
    _check_code(file, config)
    try:
        vocabulary = _read(file, config)
        backend = _backend(vocabulary, file)
        named, extra = special_tokens(directory, config)
        for name, token in vocabulary.named.items():
            if name not in config:  # null there says that the model has none
                named.setdefault(name, token)
        add_missing_tokens(backend, directory, config, named, extra)
        _add_bos_eos(
            backend, {name: token_content(token) for name, token in named.items()}, _bos_eos(vocabulary, config)
        )
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise LoadError(
            f"cannot understand {_CONFIG} in {directory} ({one_line(error)}): fetch the file again"
        ) from error
    texts = {name: token for name, token in vocabulary.named.items() if name not in config}
    return TokenizerFiles(backend.to_str(), json.dumps(config | texts, indent=2), vocabulary.notices)


def _check_code(file: Path, config: dict[str, Any]) -> None:
    """Refuse a tokenizer that is a program of the model's own, where it is not known what that does."""
    name = str(config.get("tokenizer_class") or "")
    code = config.get("auto_map")
    if isinstance(code, dict) and "AutoTokenizer" in code and name not in _KNOWN_TOKENIZER_CLASSES:
        raise LoadError(
            f"the tokenizer of {file.parent} is a program of its own ({name or 'AutoTokenizer'}), which is not run: save it as "
            "tokenizer.json, or get a version of the model that has one"
        )


def _read(file: Path, config: dict[str, Any]) -> TokenizerParts:
    data = read_bytes(file)
    if file.name == tiktoken.TEKKEN_FILE:
        return tiktoken.read_tekken(data, str(file))
    if file.suffix == ".tiktoken" or file.name == tiktoken.TIKTOKEN_FILE or tiktoken.is_tiktoken(data):
        model_type = read_json(file.parent / "config.json").get("model_type")
        return tiktoken.read_tiktoken(data, file, config, str(model_type))
    try:
        from windlass.server.text.vocabularies.sentencepiece import read_pieces
    except ModuleNotFoundError as error:
        raise LoadError(f"{file} is read with {error.name}, which is not installed: pip install protobuf") from None
    return read_pieces(data, str(file), config)


def _backend(vocabulary: TokenizerParts, file: Path) -> tokenizers.Tokenizer:
    content = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, **vocabulary.parts}
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside the Rust library is not an Exception
        raise LoadError(
            f"cannot make a tokenizer from {file}: its vocabulary does not hold together ({one_line(error)}); fetch it again"
        ) from error
    if backend.get_vocab_size(with_added_tokens=True) != vocabulary.size:
        raise LoadError(
            f"cannot make a tokenizer from {file}: its vocabulary does not hold together; fetch the file again"
        )
    return backend


def _bos_eos(vocabulary: TokenizerParts, config: dict[str, Any]) -> _BosEos:
    bos, eos = config.get("add_bos_token"), config.get("add_eos_token")
    return _BosEos(vocabulary.add_bos if bos is None else bool(bos), bool(eos))


def _add_bos_eos(backend: tokenizers.Tokenizer, named: dict[str, str], bos_eos: _BosEos) -> None:
    before = [named["bos_token"]] if bos_eos.bos and "bos_token" in named else []
    after = [named["eos_token"]] if bos_eos.eos and "eos_token" in named else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0", *after],
            pair=[
                *before,
                "$A:0",
                *after,
                *(f"{token}:1" for token in before),
                "$B:1",
                *(f"{token}:1" for token in after),
            ],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *after}],
        )
