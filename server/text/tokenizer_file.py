"""Finds the file with a model's vocabulary, or says how to get one.

Reads nothing, so that it can be asked before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path

from windlass.engine.errors import LoadError

TOKENIZER = "tokenizer.json"
# Others that are read, the first that is there before the rest.
_CONVERTED = ("tekken.json", "tokenizer.model", "tiktoken.model", "*.tiktoken")
_UNREAD = ("vocab.json", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")


def find_tokenizer(directory: Path) -> Path:
    """tokenizer.json, or else the file that it is made from; LoadError, one line, where there is neither."""
    file = directory / TOKENIZER
    if file.is_file():
        return file
    if not directory.is_dir():
        raise LoadError(f"{directory} is not a directory: give the directory that holds tokenizer.json")
    for pattern in _CONVERTED:
        found = sorted(file for file in directory.glob(pattern) if file.is_file())
        if len(found) > 1:
            raise LoadError(
                f"no tokenizer.json in {directory}, and several files it could be made from "
                f"({', '.join(file.name for file in found)}): leave one of them there"
            )
        if found:
            return found[0]
    unread = [name for name in _UNREAD if (directory / name).is_file()]
    if unread:
        raise LoadError(
            f"no tokenizer.json in {directory}, only {unread[0]}: convert it with transformers, "
            f"AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
        )
    raise LoadError(f"no tokenizer.json in {directory}: copy it from the model's repository")
