"""Makes tokenizer.json and tokenizer_config.json of a model that has its vocabulary in another file.

Responsible for the whole: which reader a file needs, the tokens that are declared beside it, and what is put before and behind a
text. Writes no file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from windlass.engine.errors import LoadError
from windlass.server.text.gguf.tokenizer_files import TokenizerFiles
from windlass.server.text.special_tokens import add_missing_tokens, content_of, one_line, read_json, special_tokens
from windlass.server.text.vocabularies import tekken, tiktoken_file
from windlass.server.text.vocabularies.reading import ReadVocabulary, read_bytes

_CONFIG = "tokenizer_config.json"
# Tokenizers that are no class of transformers, and whose code does no more than what is done here.
_KNOWN_CODE = frozenset(
    {
        *("BaichuanTokenizer", "InternLMTokenizer", "InternLM2Tokenizer", "InternLM3Tokenizer", "OrionTokenizer"),
        *("QWenTokenizer", "TikTokenTokenizer", "XverseTokenizer", "YiTokenizer"),
    }
)


@dataclass(frozen=True, slots=True)
class _Ends:
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
        _add_ends(backend, {name: content_of(token) for name, token in named.items()}, _ends(vocabulary, config))
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
    if isinstance(code, dict) and "AutoTokenizer" in code and name not in _KNOWN_CODE:
        raise LoadError(
            f"the tokenizer of {file.parent} is a program of its own ({name or 'AutoTokenizer'}), which is not run: save it as "
            "tokenizer.json, or get a version of the model that has one"
        )


def _read(file: Path, config: dict[str, Any]) -> ReadVocabulary:
    data = read_bytes(file)
    if file.name == tekken.FILE:
        return tekken.read_tekken(data, str(file))
    if file.suffix == ".tiktoken" or file.name == tiktoken_file.FILE or tiktoken_file.is_tiktoken(data):
        model_type = read_json(file.parent / "config.json").get("model_type")
        return tiktoken_file.read_tiktoken(data, file, config, str(model_type))
    try:
        from windlass.server.text.vocabularies.pieces import read_pieces  # here: only this form needs protobuf
    except ModuleNotFoundError as error:
        raise LoadError(f"{file} is read with {error.name}, which is not installed: pip install protobuf") from None
    return read_pieces(data, str(file), config)


def _backend(vocabulary: ReadVocabulary, file: Path) -> tokenizers.Tokenizer:
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


def _ends(vocabulary: ReadVocabulary, config: dict[str, Any]) -> _Ends:
    bos, eos = config.get("add_bos_token"), config.get("add_eos_token")
    return _Ends(vocabulary.add_bos if bos is None else bool(bos), bool(eos))


def _add_ends(backend: tokenizers.Tokenizer, named: dict[str, str], ends: _Ends) -> None:
    before = [named["bos_token"]] if ends.bos and "bos_token" in named else []
    behind = [named["eos_token"]] if ends.eos and "eos_token" in named else []
    if before or behind:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0", *behind],
            pair=[
                *before,
                "$A:0",
                *behind,
                *(f"{token}:1" for token in before),
                "$B:1",
                *(f"{token}:1" for token in behind),
            ],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *behind}],
        )
