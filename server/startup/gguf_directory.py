"""Makes the directory that stands for a GGUF model: config.json, tokenizer and the index of its tensors, in a cache.

Responsible for where it lies, for making it whole or not at all, and for using it again. What is in it is the business of
`engine.model.gguf` and `server.text.gguf`; the weights stay in the GGUF file. A later start reads this directory only, which
takes milliseconds, and imports neither numpy nor gguf.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.clients.terminal.lines import say
from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.split_files import find_parts, model_stem
from windlass.server.startup.catalogue.folder import cache_folder

INDEX = "gguf.json"
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_FOLDER = "gguf"
_MADE_BY = 2  # counted up when newer code would derive something else from the same file
_MAGIC = b"GGUF"
_LONGEST_STEM = 120


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF, by its name or, where that says nothing, by its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def derive_directory(path: Path) -> Path:
    """The directory of the model in a GGUF file, or in any part of a split one; made where it is not there yet.

    A file that has changed gets a new one in place of the old. Raises LoadError, one line, for a file that cannot be served.
    """
    parts = find_parts(path.absolute())
    try:
        files = [_identity(part) for part in parts]
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror or error}") from None
    name = f"{model_stem(path.name)[:_LONGEST_STEM]}-{_digest(files)}"
    try:
        target = cache_folder() / _FOLDER / name
        if _is_current(target, files):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        reason = getattr(error, "strerror", None) or error
        say(f"notice: what is derived from {path.name} cannot be kept for later starts ({reason}): set WINDLASS_CACHE")
        made = Path(tempfile.mkdtemp(prefix="windlass-gguf-"))
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        _fill(made, parts)
        return made
    try:
        _fill(made, parts)
        _put_in_place(made, target, files)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _remove_older(target, files)
    return target


def source_stem(directory: Path) -> str | None:
    """The name of the model whose derived directory this is; None for a directory of another kind."""
    files = (_read_index(directory) or {}).get("files")
    return model_stem(Path(files[0]["path"]).name) if files else None


def _fill(directory: Path, parts: Sequence[Path]) -> None:
    """Write every file. A disk that is full is the person's to know of."""
    from windlass.engine.model.gguf.description import describe_gguf  # here: they import numpy, gguf and tokenizers
    from windlass.server.text.gguf.tokenizer_files import tokenizer_files

    found = describe_gguf(parts)
    tokenizer = tokenizer_files(found.metadata, str(parts[0]))
    for notice in tokenizer.notices:
        say(f"notice: {notice}")
    texts = {
        "config.json": json.dumps(found.config, indent=2),
        "generation_config.json": json.dumps(found.generation, indent=2),
        "tokenizer.json": tokenizer.tokenizer,
        "tokenizer_config.json": tokenizer.config,
        INDEX: json.dumps(found.index),
    }
    try:
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot write to {directory} ({error.strerror or error}): free some space there") from None


def _put_in_place(made: Path, target: Path, files: Sequence[dict[str, Any]]) -> None:
    """Rename the finished directory; where another server was quicker, its directory is as good."""
    try:
        made.rename(target)
        return
    except OSError:
        if _is_current(target, files):
            return
    # What lies there is damaged: it is moved away first, since a directory replaces no other that holds something.
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as away:
        try:
            with contextlib.suppress(FileNotFoundError):
                target.rename(Path(away) / "old")
            made.rename(target)
        except OSError as error:
            if not _is_current(target, files):
                raise LoadError(f"cannot write {target} ({error.strerror or error}): remove it") from None


def _remove_older(target: Path, files: Sequence[dict[str, Any]]) -> None:
    """Directories of what this file was before it changed."""
    for other in target.parent.iterdir():
        if other != target and not other.name.startswith("."):
            theirs = (_read_index(other) or {}).get("files")
            if theirs and theirs[0]["path"] == files[0]["path"]:
                shutil.rmtree(other, ignore_errors=True)


def _is_current(directory: Path, files: Sequence[dict[str, Any]]) -> bool:
    return (_read_index(directory) or {}).get("files") == list(files) and all(
        (directory / name).is_file() for name in _FILES
    )


def _read_index(directory: Path) -> dict[str, Any] | None:
    """gguf.json, None where there is none that can be used."""
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        return index if all(isinstance(file["path"], str) for file in index["files"]) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _identity(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _digest(files: Sequence[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps([_MADE_BY, files]).encode()).hexdigest()[:16]
