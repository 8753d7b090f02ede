"""JSON made piece by piece, so that no single call holds the interpreter lock for a large answer.

Knows JSON; knows nothing of answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import to_json


class JsonList:
    """A JSON array written as its items come; only their text is kept. size: bytes of that text."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size = 0

    def extend(self, items: Sequence[Any]) -> None:
        """Append items. Give at most a few hundred at once: they are written in one go."""
        if items:
            part = to_json(items)[1:-1]
            self._parts.append(part)
            self.size += len(part) + 1

    def take(self, other: JsonList) -> None:
        """Append the items of another array."""
        self._parts += other._parts
        self.size += other.size

    def __add__(self, other: JsonList) -> JsonList:
        both = JsonList()
        both._parts = self._parts + other._parts
        both.size = self.size + other.size
        return both

    def __bool__(self) -> bool:
        return bool(self._parts)

    def pieces(self) -> Iterator[bytes]:
        """The array's text."""
        yield b"["
        for number, part in enumerate(self._parts):
            if number:
                yield b","
            yield part
        yield b"]"


def encode_pieces(value: Any) -> Iterator[bytes]:
    """The JSON text of a value in which any array may be a `JsonList`. Other arrays and strings come in one piece."""
    if isinstance(value, JsonList):
        yield from value.pieces()
    elif isinstance(value, dict):
        before = b"{"
        for key, item in value.items():
            yield before + to_json(key) + b":"
            yield from encode_pieces(item)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict | JsonList):
        before = b"["
        for item in value:
            yield before
            yield from encode_pieces(item)
            before = b","
        yield b"]"
    else:
        yield to_json(value)


def encode(value: Any) -> bytes:
    """The same as one piece."""
    return b"".join(encode_pieces(value))
