"""Reading of the JSON and vocabulary files of a model, whose sizes are checked before they are parsed.

A parsed file takes up to a hundred times its bytes: a list of empty objects, two bytes and a comma each.
"""

from __future__ import annotations

from pathlib import Path

from windlass.engine.errors import LoadError

MAX_JSON_BYTES = 1 << 25  # the largest in use, the index of a model with 140,000 tensors, has 15 million
MAX_JSON_ENTRIES = 1 << 20  # of all lists and objects
# Of tokenizer.json: the largest in use has 33 million bytes and 1.4 million entries, of which a million are pairs to merge.
MAX_TOKENIZER_BYTES = 1 << 26
MAX_TOKENIZER_ENTRIES = 1 << 21


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The content of a file. Raises LoadError if it has more bytes, and OSError."""
    size = path.stat().st_size
    if size > max_bytes:
        raise LoadError(f"{path} has {size} bytes, more than that of any model: download it again")
    return path.read_bytes()


def has_too_many_entries(text: bytes, max_entries: int = MAX_JSON_ENTRIES) -> bool:
    """Whether JSON may have more entries than this: all but the first of a list or object follow a comma."""
    return text.count(b",") > max_entries


def read_json_text(path: Path, *, max_bytes: int = MAX_JSON_BYTES, max_entries: int = MAX_JSON_ENTRIES) -> str:
    """The text of a JSON file. Raises LoadError if it is too large, OSError, and ValueError if it is not UTF-8."""
    data = read_bounded(path, max_bytes)
    if has_too_many_entries(data, max_entries):
        raise LoadError(f"{path} has more than {max_entries} entries, more than that of any model: download it again")
    return data.decode("utf-8")
