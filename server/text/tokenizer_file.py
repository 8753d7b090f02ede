"""Finds a model's tokenizer.json, or says how to get one. Reads nothing, so that it can be asked before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from windlass.engine.errors import LoadError

_SLOW_FILES = ("tokenizer.model", "tekken.json", "vocab.json", "spiece.model", "tiktoken.model", "vocab.txt")


def find_tokenizer(directory: Path) -> Path:
    """The file; LoadError, one line, where there is none."""
    file = directory / "tokenizer.json"
    if file.is_file():
        return file
    if not directory.is_dir():
        raise LoadError(f"{directory} is not a directory: give the directory that holds tokenizer.json")
    slow = [name for name in _SLOW_FILES if (directory / name).is_file()]
    if slow:
        raise LoadError(
            f"no tokenizer.json in {directory}, only {slow[0]}: convert it with transformers, "
            f"AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
        )
    raise LoadError(f"no tokenizer.json in {directory}: copy it from the model's repository")
