"""File names of a split GGUF model ("name-00001-of-00003.gguf").

Finds all parts from any of them. Handles names only; `gguf_description` checks that the files' contents agree. Imports neither
gguf nor torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from windlass.engine.errors import LoadError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
_MOST_PARTS = 1000


def model_stem(name: str) -> str:
    """The name of a model's file without its ending and part number."""
    stem = name[: -len(".gguf")] if name.lower().endswith(".gguf") else name
    matched = _PART.fullmatch(stem)
    return matched["stem"] if matched else stem


def part_number(name: str) -> int | None:
    """Number of the part of a split model, from 1; None for an unsplit file."""
    matched = _PART.fullmatch(Path(name).stem)
    return int(matched["number"]) if matched else None


def part_names(name: str) -> list[str]:
    """File names of all parts of the model; of an unsplit file its own name."""
    matched = _PART.fullmatch(Path(name).stem)
    if matched is None:
        return [name]
    count, suffix = int(matched["count"]), Path(name).suffix
    if not 1 <= int(matched["number"]) <= count <= _MOST_PARTS:
        raise LoadError(f"{name} is not a part of a split model: numbers are 1 to the count, at most {_MOST_PARTS}")
    return [f"{matched['stem']}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]


def find_parts(path: Path) -> list[Path]:
    """All files of the model that `path` belongs to, in order. Raises LoadError for a missing part."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    for number, part in enumerate(parts, 1):
        if not part.is_file():
            raise LoadError(
                f"{part.name} is missing next to {path}: it is part {number} of the {len(parts)} of this model, download it too"
            )
    return parts
