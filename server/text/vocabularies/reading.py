"""What every reader of a vocabulary gives, and how a file is read. Knows no form of file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.engine.errors import LoadError

MAX_BYTES = 2**27  # of a vocabulary's file; tekken.json, the largest in use, has 15 million


@dataclass(frozen=True, slots=True)
class ReadVocabulary:
    """A vocabulary as read.

    parts: of tokenizer.json by name. size: tokens, added ones among them. named: bos_token, eos_token, … as text. add_bos:
    whether a text begins with bos_token where tokenizer_config.json does not tell. notices: what the user should know, by line.
    """

    parts: dict[str, Any]
    size: int
    named: dict[str, str] = field(default_factory=dict)
    add_bos: bool = False
    notices: tuple[str, ...] = ()


def read_bytes(file: Path) -> bytes:
    """The file's bytes. Raises LoadError where it cannot be read or is larger than any vocabulary."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise LoadError(f"{file} is larger than any vocabulary ({file.stat().st_size} bytes): fetch the file again")
        return file.read_bytes()
    except OSError as error:
        raise LoadError(f"cannot read {file}: {error.strerror or error}") from None


def added_token(index: int, text: str, *, special: bool, normalized: bool = False) -> dict[str, Any]:
    """An entry of `added_tokens`: found in a text before anything else."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": special}
    return {"id": index, "content": text, **flags}
