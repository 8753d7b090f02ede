"""The files of kept blocks in one folder, which other processes read, write and remove at the same time.

Responsible for names, for whole files only, for their age and for the size of all of them together. It trusts nothing that it
finds, runs in whatever thread calls it, and remembers nothing of the folder: what lies there now is what there is.

A file comes by being renamed, whole, and is never written again: who has it open reads what was there. Nothing is flushed to
the disk by force. What a power cut leaves is a file that is whole, or none, or one that its checksum betrays.

The time of a file says when its block was last used, to the minute, less a microsecond for each block before it in its text:
so of texts used in the same minute the tails are the oldest, and go first.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from windlass.engine.cache.persist.block_file import (
    BlockFormat,
    Bytes,
    DamagedBlockError,
    StoredBlock,
    passage_in,
    read_metadata,
)
from windlass.engine.cache.persist.keys import BlockKey, PassageRecord

_NAMESPACE = re.compile("[0-9a-f]{32}")
_SUFFIX = ".safetensors"
_PART = ".part"
_ABANDONED_SECONDS = 150.0  # what was begun so long ago has lost its writer: a block takes milliseconds
_HEAD_BYTES = 4096  # of a file that is looked at for its record; a longer one is read on
_MINUTE = 60
_LOW_WATER = 14 / 16  # of the cap, to which files are removed


class BlockDirectory:
    """root: the folder of all namespaces, which share one cap of `max_bytes`."""

    def __init__(self, root: Path, form: BlockFormat, max_bytes: int) -> None:
        self._root, self._form, self._max_bytes = root, form, max_bytes
        self.folder = root / form.namespace.hex()[:32]
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def present(self) -> Iterator[BlockKey]:
        """The blocks whose files are there, by their names alone."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                key = _key_of(entry.name)
                if key is not None:
                    yield key

    def changed_at(self) -> int:
        """A number that changes when files come or go."""
        try:
            return self.folder.stat().st_mtime_ns
        except OSError:
            return 0

    def read(self, key: BlockKey) -> StoredBlock | None:
        """The block, None if there is no such file. Raises DamagedBlockError, ForeignBlockError or OSError."""
        try:
            with open(self._path(key), "rb", buffering=0, opener=_open_plain) as file:
                size = os.fstat(file.fileno()).st_size
                if not self._form.fits(key.group, size):
                    raise DamagedBlockError
                data, done = bytearray(size), 0
                view = memoryview(data)
                while done < size:
                    count = file.readinto(view[done:])
                    if not count:
                        raise DamagedBlockError
                    done += count
        except FileNotFoundError:
            return None
        return self._form.decode(key, data)

    def passage_of(self, key: BlockKey) -> PassageRecord | None:
        """What its file says of a passage: a hint, which is checked when the block is read. Raises DamagedBlockError, OSError."""
        with open(self._path(key), "rb", buffering=0, opener=_open_plain) as file:
            head = file.read(_HEAD_BYTES) or b""
            missing = 8 + int.from_bytes(head[:8], "little") - len(head)
            if 0 < missing <= 1 << 16:
                head += file.read(missing) or b""
        (record, _), _ = read_metadata(head)
        return passage_in(record)

    def write(self, key: BlockKey, index: int, passage: PassageRecord | None, planes: list[Bytes]) -> int:
        """Leave the whole file or none; returns its bytes. index: blocks before it in its text. Raises OSError."""
        part = self.folder / f".{secrets.token_hex(8)}{_PART}"
        pieces = self._form.encode(key, passage, planes)
        try:
            try:
                number = _create(part)
            except FileNotFoundError:  # another process found the folder empty
                self.folder.mkdir(mode=0o700, exist_ok=True)
                number = _create(part)
            with os.fdopen(number, "wb", buffering=0) as file:
                size = 0
                for piece in pieces:
                    size += _write_all(file.fileno(), memoryview(piece).cast("B"))
                os.utime(file.fileno(), ns=_stamp(index))
            part.rename(self._path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        return size

    def touch(self, key: BlockKey, index: int) -> None:
        """Its block is used now."""
        with contextlib.suppress(OSError):
            os.utime(self._path(key), ns=_stamp(index))

    def remove(self, key: BlockKey) -> None:
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def enforce_cap(self) -> tuple[int, int, OSError | None]:
        """Remove the oldest files, whosever they are, where all of them are more than the cap less a sixteenth.

        Returns the bytes that are left, the files removed, and why one could not be. What writers that were killed have left
        goes in any case.
        """
        found: list[tuple[int, int, str]] = []  # (time, bytes, path)
        fault: OSError | None = None
        total, now = 0, time.time()
        for path, stat in _files(self._root):
            size = max(stat.st_size, stat.st_blocks * 512)
            if path.endswith(_PART):
                if now - stat.st_mtime > _ABANDONED_SECONDS:
                    error = _unlink(path)
                    if error is None:
                        continue
                    fault = error
            elif _key_of(path.rpartition(os.sep)[2]) is None:
                continue  # not ours: neither counted nor touched
            else:
                found.append((stat.st_mtime_ns, size, path))
            total += size
        removed = 0
        if total > self._max_bytes * 15 // 16:
            found.sort()
            for _, size, path in found:
                if total <= self._max_bytes * _LOW_WATER:
                    break
                error = _unlink(path)
                if error is not None:
                    fault = error
                    continue
                total -= size
                removed += 1
        return total, removed, fault

    def _path(self, key: BlockKey) -> Path:
        return self.folder / f"{key.digest.hex()}-{key.group}{_SUFFIX}"


def minute() -> int:
    """The minute that a use now falls into."""
    return int(time.time()) // _MINUTE


def _stamp(index: int) -> tuple[int, int]:
    at = minute() * _MINUTE * 10**9 - index * 1000
    return at, at


def _key_of(name: str) -> BlockKey | None:
    """The block that a file of this name holds, if it is such a name."""
    stem, dot, rest = name.partition(".")
    digest, dash, group = stem.partition("-")
    if dot + rest != _SUFFIX or not dash or len(digest) != 64 or not group.isascii() or not group.isdigit():
        return None
    try:
        return BlockKey(int(group), bytes.fromhex(digest))
    except ValueError:
        return None


def _files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every plain file in the folders of all namespaces; those that vanish meanwhile are left out."""
    with os.scandir(root) as folders:
        names = [
            folder.path
            for folder in folders
            if _NAMESPACE.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)
        ]
    for name in names:
        with contextlib.suppress(OSError), os.scandir(name) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_file(follow_symlinks=False):
                        yield entry.path, entry.stat(follow_symlinks=False)


def _unlink(path: str) -> OSError | None:
    """Why it is still there, if it is: another process may have been first."""
    try:
        Path(path).unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _open_plain(path: str, flags: int) -> int:
    return os.open(
        path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    )  # a pipe put there must not hold anybody up


def _write_all(number: int, data: memoryview) -> int:
    done = 0
    while done < len(data):
        done += os.write(number, data[done:])
    return done
