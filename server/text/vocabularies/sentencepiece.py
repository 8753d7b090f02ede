"""Reader of SentencePiece models (tokenizer.model)."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from windlass.engine.errors import LoadError
from windlass.server.text.vocabularies.bpe import SPACE, scored_parts, sentencepiece_decoder
from windlass.server.text.vocabularies.vocabulary import (
    MAX_TOKENS,
    GgufVocabulary,
    TokenizerParts,
    TokenType,
    gguf_added_tokens,
    read_vocabulary,
    refuse_vocabulary,
)

# SentencePiece's rules "nmt_nfkc" in addition to NFKC (src/builder.cc): removed, replaced by a space, unchanged.
_REMOVED = r"[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f]"
_SPACES = r"[\t\n\f\r\u061c\u1680\u200b\u200c\u200e\u200f\u2028\u2029\u2581\ufeff\ufffd]"
_SPACE_BEFORE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
_MAX_SPACES = 2**31 - 1  # SentencePiece removes all leading spaces of decoded text if it strips spaces
_TILDE, _TILDE_PLACEHOLDER = "\uff5e", "\ufdd0"  # full-width tilde, and a noncharacter that replaces it during NFKC
_PIECE_TAG = b"\n"  # the byte before each piece, and before the text in it; seldom elsewhere
_Field = descriptor_pb2.FieldDescriptorProto
_FIELD_TYPES = {bytes: _Field.TYPE_BYTES, bool: _Field.TYPE_BOOL, int: _Field.TYPE_INT32, float: _Field.TYPE_FLOAT}
# Fields by message: name -> (number, default). Texts are read as bytes, so that invalid UTF-8 can be detected.
_FIELDS: dict[str, dict[str, tuple[int, Any]]] = {
    "Piece": {"piece": (1, b""), "score": (2, 0.0), "type": (3, 1)},
    "Trainer": {
        "model_type": (3, 1),
        "treat_whitespace_as_suffix": (24, False),
        "byte_fallback": (35, False),
        "unk_id": (40, 0),
        "bos_id": (41, 1),
        "eos_id": (42, 2),
        "pad_id": (43, -1),
    },
    "Normalizer": {
        "name": (1, b""),
        "precompiled_charsmap": (2, b""),
        "add_dummy_prefix": (3, True),
        "remove_extra_whitespaces": (4, True),
        "escape_whitespaces": (5, True),
    },
}


class ModelType(IntEnum):
    """Algorithm that splits a text into pieces, numbered like `TrainerSpec.model_type`."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


def read_pieces(data: bytes, source: str, config: Mapping[str, Any]) -> TokenizerParts:
    """Read the bytes of the SentencePiece model `source`. Raises LoadError, one line.

    config: of tokenizer_config.json. With `legacy: false`, a space is put before the text only, and not after each special
    token.
    """
    model, pieces = _parse(data, source)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    scores = [piece.score for piece in model.pieces]
    ids = {name: getattr(trainer, f"{name}_id") for name in ("unk", "bos", "eos", "pad")}
    special = {name: index for name, index in ids.items() if 0 <= index < len(pieces)}
    metadata = {
        "model": "llama",
        "tokens": pieces,
        "scores": scores,
        "token_type": [piece.type for piece in model.pieces],
        **({"unknown_token_id": special["unk"]} if "unk" in special else {}),
    }
    vocabulary = read_vocabulary({f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, source)
    _check(model, vocabulary)
    # SentencePiece finds user-defined symbols in the normalized text.
    added = [token | {"normalized": not token["special"]} for token in gguf_added_tokens(vocabulary)]
    symbols = [token["content"] for token in added if token["normalized"]]
    add_space = normalizer.add_dummy_prefix and config.get("add_prefix_space") is not False
    first_only = add_space and config.get("legacy") is False
    pre_tokenizer = _SPACE_BEFORE if first_only else None
    if trainer.model_type == ModelType.BPE:
        tokenizer_model = scored_parts(vocabulary)["model"] | {"byte_fallback": trainer.byte_fallback}
    else:
        if trainer.byte_fallback:
            # `<0x41>` in a text is not a byte. Split in two, it is not recognized as the piece of that name.
            cut = {"type": "Split", "pattern": {"Regex": r"<(?=0x[0-9A-F]{2}>)"}, "behavior": "MergedWithPrevious"}
            steps = [step for step in (pre_tokenizer, cut | {"invert": False}) if step is not None]
            pre_tokenizer = {"type": "Sequence", "pretokenizers": steps}
        tokenizer_model = {
            "type": "Unigram",
            "unk_id": special["unk"],
            "vocab": [list(pair) for pair in zip(vocabulary.tokens, scores, strict=True)],
            "byte_fallback": trainer.byte_fallback,
        }
    space_before_each = add_space and not first_only
    parts = {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(normalizer, space_before_each, symbols)},
        "pre_tokenizer": pre_tokenizer,
        "decoder": sentencepiece_decoder(_MAX_SPACES if normalizer.remove_extra_whitespaces else int(add_space)),
        "model": tokenizer_model,
    }
    named = {f"{name}_token": pieces[index] for name, index in special.items()}
    return TokenizerParts(parts, len(pieces), named, add_bos=True)


def _parse(data: bytes, source: str) -> tuple[Any, list[str]]:
    """Return the ModelProto and the texts of its pieces. Raises LoadError, one line."""
    if data.count(_PIECE_TAG) > 2 * MAX_TOKENS:
        refuse_vocabulary(source, "its vocabulary is larger than that of any model; fetch the file again")
    try:
        model = _message().FromString(data)
        pieces = [piece.piece.decode("utf-8") for piece in model.pieces]
    except (DecodeError, UnicodeDecodeError):
        model, pieces = None, []
    if model is None or not pieces:
        raise LoadError(
            f"{source} is not a SentencePiece model: fetch the file again, or save the tokenizer as tokenizer.json"
        )
    if not (model.HasField("trainer_spec") and model.HasField("normalizer_spec")):  # they follow the pieces
        raise LoadError(f"{source} is truncated: fetch the file again")
    return model, pieces


@cache
def _message() -> Any:
    """Return a ModelProto class with these fields, in a separate pool because SentencePiece may register its own."""
    file = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package="pieces", syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, default) in fields.items():
            text = str(default).lower() if isinstance(default, bool) else str(default)
            message.field.add(
                name=field,
                number=number,
                type=_FIELD_TYPES[type(default)],
                label=_Field.LABEL_OPTIONAL,
                default_value=None if isinstance(default, bytes) else text,
            )
    model = file.message_type.add(name="Model")
    for number, field, kind, label in (
        (1, "pieces", "Piece", _Field.LABEL_REPEATED),
        (2, "trainer_spec", "Trainer", _Field.LABEL_OPTIONAL),
        (3, "normalizer_spec", "Normalizer", _Field.LABEL_OPTIONAL),
    ):
        model.field.add(name=field, number=number, type=_Field.TYPE_MESSAGE, type_name=f".pieces.{kind}", label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pieces.Model"))


def _check(model: Any, vocabulary: GgufVocabulary) -> None:
    trainer = model.trainer_spec
    if trainer.model_type not in (ModelType.BPE, ModelType.UNIGRAM):
        vocabulary.refuse("it is a SentencePiece model of words or characters; BPE and unigram are supported")
    if trainer.treat_whitespace_as_suffix or not model.normalizer_spec.escape_whitespaces:
        vocabulary.refuse("its treatment of spaces is not supported (treat_whitespace_as_suffix, escape_whitespaces)")
    if not 0 <= trainer.unk_id < len(vocabulary.tokens):
        vocabulary.refuse("it has no unknown piece")
    if TokenType.UNUSED in vocabulary.types:
        vocabulary.refuse("some of its pieces are marked as unused")


def _normalizers(normalizer: Any, space_before_each: bool, symbols: list[str]) -> list[dict[str, Any]]:
    """Return the normalizers of tokenizer.json. symbols: user-defined tokens.

    space_before_each: whether a space is put before the text and after each special token.
    """
    steps: list[dict[str, Any]] = []
    charsmap, rules = normalizer.precompiled_charsmap, normalizer.name.decode("utf-8", "replace")
    if charsmap and rules in ("nfkc", "nmt_nfkc"):
        # `Precompiled` would process one grapheme at a time and lose parts of some.
        nmt = [_replace(_REMOVED, ""), _replace(_SPACES, " "), _replace(_TILDE, _TILDE_PLACEHOLDER)]
        steps += (
            [*nmt, {"type": "NFKC"}, _replace(_TILDE_PLACEHOLDER, _TILDE)]
            if rules == "nmt_nfkc"
            else [{"type": "NFKC"}]
        )
    elif charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode("ascii")})
    if normalizer.remove_extra_whitespaces:
        steps += [_replace(" {2,}", " "), _replace(rf"\A +|[ {SPACE}]+\z", "")]
    if space_before_each:
        # Added tokens are normalized too before they are searched for, so a text that is only a symbol must not get a space.
        # SentencePiece inserts one there.
        if symbols:
            alone = "|".join(re.escape(symbol) for symbol in symbols)
            steps.append(_replace(rf"\A(?!(?:{alone})\z)(?=[\s\S])", SPACE))
        else:
            steps.append({"type": "Prepend", "prepend": SPACE})
    return [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
