"""Bytes of single tokens, from the decoder of a tokenizer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _char_to_byte() -> dict[str, int]:
    """Return GPT-2's alphabet, printable character -> byte (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


_CHAR_TO_BYTE = _char_to_byte()
_BYTE_TO_CHAR = {byte: char for char, byte in _CHAR_TO_BYTE.items()}


def byte_level_text(data: bytes) -> str:
    """Return a token's bytes in the alphabet of byte-level vocabularies."""
    return "".join(_BYTE_TO_CHAR[byte] for byte in data)


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """Decoder of single tokens, equivalent to the tokenizer's decoder of sequences.

    byte_level: tokens are written in GPT-2's byte alphabet. replacements: substitutions inside a token, in order.
    byte_fallback: tokens such as `<0xE2>` are single bytes. separator: inserted before every token except the first.
    metaspace: character that represents a space and is removed from the first token of a text.
    strip_left: number of `strip_char` removed from the start of a text.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    separator: str = ""
    metaspace: str = ""
    strip_char: str = " "
    strip_left: int = 0

    @classmethod
    def for_tokenizer(cls, backend: tokenizers.Tokenizer) -> PieceDecoder | None:
        """Return the decoder of a tokenizer's single tokens, None if its decoder has unsupported steps."""
        decoder = backend.decoder
        if decoder is None:
            return cls(separator=" ")
        try:
            return cls._from_steps(_flatten(json.loads(decoder.__getstate__())))
        except (KeyError, TypeError, ValueError):
            return None

    @classmethod
    def _from_steps(cls, steps: list[dict[str, Any]]) -> PieceDecoder | None:
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(byte_level=True)
        values: dict[str, Any] = {}
        replacements: list[tuple[str, str]] = []
        fused = False
        for step in steps:
            kind = step["type"]
            if kind == "Replace" and "String" in step["pattern"] and not fused and "byte_fallback" not in values:
                replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "ByteFallback" and not fused:
                values["byte_fallback"] = True
            elif kind == "Metaspace" and not fused and "metaspace" not in values:
                replacements.append((step["replacement"], " "))
                if step.get("prepend_scheme", "always") != "never":
                    if len(replacements) > 1 or values.get("byte_fallback"):
                        return None  # the first token's text would depend on earlier steps
                    values["metaspace"] = step["replacement"]
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and step["stop"] == 0 and "strip_left" not in values:
                values.update(strip_char=step["content"], strip_left=step["start"])
            else:
                return None
        return cls(replacements=tuple(replacements), **values)

    def decode_token(self, token: str, *, first: bool = False) -> bytes:
        """Return the UTF-8 of a token. first: it is the first of a text. The caller applies `strip_left`."""
        if self.byte_level:
            try:
                return bytes([_CHAR_TO_BYTE[char] for char in token])
            except KeyError:  # an added token is not written in the byte alphabet
                return token.encode("utf-8", "replace")
        if first and self.metaspace:
            token = token.replace(self.metaspace, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and len(token) == 6 and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self.separator and not first:
            token = self.separator + token
        return token.encode("utf-8", "replace")

    @property
    def growth(self) -> int | None:
        """Upper bound of the characters that decoding adds to a token; None if a replacement may add any number."""
        longer = any(len(new) > len(old) for old, new in self.replacements)
        return None if longer else len(self.separator)

    def covers_every_byte(self, backend: tokenizers.Tokenizer) -> bool:
        """Return whether the vocabulary has every byte, so that no text contains unknown tokens."""
        if self.byte_level:
            names = list(_CHAR_TO_BYTE)
        elif self.byte_fallback and getattr(backend.model, "byte_fallback", False):
            names = [f"<0x{byte:02X}>" for byte in range(256)]
        else:
            return False
        return all(backend.token_to_id(name) is not None for name in names)


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for child in step["decoders"] for inner in _flatten(child)]
