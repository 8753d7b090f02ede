"""tokenizer.json and tokenizer_config.json made from a GGUF file's metadata, so that all else reads them as any model's.

Responsible for the whole: which kinds of tokenizer there are, and the files' contents. Reads and writes no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from windlass.server.text.gguf.byte_level import byte_level_parts, word_rules
from windlass.server.text.gguf.fields import GgufVocabulary, read_vocabulary
from windlass.server.text.gguf.sentence_piece import ranked_parts, scored_parts
from windlass.server.text.gguf.special_tokens import found_tokens, named_tokens, start_and_end

_TEMPLATE = "tokenizer.chat_template"
# What files of the kind `llama` mean where they name no token (llama.cpp, src/llama-vocab.cpp).
_SENTENCE_PIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """tokenizer, config: the texts of tokenizer.json and tokenizer_config.json. notices: what their user should know, by line."""

    tokenizer: str
    config: str
    notices: tuple[str, ...] = ()


def tokenizer_files(metadata: Mapping[str, Any], source: str) -> TokenizerFiles:
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
        parts = ranked_parts(vocabulary)
    else:
        vocabulary.refuse(
            f"tokenizer.ggml.model is {vocabulary.kind[:80]!r}, and gpt2, llama and gemma4 are the kinds read here"
        )
    start, end = start_and_end(vocabulary, bos=bos)
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
        for token in found_tokens(vocabulary)
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
    templates = {"default" if key == _TEMPLATE else key[len(_TEMPLATE) + 1 :]: key for key in metadata if _names(key)}
    for key in templates.values():
        if not isinstance(metadata[key], str):
            vocabulary.refuse(f"{key} should be a str, not a {type(metadata[key]).__name__}")
    if set(templates) == {"default"}:
        config["chat_template"] = metadata[_TEMPLATE]
    elif templates:
        config["chat_template"] = [{"name": name, "template": metadata[key]} for name, key in templates.items()]
    return json.dumps(config, indent=2)


def _names(key: object) -> bool:
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
