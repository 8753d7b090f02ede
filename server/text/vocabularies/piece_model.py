"""Reads a SentencePiece model (tokenizer.model): its pieces and how it normalizes a text.

Responsible for the file's form alone, a protobuf message (google/sentencepiece, src/sentencepiece_model.proto). Only the fields
that are read are described here, so protobuf is enough and neither SentencePiece nor generated code is needed. Knows nothing of
tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from windlass.engine.errors import LoadError


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
_KINDS = {bytes: _Field.TYPE_BYTES, bool: _Field.TYPE_BOOL, int: _Field.TYPE_INT32, float: _Field.TYPE_FLOAT}
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
                type=_KINDS[type(default)],
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
