"""Directories made from a model's files once and used again by later starts, in the cache.

Responsible for where they lie, for making them whole or not at all, and for telling whether they are current and in use. What is
in them is their makers' business.
"""

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

from windlass.clients.terminal.lines import say
from windlass.engine.errors import LoadError
from windlass.server.startup.catalogue.folder import cache_folder

_LONGEST_STEM = 120
_MAKING = ".making-"  # how the name of what is not yet whole begins
_ABANDONED_SECONDS = 3600.0  # nothing is that long in the making


@dataclass(frozen=True, slots=True)
class Derivation:
    """What is derived, and how. folder: its place in the cache. index: the file that tells what a directory was made from.

    files: names that a whole directory has. made_by: counted up when newer code would make something else from the same files.
    """

    folder: str
    index: str
    files: Sequence[str]
    made_by: int
    # Descriptors that hold the lock of what this process uses, one for each directory however often it is asked for. They are
    # let go by its end alone, as nobody tells of the last use: engines are started again, and models of an LLM outlive it.
    _held: dict[Path, int] = field(default_factory=dict, init=False, compare=False, repr=False)

    def directory(self, stem: str, sources: Sequence[Path], source: str, fill: Callable[[Path], None]) -> Path:
        """The directory made from these files as they are now; made where it is not there yet.

        stem: how its name begins. source: what to call the files. fill: writes into an empty directory all files, the index among
        them (see `described`). It is in use for as long as this process lives. The directory of what the first file was before it
        changed goes, unless it is in use. Raises LoadError, one line.
        """
        files = self.described(sources, source)
        digest = hashlib.sha256(json.dumps([self.made_by, files]).encode()).hexdigest()[:16]
        try:
            target = cache_folder() / self.folder / f"{stem[:_LONGEST_STEM]}-{digest}"
            if self._use(target, files):
                return target
            target.parent.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned(target.parent, _MAKING)
            made = Path(tempfile.mkdtemp(prefix=_MAKING, dir=target.parent))
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
            reason = getattr(error, "strerror", None) or error
            say(f"notice: what is derived from {source} cannot be kept for later starts ({reason}): set WINDLASS_CACHE")
            prefix = f"windlass-{self.folder}-"
            self._remove_abandoned(Path(tempfile.gettempdir()), prefix)
            made = Path(tempfile.mkdtemp(prefix=prefix))
            atexit.register(shutil.rmtree, made, ignore_errors=True)
            fill(made)
            self._use(made, files)
            return made
        try:
            fill(made)
            self._put_in_place(made, target, files)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        self._use(target, files)
        self._remove_older(target, files)
        return target

    def described(self, sources: Sequence[Path], source: str) -> list[dict[str, Any]]:
        """What tells these files from what they were before, the `files` of an index. Raises LoadError."""
        try:
            found = [(path, path.stat()) for path in sources]
        except OSError as error:
            raise LoadError(f"cannot read {source}: {error.strerror or error}") from None
        return [{"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns} for path, stat in found]

    def read_index(self, directory: Path) -> dict[str, Any] | None:
        """The index, None where there is none that can be used."""
        try:
            index = json.loads((directory / self.index).read_text(encoding="utf-8"))
            return index if all(isinstance(file["path"], str) for file in index["files"]) else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def _put_in_place(self, made: Path, target: Path, files: Sequence[dict[str, Any]]) -> None:
        """Rename the finished directory; where another server was quicker, its directory is as good."""
        try:
            made.rename(target)
            return
        except OSError:
            if self._is_current(target, files):
                return
        # What lies there is damaged: it is moved away first, since a directory replaces no other that holds something.
        with tempfile.TemporaryDirectory(prefix=_MAKING, dir=target.parent) as away:
            try:
                with contextlib.suppress(FileNotFoundError):
                    target.rename(Path(away) / "old")
                made.rename(target)
            except OSError as error:
                if not self._is_current(target, files):
                    raise LoadError(f"cannot write {target} ({error.strerror or error}): remove it") from None

    def _remove_abandoned(self, folder: Path, prefix: str) -> None:
        """What killed starts have left: not yet whole, or, where nothing could be kept, whole and used no more."""
        for left in folder.glob(prefix + "*"):
            with contextlib.suppress(OSError):
                found = left.lstat()
                if found.st_uid != os.geteuid() or not S_ISDIR(found.st_mode):
                    continue  # another's, in a folder for all
                if time.time() - found.st_mtime < _ABANDONED_SECONDS:
                    continue
                if (left / self.index).exists():
                    self._remove_unused(left)
                else:
                    shutil.rmtree(left, ignore_errors=True)

    def _remove_older(self, target: Path, files: Sequence[dict[str, Any]]) -> None:
        """Directories of what the first file was before it changed."""
        for other in target.parent.iterdir():
            if other != target and not other.name.startswith("."):
                theirs = (self.read_index(other) or {}).get("files")
                if theirs and theirs[0]["path"] == files[0]["path"]:
                    self._remove_unused(other)

    def _use(self, directory: Path, files: Sequence[dict[str, Any]]) -> bool:
        """Whether it is current, and then nobody removes it any more: a server may start its engine again from there."""
        with contextlib.suppress(OSError):
            held = os.open(directory / self.index, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(held, fcntl.LOCK_SH)  # never let go: the end of the process does
            if self._is_current(directory, files):
                before = self._held.pop(directory, None)  # perhaps of one that was there before, and damaged
                self._held[directory] = held
                if before is not None:
                    os.close(before)
                return True
            os.close(held)
        return False

    def _remove_unused(self, directory: Path) -> None:
        with contextlib.suppress(OSError):  # another process uses it, or has removed it
            held = os.open(directory / self.index, os.O_RDWR)  # NFS locks nothing else against all others
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(held)

    def _is_current(self, directory: Path, files: Sequence[dict[str, Any]]) -> bool:
        return (self.read_index(directory) or {}).get("files") == list(files) and all(
            (directory / name).is_file() for name in self.files
        )


def write_files(directory: Path, texts: dict[str, str]) -> None:
    """Write every file. A disk that is full is the person's to know of."""
    try:
        for name, text in texts.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot write to {directory} ({error.strerror or error}): free some space there") from None
