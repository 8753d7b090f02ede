"""SentencePiece models, unigram and BPE, as tokenizer.json has them: model, normalizer, pre-tokenizer, decoder, added tokens.

Responsible for the same ids, offsets and text as SentencePiece's own. Knows nothing of files, nor of what stands before and
behind a text.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.server.text.gguf.fields import GgufVocabulary, TokenType, read_vocabulary
from windlass.server.text.gguf.sentence_piece import SPACE, scored_parts
from windlass.server.text.gguf.special_tokens import found_tokens
from windlass.server.text.vocabularies.piece_model import ModelType, PieceModel, read_piece_model
from windlass.server.text.vocabularies.reading import ReadVocabulary, added_token

# SentencePiece's rules "nmt_nfkc" beyond NFKC (src/builder.cc): what becomes nothing, what becomes a space, what stays.
_REMOVED = r"[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f]"
_SPACES = r"[\t\n\f\r\u061c\u1680\u200b\u200c\u200e\u200f\u2028\u2029\u2581\ufeff\ufffd]"
_SPACE_BEFORE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
_MOST_SPACES = 2**31 - 1  # where SentencePiece strips spaces it drops all of a beginning, one a piece
_KEPT, _ASIDE = "\uff5e", "\ufdd0"  # the full-width tilde, and a noncharacter that stands for it meanwhile


@dataclass(frozen=True, slots=True)
class PrefixRule:
    """before: whether a space is put before a text. once: not again behind a special token inside it."""

    before: bool
    once: bool = False


def read_pieces(data: bytes, source: str, config: Mapping[str, Any]) -> ReadVocabulary:
    """The vocabulary in a SentencePiece file's bytes; `source` names the file. Raises LoadError, one line.

    config: of tokenizer_config.json. `legacy: false` there puts a space before the text only, and not behind each special token.
    """
    model = read_piece_model(data, source)
    prefix = PrefixRule(
        model.space_prefix and config.get("add_prefix_space") is not False, config.get("legacy") is False
    )
    named = {f"{name}_token": model.pieces[index] for name, index in model.special.items()}
    return ReadVocabulary(piece_parts(model, source, prefix), len(model.pieces), named, add_bos=True)


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
        for token in found_tokens(vocabulary)
    ]
    symbols = [token["content"] for token in added if token["normalized"]]
    parts: dict[str, Any] = {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model, prefix, symbols)},
        "pre_tokenizer": _SPACE_BEFORE if prefix.before and prefix.once else None,
        "decoder": _decoder(_MOST_SPACES if model.strips_spaces else int(prefix.before)),
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
        nmt = [_replace(_REMOVED, ""), _replace(_SPACES, " "), _replace(_KEPT, _ASIDE)]
        steps += [*nmt, {"type": "NFKC"}, _replace(_ASIDE, _KEPT)] if model.rules == "nmt_nfkc" else [{"type": "NFKC"}]
    elif model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode("ascii")})
    if model.strips_spaces:
        steps += [_replace(" {2,}", " "), _replace(rf"\A +|[ {SPACE}]+\z", "")]
    if prefix.before and not prefix.once:
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
