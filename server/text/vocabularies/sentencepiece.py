"""SentencePiece models: reader and conversion to tokenizer.json."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from windlass.engine.errors import LoadError
from windlass.server.text.vocabularies.bpe import SPACE, scored_parts
from windlass.server.text.vocabularies.vocabulary import (
    GgufVocabulary,
    TokenizerParts,
    TokenType,
    added_token,
    gguf_added_tokens,
    read_vocabulary,
)


class ModelType(IntEnum):
    """How a text is cut into pieces, as `TrainerSpec.model_type` numbers it."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True, slots=True)
class PieceModel:
    """What a tokenizer.model says. pieces, scores, types are parallel; types are numbered as those of GGUF files are.

    special: ids by the short names "unk", "bos", "eos", "pad", as far as the model has them. rules: the name of the
    normalization; charsmap: its compiled form, empty where text is taken as it is.
    """

    kind: int
    pieces: list[str]
    scores: list[float]
    types: list[int]
    special: dict[str, int]
    byte_fallback: bool
    space_suffix: bool
    space_prefix: bool
    strips_spaces: bool
    escapes_spaces: bool
    rules: str
    charsmap: bytes


def read_piece_model(data: bytes, source: str) -> PieceModel:
    """The model in a file's bytes; `source` names the file. Raises LoadError, one line, for what is no such file."""
    try:
        proto = _message().FromString(data)
        pieces = [piece.piece.decode("utf-8") for piece in proto.pieces]
    except (DecodeError, UnicodeDecodeError):
        proto, pieces = None, []
    if proto is None or not pieces:
        raise LoadError(
            f"{source} is no SentencePiece model: fetch the file again, or save the tokenizer as tokenizer.json"
        )
    if not (proto.HasField("trainer_spec") and proto.HasField("normalizer_spec")):  # they stand behind the pieces
        raise LoadError(f"{source} is cut off: fetch the file again")
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    types = [piece.type for piece in proto.pieces]
    ids = {name: getattr(trainer, f"{name}_id") for name in ("unk", "bos", "eos", "pad")}
    return PieceModel(
        kind=trainer.model_type,
        pieces=pieces,
        scores=[piece.score for piece in proto.pieces],
        types=types,
        special={name: index for name, index in ids.items() if 0 <= index < len(pieces)},
        byte_fallback=trainer.byte_fallback,
        space_suffix=trainer.treat_whitespace_as_suffix,
        space_prefix=normalizer.add_dummy_prefix,
        strips_spaces=normalizer.remove_extra_whitespaces,
        escapes_spaces=normalizer.escape_whitespaces,
        rules=normalizer.name.decode("utf-8", "replace"),
        charsmap=normalizer.precompiled_charsmap,
    )


_Field = descriptor_pb2.FieldDescriptorProto

_FIELD_TYPES = {bytes: _Field.TYPE_BYTES, bool: _Field.TYPE_BOOL, int: _Field.TYPE_INT32, float: _Field.TYPE_FLOAT}

# Fields by message: name -> (number, default). Strings of pieces are read as bytes, so that broken ones are told apart.
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


@cache
def _message() -> Any:
    """The class of a ModelProto with these fields. It lives in a pool of its own: SentencePiece may be there and have its own."""
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
    whole = file.message_type.add(name="Model")
    for number, field, of, label in (
        (1, "pieces", "Piece", _Field.LABEL_REPEATED),
        (2, "trainer_spec", "Trainer", _Field.LABEL_OPTIONAL),
        (3, "normalizer_spec", "Normalizer", _Field.LABEL_OPTIONAL),
    ):
        whole.field.add(name=field, number=number, type=_Field.TYPE_MESSAGE, type_name=f".pieces.{of}", label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pieces.Model"))


# SentencePiece's rules "nmt_nfkc" beyond NFKC (src/builder.cc): what becomes nothing, what becomes a space, what stays.
_REMOVED = r"[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f]"

_SPACES = r"[\t\n\f\r\u061c\u1680\u200b\u200c\u200e\u200f\u2028\u2029\u2581\ufeff\ufffd]"

_SPACE_BEFORE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}

_MAX_SPACES = 2**31 - 1  # where SentencePiece strips spaces it drops all of a beginning, one a piece

_TILDE, _TILDE_PLACEHOLDER = "\uff5e", "\ufdd0"  # the full-width tilde, and a noncharacter that stands for it meanwhile


@dataclass(frozen=True, slots=True)
class PrefixRule:
    """before: whether a space is put before a text. once: not again behind a special token inside it."""

    add_space: bool
    first_only: bool = False


def read_pieces(data: bytes, source: str, config: Mapping[str, Any]) -> TokenizerParts:
    """The vocabulary in a SentencePiece file's bytes; `source` names the file. Raises LoadError, one line.

    config: of tokenizer_config.json. `legacy: false` there puts a space before the text only, and not behind each special token.
    """
    model = read_piece_model(data, source)
    prefix = PrefixRule(
        model.space_prefix and config.get("add_prefix_space") is not False, config.get("legacy") is False
    )
    named = {f"{name}_token": model.pieces[index] for name, index in model.special.items()}
    return TokenizerParts(piece_parts(model, source, prefix), len(model.pieces), named, add_bos=True)


def piece_parts(model: PieceModel, source: str, prefix: PrefixRule) -> dict[str, Any]:
    """The parts of tokenizer.json by name; `source` names the file. Raises LoadError for what cannot be done the same way."""
    metadata = {
        "model": "llama",
        "tokens": model.pieces,
        "scores": model.scores,
        "token_type": model.types,
        **({"unknown_token_id": model.special["unk"]} if "unk" in model.special else {}),
    }
    vocabulary = read_vocabulary({f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, source)
    _check(model, vocabulary)
    # SentencePiece looks for a user's symbols in the normalized text.
    added = [
        added_token(token.id, token.text, special=token.special, normalized=not token.special)
        for token in gguf_added_tokens(vocabulary)
    ]
    symbols = [token["content"] for token in added if token["normalized"]]
    parts: dict[str, Any] = {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model, prefix, symbols)},
        "pre_tokenizer": _SPACE_BEFORE if prefix.add_space and prefix.first_only else None,
        "decoder": _decoder(_MAX_SPACES if model.strips_spaces else int(prefix.add_space)),
    }
    if model.kind == ModelType.BPE:
        return parts | {"model": scored_parts(vocabulary)["model"] | {"byte_fallback": model.byte_fallback}}
    if model.byte_fallback:
        # `<0x41>` as a caller writes it is no byte: cut in two, it cannot be taken for the piece of that name.
        cut = {"type": "Split", "pattern": {"Regex": r"<(?=0x[0-9A-F]{2}>)"}, "behavior": "MergedWithPrevious"}
        parts["pre_tokenizer"] = _sequence(parts["pre_tokenizer"], cut | {"invert": False})
    pairs = [list(pair) for pair in zip(vocabulary.tokens, model.scores, strict=True)]
    return parts | {
        "model": {
            "type": "Unigram",
            "unk_id": model.special["unk"],
            "vocab": pairs,
            "byte_fallback": model.byte_fallback,
        }
    }


def _check(model: PieceModel, vocabulary: GgufVocabulary) -> None:
    if model.kind not in (ModelType.BPE, ModelType.UNIGRAM):
        vocabulary.refuse("it is a SentencePiece model of words or characters, and those of BPE and unigram are read")
    if model.space_suffix or not model.escapes_spaces:
        vocabulary.refuse(
            "it treats spaces in a way that is not known here (treat_whitespace_as_suffix, escape_whitespaces)"
        )
    if "unk" not in model.special:
        vocabulary.refuse("it has no piece for what is unknown")
    if TokenType.UNUSED in model.types:
        vocabulary.refuse("some of its pieces are marked as unused")


def _normalizers(model: PieceModel, prefix: PrefixRule, symbols: list[str]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if model.charsmap and model.rules in ("nfkc", "nmt_nfkc"):
        # By the rules' name and not by `Precompiled`, which takes the text a grapheme at a time and loses parts of some.
        nmt = [_replace(_REMOVED, ""), _replace(_SPACES, " "), _replace(_TILDE, _TILDE_PLACEHOLDER)]
        steps += (
            [*nmt, {"type": "NFKC"}, _replace(_TILDE_PLACEHOLDER, _TILDE)]
            if model.rules == "nmt_nfkc"
            else [{"type": "NFKC"}]
        )
    elif model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode("ascii")})
    if model.strips_spaces:
        steps += [_replace(" {2,}", " "), _replace(rf"\A +|[ {SPACE}]+\z", "")]
    if prefix.add_space and not prefix.first_only:
        # What is added is normalized too before it is looked for, so a text that is a symbol and no more gets no space, while
        # SentencePiece puts one there.
        if symbols:
            alone = "|".join(re.escape(symbol) for symbol in symbols)
            steps.append(_replace(rf"\A(?!(?:{alone})\z)(?=[\s\S])", SPACE))
        else:
            steps.append({"type": "Prepend", "prepend": SPACE})
    return [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def _decoder(spaces: int) -> dict[str, Any]:
    """spaces: how many are dropped from the start of a text, at most."""
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spaces:
        steps.append({"type": "Strip", "content": " ", "start": spaces, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _sequence(*steps: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [step for step in steps if step is not None]}
