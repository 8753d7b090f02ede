"""Directories derived from a model's files and cached for later starts: GGUF configurations and converted tokenizers."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from windlass.clients.terminal import print_status
from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.split_files import find_parts, model_stem
from windlass.server.startup.model_catalog import cache_folder
from windlass.server.text.tokenizer_files import TOKENIZER, find_tokenizer

_MAX_STEM_CHARS = 120
_POOLING = "1_Pooling"
_CONFIG = "tokenizer_config.json"
_MAGIC = b"GGUF"
_INCOMPLETE_PREFIX = ".making-"  # prefix of the names of unfinished directories
_ABANDONED_SECONDS = 3600.0  # no directory takes that long to create


@dataclass(frozen=True, slots=True)
class Derivation:
    """A kind of derived directories. folder: its place in the cache. index: the file that lists a directory's sources.

    files: names that a complete directory has. version: incremented when newer code derives something else from the same
    files.
    """

    folder: str
    index: str
    files: Sequence[str]
    version: int
    # Descriptors that lock the directories used by this process, one for each. Only the end of the process releases them, as
    # the last use is unknown: engines are restarted, and models of an LLM outlive it.
    _lock_descriptors: dict[Path, int] = field(default_factory=dict, init=False, compare=False, repr=False)

    def directory(self, stem: str, sources: Sequence[Path], source: str, fill: Callable[[Path], None]) -> Path:
        """The directory derived from the current state of these files, created if necessary.

        stem: prefix of its name. source: name of the files in messages. fill: writes all files into an empty directory, including
        the index (see `describe_sources`). The directory is in use until this process ends. An older directory of the first file
        is removed unless it is in use. Raises LoadError, one line.
        """
        files = self.describe_sources(sources, source)
        digest = hashlib.sha256(json.dumps([self.version, files]).encode()).hexdigest()[:16]
        try:
            target = cache_folder() / self.folder / f"{stem[:_MAX_STEM_CHARS]}-{digest}"
            if self._lock_if_current(target, files):
                return target
            target.parent.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned(target.parent, _INCOMPLETE_PREFIX)
            directory = Path(tempfile.mkdtemp(prefix=_INCOMPLETE_PREFIX, dir=target.parent))
        except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
            reason = getattr(error, "strerror", None) or error
            print_status(
                f"notice: files derived from {source} cannot be cached ({reason}), so every start derives them again: set "
                "WINDLASS_CACHE to a writable folder"
            )
            prefix = f"windlass-{self.folder}-"
            self._remove_abandoned(Path(tempfile.gettempdir()), prefix)
            directory = Path(tempfile.mkdtemp(prefix=prefix))
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
            fill(directory)
            self._lock_if_current(directory, files)
            return directory
        try:
            fill(directory)
            self._move_to(directory, target, files)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        self._lock_if_current(target, files)
        self._remove_older(target, files)
        return target

    def describe_sources(self, sources: Sequence[Path], source: str) -> list[dict[str, Any]]:
        """The current state of the source files, for `files` of an index. Raises LoadError."""
        try:
            found = [(path, path.stat()) for path in sources]
        except OSError as error:
            raise LoadError(f"cannot read {source}: {error.strerror or error}") from None
        return [{"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns} for path, stat in found]

    def read_index(self, directory: Path) -> dict[str, Any] | None:
        """The index, None if it is missing or invalid."""
        try:
            index = json.loads((directory / self.index).read_text(encoding="utf-8"))
            return index if all(isinstance(file["path"], str) for file in index["files"]) else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def _move_to(self, directory: Path, target: Path, files: Sequence[dict[str, Any]]) -> None:
        """Rename the finished directory; if another server was faster, its directory is used."""
        try:
            directory.rename(target)
            return
        except OSError:
            if self._is_current(target, files):
                return
        # The existing directory is damaged. It is moved away first, since rename replaces only empty directories.
        with tempfile.TemporaryDirectory(prefix=_INCOMPLETE_PREFIX, dir=target.parent) as away:
            try:
                with contextlib.suppress(FileNotFoundError):
                    target.rename(Path(away) / "old")
                directory.rename(target)
            except OSError as error:
                if not self._is_current(target, files):
                    raise LoadError(f"cannot write {target} ({error.strerror or error}): remove it") from None

    def _remove_abandoned(self, folder: Path, prefix: str) -> None:
        """Remove directories of killed starts: unfinished ones, or unused temporary ones."""
        for left in folder.glob(prefix + "*"):
            with contextlib.suppress(OSError):
                found = left.lstat()
                if found.st_uid != os.geteuid() or not S_ISDIR(found.st_mode):
                    continue  # of another user, in a shared folder
                if time.time() - found.st_mtime < _ABANDONED_SECONDS:
                    continue
                if (left / self.index).exists():
                    self._remove_unused(left)
                else:
                    shutil.rmtree(left, ignore_errors=True)

    def _remove_older(self, target: Path, files: Sequence[dict[str, Any]]) -> None:
        """Remove directories of earlier states of the first file."""
        for other in target.parent.iterdir():
            if other != target and not other.name.startswith("."):
                theirs = (self.read_index(other) or {}).get("files")
                if theirs and theirs[0]["path"] == files[0]["path"]:
                    self._remove_unused(other)

    def _lock_if_current(self, directory: Path, files: Sequence[dict[str, Any]]) -> bool:
        """Whether a directory is current. It is then locked against removal, since a server may restart its engine from it."""
        with contextlib.suppress(OSError):
            descriptor = os.open(directory / self.index, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # released by the end of the process
            if self._is_current(directory, files):
                before = self._lock_descriptors.pop(directory, None)  # perhaps of a damaged directory that was replaced
                self._lock_descriptors[directory] = descriptor
                if before is not None:
                    os.close(before)
                return True
            os.close(descriptor)
        return False

    def _remove_unused(self, directory: Path) -> None:
        with contextlib.suppress(OSError):  # another process uses it, or has removed it
            descriptor = os.open(directory / self.index, os.O_RDWR)  # NFS requires write access for an exclusive lock
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)

    def _is_current(self, directory: Path, files: Sequence[dict[str, Any]]) -> bool:
        return (self.read_index(directory) or {}).get("files") == list(files) and all(
            (directory / name).is_file() for name in self.files
        )


_GGUF_DERIVATION = Derivation(
    folder="gguf",
    index="gguf.json",
    files=("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    version=5,
)

_TOKENIZER_DERIVATION = Derivation(folder="tokenizers", index="derived.json", files=(TOKENIZER, _CONFIG), version=1)


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF, by its name or else by its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def derive_gguf_directory(path: Path) -> Path:
    """The directory of the model in a GGUF file, or in any part of a split one, created if necessary.

    The directory of a changed file is replaced. Raises LoadError, one line, for a file that cannot be served.
    """
    parts = find_parts(path.absolute())
    return _GGUF_DERIVATION.directory(
        model_stem(path.name), parts, str(path), lambda directory: _fill_gguf_directory(directory, parts)
    )


def source_stem(directory: Path) -> str | None:
    """The name of the model whose derived directory this is; None for a directory of another kind."""
    files = (_GGUF_DERIVATION.read_index(directory) or {}).get("files")
    return model_stem(Path(files[0]["path"]).name) if files else None


def _fill_gguf_directory(directory: Path, parts: Sequence[Path]) -> None:
    from windlass.engine.model.gguf.gguf_description import describe_gguf
    from windlass.server.text.vocabularies.conversion import gguf_tokenizer_files

    found = describe_gguf(parts)
    tokenizer = gguf_tokenizer_files(found.metadata, str(parts[0]))
    for notice in tokenizer.notices:
        print_status(f"notice: {notice}")
    texts = {
        "config.json": json.dumps(found.config, indent=2),
        "generation_config.json": json.dumps(found.generation, indent=2),
        "tokenizer.json": tokenizer.tokenizer,
        "tokenizer_config.json": tokenizer.config,
        _GGUF_DERIVATION.index: json.dumps(found.index),
    }
    if found.pooling is not None:  # in the format of sentence-transformers; embeddings are normalized as in llama.cpp
        modules = [("Transformer", ""), ("Pooling", _POOLING), ("Normalize", "2_Normalize")]
        listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules]
        texts["modules.json"] = json.dumps(listed)
        texts[f"{_POOLING}/config.json"] = json.dumps({"pooling_mode": found.pooling})
    write_files(directory, texts)


def ensure_tokenizer(directory: Path) -> Path:
    """The directory itself if it has a tokenizer.json, else one derived from it. Raises LoadError, one line."""
    directory = directory.absolute()
    vocabulary = find_tokenizer(directory)
    if vocabulary.name == TOKENIZER:
        return directory
    sources = [vocabulary, *sorted(path for path in directory.iterdir() if path != vocabulary and path.exists())]
    return _TOKENIZER_DERIVATION.directory(
        directory.name, sources, str(directory), lambda target: _fill_tokenizer_directory(target, sources)
    )


def _fill_tokenizer_directory(directory: Path, sources: Sequence[Path]) -> None:
    from windlass.server.text.vocabularies.conversion import tokenizer_files

    converted = tokenizer_files(sources[0])
    for notice in converted.notices:
        print_status(f"notice: {notice}")
    index = json.dumps({"files": _TOKENIZER_DERIVATION.describe_sources(sources, str(sources[0].parent))})
    write_files(
        directory, {TOKENIZER: converted.tokenizer, _CONFIG: converted.config, _TOKENIZER_DERIVATION.index: index}
    )
    try:
        for source in sources:
            if source.name != _CONFIG:
                (directory / source.name).symlink_to(source)
    except OSError as error:
        raise LoadError(f"cannot write to {directory} ({error.strerror or error}): free some space there") from None


def write_files(directory: Path, texts: dict[str, str]) -> None:
    """Write all files. Raises LoadError, for example for a full disk."""
    try:
        for name, text in texts.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot write to {directory} ({error.strerror or error}): free some space there") from None
