"""Disk tier: persisted KV blocks as safetensors files in a folder shared by processes.

A file holds the planes of one block, with its identity and a checksum in the metadata. A changed bit makes it damaged; an
intact file of another block is foreign. Files appear by renaming and are never rewritten; nothing is fsynced. A file's
mtime is the minute of its last use, less a microsecond per preceding block of its sequence, so tails are evicted first.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.engine.cache.non_prefix_reuse import Passage, PassageIndex, PassageRecord, PassageSearch
from windlass.engine.cache.prefix_cache import BlockKey
from windlass.engine.interface.outputs import PersistStats

_logger = logging.getLogger("windlass.engine")


@dataclass
class PersistCounters(PersistStats):
    """Counts what `PersistStats` reports. Each field is raised by a single thread."""

    _reported: set[str] = field(default_factory=set)

    def fail(self, what: str, error: Exception) -> None:
        """Count a failure. It is logged if it was not logged since the last success."""
        self.failures += 1
        if what not in self._reported:
            self._reported.add(what)
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.strerror:
                reason = error.strerror
            _logger.warning("%s (%s): requests are still answered", what, reason)

    def succeed(self, what: str) -> bool:
        """Log a success after a failure; returns whether there was a failure."""
        if what not in self._reported:
            return False
        self._reported.discard(what)
        _logger.warning("resolved: %s", what)
        return True

    def snapshot(self, **others: int) -> PersistStats:
        """The counters. others: fields that are not counted here."""
        return PersistStats(**{each.name: getattr(self, each.name) for each in fields(PersistStats)} | others)


class TierIndex:
    """Index of the blocks of one tier, by key and by content. Thread-safe."""

    def __init__(self, block_size: int) -> None:
        self._used: dict[BlockKey, int] = {}  # the minute of the last known use
        self._passages = PassageIndex(block_size)
        self._block_size = block_size
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._used

    def add(self, key: BlockKey, minute: int, passage: PassageRecord | None = None) -> None:
        with self._lock:
            self._used[key] = minute
            if passage is not None and len(passage.token_ids) == self._block_size:
                for scope in passage.scopes:
                    self._passages.add(scope, key.digest, passage.parent, passage.token_ids, passage.position)

    def remove(self, key: BlockKey) -> None:
        with self._lock:
            self._used.pop(key, None)
            if key.group == 0:
                self._passages.remove(key.digest)

    def touch(self, key: BlockKey, minute: int) -> bool:
        """Record a use; returns whether the block is known and this is the first recorded use in that minute."""
        with self._lock:
            before = self._used.get(key)
            if before is None or before == minute:
                return False
            self._used[key] = minute
            return True

    def update(self, present: Iterable[BlockKey]) -> list[BlockKey]:
        """Remove all blocks that are not in `present`, and add the others; returns those that were added."""
        present = set(present)
        for key in [key for key in list(self._used) if key not in present]:
            self.remove(key)
        added = [key for key in present if key not in self._used]
        for key in added:
            self.add(key, -1)
        return added

    def lacks(self, key: BlockKey, passage: PassageRecord | None) -> bool:
        """Whether the block is not stored, or not with all scopes of `passage`."""
        if key not in self._used or passage is None:
            return key not in self._used
        with self._lock:
            return not set(passage.scopes) <= set(self._passages.scopes_of(key.digest))

    def passage_of(self, key: BlockKey) -> PassageRecord | None:
        """The record of a block as a passage, if there is one."""
        with self._lock:
            return None if key.group else self._passages.record_of(key.digest)

    def search(self, scope: bytes, token_ids: Sequence[int], search: PassageSearch) -> list[Passage]:
        with self._lock:
            return self._passages.search(scope, token_ids, search)


# -- block files ---------------------------------------------------------------------------------------------------

Bytes = NDArray[np.uint8]

_KIND = "windlass KV block 1"
_MAX_HEADER_BYTES = 1 << 16


class DamagedBlockError(Exception):
    """The file differs from what was written, or cannot be opened as a file."""


class ForeignBlockError(Exception):
    """The file is intact but holds another block than its name states."""


@dataclass(frozen=True, slots=True)
class PlaneForm:
    """One plane of a block. shape: layers first. dtype: safetensors name. num_bytes: of the plane in one block."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The content of a file. planes: [layers, bytes of a layer] each. num_bytes: of the file."""

    planes: tuple[Bytes, ...]
    passage: PassageRecord | None
    num_bytes: int


class BlockFormat:
    """Encoding of blocks as files.

    namespace: digest of everything that blocks depend on, except their hash chain. groups: per KV group the planes of a
    block.
    """

    def __init__(self, namespace: bytes, groups: Sequence[Sequence[PlaneForm]]) -> None:
        self.namespace = namespace
        self._groups = [tuple(planes) for planes in groups]
        self._tables = [_table(planes) for planes in groups]

    def encode(self, key: BlockKey, passage: PassageRecord | None, planes: Sequence[Bytes]) -> list[Any]:
        """The content of the file as consecutive buffers."""
        record = self._record(key, passage)
        checksum = self._checksum(key.group, record, planes)
        return [self._header(key.group, record, checksum), *planes]

    def fits(self, group: int, num_bytes: int) -> bool:
        """Whether a file of this size can be a block of this group."""
        data_bytes = sum(plane.num_bytes for plane in self._groups[group])
        return 8 <= num_bytes - data_bytes <= 8 + _MAX_HEADER_BYTES

    def decode(self, key: BlockKey, file: bytearray | memoryview) -> StoredBlock:
        """The content of a whole file, as views of `file`. Raises DamagedBlockError or ForeignBlockError."""
        metadata, end = read_metadata(file)
        record, checksum = metadata
        found = _parsed(record)
        if not self._identity(key).items() <= found.items():
            raise ForeignBlockError
        if bytes(file[:end]) != self._header(key.group, record, checksum):
            raise DamagedBlockError
        planes, start = [], end
        for plane in self._groups[key.group]:
            if start + plane.num_bytes > len(file):
                raise DamagedBlockError
            flat = np.frombuffer(file, np.uint8, plane.num_bytes, start)
            planes.append(flat.reshape(plane.shape[0], -1))
            start += plane.num_bytes
        if start != len(file) or self._checksum(key.group, record, planes) != checksum:
            raise DamagedBlockError
        return StoredBlock(tuple(planes), passage_in(record), len(file))

    def _identity(self, key: BlockKey) -> dict[str, object]:
        return {"namespace": self.namespace.hex(), "digest": key.digest.hex(), "group": key.group}

    def _record(self, key: BlockKey, passage: PassageRecord | None) -> str:
        record = {"kind": _KIND, **self._identity(key)}
        if passage is not None:
            record["passage"] = {
                "parent": passage.parent.hex(),
                "position": passage.position,
                "token_ids": passage.token_ids,
                "scopes": [scope.hex() for scope in passage.scopes],
            }
        return json.dumps(record)

    def _checksum(self, group: int, record: str, planes: Sequence[Bytes]) -> str:
        digest = hashlib.sha256(json.dumps([record, self._tables[group]]).encode())
        for plane in planes:
            digest.update(plane.data)
        return digest.hexdigest()

    def _header(self, group: int, record: str, checksum: str) -> bytes:
        header = {"__metadata__": {"block": record, "sha256": checksum}, **self._tables[group]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def read_metadata(file: bytes | bytearray | memoryview) -> tuple[tuple[str, str], int]:
    """((record, checksum), offset of the data) of a file or of its beginning. Raises DamagedBlockError."""
    length = int.from_bytes(file[:8], "little")
    if not 2 <= length <= min(_MAX_HEADER_BYTES, len(file) - 8):
        raise DamagedBlockError
    try:
        header = json.loads(bytes(file[8 : 8 + length]))
        record, checksum = header["__metadata__"]["block"], header["__metadata__"]["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedBlockError from None
    if not isinstance(record, str) or not isinstance(checksum, str):
        raise DamagedBlockError
    return (record, checksum), 8 + length


def passage_in(record: str) -> PassageRecord | None:
    """The passage in a file's record, if there is one. Raises DamagedBlockError."""
    passage = _parsed(record).get("passage")
    if passage is None:
        return None
    try:
        return PassageRecord(
            bytes.fromhex(passage["parent"]),
            _checked_int(passage["position"]),
            tuple(_checked_int(token) for token in passage["token_ids"]),
            tuple(bytes.fromhex(scope) for scope in passage["scopes"]),
        )
    except (ValueError, KeyError, TypeError):
        raise DamagedBlockError from None


def _checked_int(number: object) -> int:
    """`number` as a 64-bit integer. Raises ValueError for anything else, such as a JSON number that is not finite."""
    if type(number) is not int or not -(1 << 63) <= number < 1 << 63:
        raise ValueError
    return number


def _parsed(record: str) -> dict[str, Any]:
    try:
        parsed = json.loads(record)
    except (ValueError, RecursionError):
        raise DamagedBlockError from None
    if not isinstance(parsed, dict):
        raise DamagedBlockError
    return parsed


def _table(planes: Sequence[PlaneForm]) -> dict[str, dict[str, Any]]:
    """The tensor entries of a safetensors header."""
    table, end = {}, 0
    for index, plane in enumerate(planes):
        start, end = end, end + plane.num_bytes
        table[f"plane{index}"] = {"dtype": plane.dtype, "shape": list(plane.shape), "data_offsets": [start, end]}
    return table


# -- folder of files -----------------------------------------------------------------------------------------------

_NAMESPACE = re.compile("[0-9a-f]{32}")
_SUFFIX = ".safetensors"
_PART = ".part"
_ABANDONED_SECONDS = 150.0  # a partial file of this age has lost its writer: writing a block takes milliseconds
_MINUTE = 60
_LOW_WATER = 14 / 16  # share of the cap that remains after files were removed
# Errors of `open` that concern one entry of the folder: a link, a directory, a socket, or a file that may not be read.
_NOT_A_BLOCK_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.EPERM})


class BlockDirectory:
    """Block files of one namespace. root: the folder of all namespaces, which share one cap of `max_bytes`."""

    def __init__(self, root: Path, form: BlockFormat, max_bytes: int) -> None:
        self._root, self._form, self._max_bytes = root, form, max_bytes
        self.folder = root / form.namespace.hex()[:32]
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def present(self) -> Iterator[BlockKey]:
        """The blocks that have files, according to the file names. Links, directories, pipes and the like are ignored."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                key = _key_of(entry.name)
                if key is not None and _is_regular_file(entry):
                    yield key

    def changed_at(self) -> int:
        """A number that changes when files are added or removed."""
        try:
            return self.folder.stat().st_mtime_ns
        except OSError:
            return 0

    def read(self, key: BlockKey) -> StoredBlock | None:
        """The block; None if there is no such file. Raises DamagedBlockError, ForeignBlockError or OSError."""
        try:
            with open(self._path(key), "rb", opener=_open_plain) as file:
                size = os.fstat(file.fileno()).st_size
                if not self._form.fits(key.group, size):
                    raise DamagedBlockError
                data = bytearray(size)
                if file.readinto(data) < size:
                    raise DamagedBlockError
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _NOT_A_BLOCK_FILE:
                raise DamagedBlockError from None
            raise
        return self._form.decode(key, data)

    def passage_of(self, key: BlockKey) -> PassageRecord | None:
        """The passage in a file's record: a hint that is verified when the block is read.

        Raises DamagedBlockError or OSError.
        """
        with open(self._path(key), "rb", opener=_open_plain) as file:
            head = file.read(8) or b""
            head += file.read(min(int.from_bytes(head, "little"), _MAX_HEADER_BYTES)) or b""
        (record, _), _ = read_metadata(head)
        return passage_in(record)

    def write(self, key: BlockKey, index: int, passage: PassageRecord | None, planes: list[Bytes]) -> int:
        """Write the whole file or none; returns its size. index: blocks before it in its sequence.

        Raises IsADirectoryError if a directory has the name of the file, and OSError.
        """
        part = self.folder / f".{secrets.token_hex(8)}{_PART}"
        pieces = self._form.encode(key, passage, planes)
        try:
            try:
                number = _create(part)
            except FileNotFoundError:  # another process has removed the empty folder
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
        """Record a use of the block now, in the file's mtime."""
        with contextlib.suppress(OSError):
            os.utime(self._path(key), ns=_stamp(index))

    def remove(self, key: BlockKey) -> None:
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def enforce_cap(self) -> tuple[int, int, OSError | None]:
        """Remove the oldest files of any namespace if all files exceed 15/16 of the cap, and abandoned partial files.

        Returns (bytes that are left, number of files removed, an error if one could not be removed).
        """
        found: list[tuple[int, int, str]] = []  # (time, bytes, path)
        fault: OSError | None = None
        total, now = 0, time.time()
        for path, status in _files(self._root):
            size = max(status.st_size, status.st_blocks * 512)
            if path.endswith(_PART):
                if now - status.st_mtime > _ABANDONED_SECONDS:
                    error = _unlink(path)
                    if error is None:
                        continue
                    fault = error
            elif _key_of(path.rpartition(os.sep)[2]) is None:
                continue  # not a block file: neither counted nor removed
            else:
                found.append((status.st_mtime_ns, size, path))
            total += size
        removed = 0
        if total > self._max_bytes * 15 // 16:
            # First those that exceed the cap by themselves, which are no blocks: all others would be removed for them.
            found.sort(key=lambda file: (file[1] <= self._max_bytes, file))
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
    """The current minute since the epoch."""
    return int(time.time()) // _MINUTE


def _stamp(index: int) -> tuple[int, int]:
    at = minute() * _MINUTE * 10**9 - index * 1000
    return at, at


def _key_of(name: str) -> BlockKey | None:
    """The block of a file with this name; None for other names."""
    stem, dot, rest = name.partition(".")
    digest, dash, group = stem.partition("-")
    if dot + rest != _SUFFIX or not dash or len(digest) != 64 or not group.isascii() or not group.isdigit():
        return None
    try:
        return BlockKey(int(group), bytes.fromhex(digest))
    except ValueError:
        return None


def _is_regular_file(entry: os.DirEntry[str]) -> bool:
    """Whether this is a file and no link; False if it vanishes meanwhile."""
    try:
        return entry.is_file(follow_symlinks=False)
    except OSError:
        return False


def _files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every regular file in the folders of all namespaces, without those that vanish meanwhile."""
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
                    if _is_regular_file(entry):
                        yield entry.path, entry.stat(follow_symlinks=False)


def _unlink(path: str) -> OSError | None:
    """Remove a file; returns the error if it remains. Another process may have removed it before."""
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
    # O_NONBLOCK: a named pipe in place of the file must not block the reader.
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _write_all(number: int, data: memoryview) -> int:
    done = 0
    while done < len(data):
        done += os.write(number, data[done:])
    return done
