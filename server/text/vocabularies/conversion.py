"""Conversion of other vocabulary files to tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import processors

from windlass.engine.errors import LoadError
from windlass.server.text.tokenizer_files import add_missing_tokens, one_line, read_json, special_tokens, token_content
from windlass.server.text.vocabularies import tiktoken
from windlass.server.text.vocabularies.bpe import gguf_byte_level_parts, merge_list_parts, scored_parts, word_rules
from windlass.server.text.vocabularies.vocabulary import (
    GgufVocabulary,
    TokenizerParts,
    bos_eos_ids,
    gguf_added_tokens,
    named_tokens,
    read_bytes,
    read_vocabulary,
    refuse_vocabulary,
)

_CONFIG = "tokenizer_config.json"
_TEMPLATE = "tokenizer.chat_template"
# Default token ids of GGUF files with the vocabulary `llama` (llama.cpp, src/llama-vocab.cpp).
_SENTENCE_PIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}
# Tokenizer classes outside transformers whose code does nothing that this conversion does not do.
_KNOWN_TOKENIZER_CLASSES = frozenset(
    {
        *("BaichuanTokenizer", "InternLMTokenizer", "InternLM2Tokenizer", "InternLM3Tokenizer", "OrionTokenizer"),
        *("QWenTokenizer", "TikTokenTokenizer", "XverseTokenizer", "YiTokenizer"),
    }
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """tokenizer, config: text of tokenizer.json and tokenizer_config.json. notices: lines to show to the user."""

    tokenizer: str
    config: str
    notices: tuple[str, ...] = ()


def gguf_tokenizer_files(metadata: Mapping[str, Any], source: str) -> TokenizerFiles:
    """Convert the tokenizer in the metadata of the GGUF file `source`.

    metadata: key -> bool, int, float, str or a list of these. Raises LoadError, one line, for invalid, too large and
    unsupported vocabularies.
    """
    vocabulary = read_vocabulary(metadata, source)
    notices: list[str] = []
    bos = False
    if vocabulary.kind == "gpt2":
        parts = gguf_byte_level_parts(vocabulary)
        bos = word_rules(vocabulary).add_bos
        if not vocabulary.pre:
            notices.append(
                f"{source} does not name its word rules (tokenizer.ggml.pre), so its tokens may differ from those of the "
                "model's training: convert the model again"
            )
    elif vocabulary.kind == "llama":
        ids = {name: index for name, index in _SENTENCE_PIECE_IDS.items() if index < len(vocabulary.tokens)}
        vocabulary = replace(vocabulary, special=ids | vocabulary.special)
        parts = scored_parts(vocabulary)
        bos = True
    elif vocabulary.kind == "gemma4":
        vocabulary = replace(vocabulary, add_bos=True)  # files have false by mistake; llama.cpp corrects it too
        parts = merge_list_parts(vocabulary)
    else:
        vocabulary.refuse(
            f"tokenizer.ggml.model is {vocabulary.kind[:80]!r}; gpt2, llama and gemma4 are the supported kinds"
        )
    before, after = ([(vocabulary.tokens[index], index) for index in ids] for ids in bos_eos_ids(vocabulary, bos=bos))
    parts = {
        "added_tokens": gguf_added_tokens(vocabulary),
        "post_processor": _post_processor(before, after) if before or after else None,
        **parts,
    }
    _, text = _load(parts, len(vocabulary.tokens), vocabulary.refuse)
    return TokenizerFiles(text, _config(vocabulary, metadata), tuple(notices))


def tokenizer_files(file: Path) -> TokenizerFiles:
    """Convert a vocabulary file, with the configuration files in its directory. Raises LoadError, one line.

    file: tokenizer.model (SentencePiece or tiktoken), tekken.json, tiktoken.model or a name that ends with .tiktoken.
    """
    directory = file.parent
    config = read_json(directory / _CONFIG)
    _check_code(file, config)

    def refuse(reason: str) -> NoReturn:
        refuse_vocabulary(str(file), f"{reason}; fetch the file again")

    def added_at_end(name: str, default: bool) -> list[tuple[str, int]]:
        wanted = config.get(f"add_{name}")
        if name not in named or not (default if wanted is None else wanted):
            return []
        text = token_content(named[name])
        index = backend.token_to_id(text)
        return [] if index is None else [(text, index)]

    try:
        vocabulary = _read(file, config)
        backend, _ = _load({"post_processor": None, **vocabulary.parts}, vocabulary.size, refuse)
        named, extra = special_tokens(directory, config)
        for name, token in vocabulary.named.items():
            if name not in config:  # null there means that the model has none
                named.setdefault(name, token)
        add_missing_tokens(backend, directory, config, named, extra)
        before = added_at_end("bos_token", vocabulary.add_bos)
        after = added_at_end("eos_token", False)
        if before or after:
            processor = processors.TemplateProcessing()
            processor.__setstate__(json.dumps(_post_processor(before, after)).encode())
            backend.post_processor = processor
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise LoadError(
            f"cannot understand {_CONFIG} in {directory} ({one_line(error)}): fetch the file again"
        ) from error
    texts = {name: token for name, token in vocabulary.named.items() if name not in config}
    return TokenizerFiles(backend.to_str(), json.dumps(config | texts, indent=2), vocabulary.notices)


def _load(parts: Mapping[str, Any], size: int, refuse: Callable[[str], NoReturn]) -> tuple[tokenizers.Tokenizer, str]:
    """Load a generated tokenizer; return it and the text of its tokenizer.json.

    Calls `refuse` if the library rejects the parts, or if the tokenizer does not have `size` tokens.
    """
    text = json.dumps({"version": "1.0", "truncation": None, "padding": None, **parts}, ensure_ascii=False)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside the Rust library is not an Exception
        refuse(f"its vocabulary is inconsistent ({one_line(error)})")
    if backend.get_vocab_size(with_added_tokens=True) != size:
        refuse("its vocabulary is inconsistent")
    return backend, text


def _post_processor(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return the post-processor that puts tokens (text and id) before and after a text."""

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        special = [
            [{"SpecialToken": {"id": text, "type_id": type_id}} for text, _ in tokens] for tokens in (before, after)
        ]
        return [*special[0], {"Sequence": {"id": name, "type_id": type_id}}, *special[1]]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in (*before, *after)},
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


def _check_code(file: Path, config: dict[str, Any]) -> None:
    """Refuse a tokenizer that requires unknown Python code of the model."""
    name = str(config.get("tokenizer_class") or "")
    code = config.get("auto_map")
    if isinstance(code, dict) and "AutoTokenizer" in code and name not in _KNOWN_TOKENIZER_CLASSES:
        raise LoadError(
            f"the tokenizer of {file.parent} requires the model's own code ({name or 'AutoTokenizer'}), which is not executed: "
            "save it as tokenizer.json, or fetch a version of the model that has one"
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
        raise LoadError(f"{file} requires {error.name}, which is not installed: run pip install protobuf") from None
    return read_pieces(data, str(file), config)
