"""Disk tier: persisted KV blocks as safetensors files in a folder shared by processes.

A file holds the planes of one block, with its identity and a checksum in the metadata; a changed bit makes it damaged, a whole file of another block foreign. Files appear by renaming and are never rewritten; nothing is fsynced. A file's mtime is the minute of its last use, less a microsecond per preceding block of its text, so tails are evicted first. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.engine.cache.kv_cache_budget import gib
from windlass.engine.cache.non_prefix_reuse import Passage, PassageIndex, PassageRecord, passage_of
from windlass.engine.cache.prefix_cache import BlockKey
from windlass.engine.errors import LoadError
from windlass.engine.host_resources import available_memory
from windlass.engine.interface.config import PERSIST_SIZE, EngineConfig
from windlass.engine.interface.outputs import PersistStats

_logger = logging.getLogger("windlass.engine")


class PersistCounters:
    """Each number has one thread that raises it. The meaning of each is that of the field in `PersistStats`."""

    def __init__(self) -> None:
        self.written = self.written_bytes = 0
        self.read = self.read_bytes = 0
        self.damaged = self.foreign = self.failed = self.evicted = 0
        self.disk_bytes = 0
        self.host_saved = self.host_saved_bytes = self.host_read = self.host_read_bytes = 0
        self.host_lost = self.host_evicted = 0
        self._reported: set[str] = set()

    def fail(self, what: str, error: Exception) -> None:
        """Count a failure, and say it unless it was said since it last went well."""
        self.failed += 1
        if what not in self._reported:
            self._reported.add(what)
            reason = (
                error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
            )
            _logger.warning("%s (%s): the engine goes on without", what, reason)

    def succeed(self, what: str) -> bool:
        """It went well; returns whether it did not before."""
        if what not in self._reported:
            return False
        self._reported.discard(what)
        _logger.warning("%s: this is over", what)
        return True

    def stats(
        self, *, lost: int, waiting: int, known: int, tokens: int, host_blocks: int, host_bytes: int
    ) -> PersistStats:
        return PersistStats(
            written_blocks=self.written,
            written_bytes=self.written_bytes,
            read_blocks=self.read,
            read_bytes=self.read_bytes,
            restored_tokens=tokens,
            damaged_blocks=self.damaged,
            foreign_blocks=self.foreign,
            lost_blocks=lost,
            evicted_blocks=self.evicted,
            failures=self.failed,
            waiting_blocks=waiting,
            known_blocks=known,
            disk_bytes=self.disk_bytes,
            host_saved_blocks=self.host_saved,
            host_saved_bytes=self.host_saved_bytes,
            host_read_blocks=self.host_read,
            host_read_bytes=self.host_read_bytes,
            host_lost_blocks=self.host_lost,
            host_evicted_blocks=self.host_evicted,
            host_blocks=host_blocks,
            host_bytes=host_bytes,
        )


class TierIndex:
    """Any thread may ask and tell."""

    def __init__(self, block_size: int) -> None:
        self._used: dict[BlockKey, int] = {}  # the minute in which each was last said to be used
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
        """Whether this is its first use in that minute, of those said here."""
        with self._lock:
            before = self._used.get(key)
            if before is None or before == minute:
                return False
            self._used[key] = minute
            return True

    def compare(self, present: Iterable[BlockKey]) -> list[BlockKey]:
        """Forget those that are not among these; returns those that were not known."""
        present = set(present)
        for key in [key for key in list(self._used) if key not in present]:
            self.remove(key)
        return [key for key in present if key not in self._used]

    def is_passage_of(self, scope: bytes, digest: bytes) -> bool:
        """Whether its file says that it may be found in this scope."""
        with self._lock:
            return scope in self._passages.scopes_of(digest)

    def passage_of(self, key: BlockKey) -> PassageRecord | None:
        """As which passage a block is found, if it is."""
        with self._lock:
            return None if key.group else passage_of(self._passages, key.digest)

    def search(
        self,
        scope: bytes,
        token_ids: Sequence[int],
        *,
        start: int,
        end: int,
        at_least: int,
        spans: Sequence[tuple[int, int]],
    ) -> list[Passage]:
        """See `PassageIndex.search`."""
        with self._lock:
            return self._passages.search(scope, token_ids, start=start, end=end, at_least=at_least, spans=spans)


Bytes = NDArray[np.uint8]

_KIND = "windlass KV block 1"

_MAX_HEADER_BYTES = 1 << 16  # bytes


class DamagedBlockError(Exception):
    """The file is not what its writer wrote."""


class ForeignBlockError(Exception):
    """The file is whole, and another block than the one looked for."""


@dataclass(frozen=True, slots=True)
class PlaneForm:
    """One plane of a block. shape: layers first. dtype: as safetensors names it. num_bytes: of a whole block."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """What a file holds. planes: [layers, bytes of a layer] each. num_bytes: of the file."""

    planes: tuple[Bytes, ...]
    passage: PassageRecord | None
    num_bytes: int


class BlockFormat:
    """namespace: digest of all that blocks depend on but their own chain. groups: per KV group the planes of a block."""

    def __init__(self, namespace: bytes, groups: Sequence[Sequence[PlaneForm]]) -> None:
        self.namespace = namespace
        self._groups = [tuple(planes) for planes in groups]
        self._tables = [_table(planes) for planes in groups]

    def data_bytes(self, group: int) -> int:
        return sum(plane.num_bytes for plane in self._groups[group])

    def encode(self, key: BlockKey, passage: PassageRecord | None, planes: Sequence[Bytes]) -> list[Any]:
        """The file in pieces, to be written one after the other."""
        record = self._record(key, passage)
        checksum = self._checksum(key.group, record, planes)
        return [self._header(key.group, record, checksum), *planes]

    def fits(self, group: int, num_bytes: int) -> bool:
        """Whether a file of this size may be one of these blocks."""
        return 8 <= num_bytes - self.data_bytes(group) <= 8 + _MAX_HEADER_BYTES

    def decode(self, key: BlockKey, file: bytearray | memoryview) -> StoredBlock:
        """What a whole file holds, in memory of `file`. Raises DamagedBlockError or ForeignBlockError."""
        metadata, end = read_metadata(file)
        record, checksum = metadata
        found = _parsed(record)
        if (found.get("namespace"), found.get("digest"), found.get("group")) != self._identity(key):
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

    def _identity(self, key: BlockKey) -> tuple[str, str, int]:
        return self.namespace.hex(), key.digest.hex(), key.group

    def _record(self, key: BlockKey, passage: PassageRecord | None) -> str:
        namespace, digest, group = self._identity(key)
        record: dict[str, object] = {"kind": _KIND, "namespace": namespace, "digest": digest, "group": group}
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
    """(record, checksum) of a file, of which the beginning is enough, and where its data begins. Raises DamagedBlockError."""
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
    """What a file's record says of a passage, if it says anything. Raises DamagedBlockError."""
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
    """JSON has numbers too that are not whole, not finite, or longer than any of ours. Raises ValueError."""
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
    """The tensors as a safetensors header lists them."""
    table, end = {}, 0
    for index, plane in enumerate(planes):
        start, end = end, end + plane.num_bytes
        table[f"plane{index}"] = {"dtype": plane.dtype, "shape": list(plane.shape), "data_offsets": [start, end]}
    return table


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
        for path, status in _files(self._root):
            size = max(status.st_size, status.st_blocks * 512)
            if path.endswith(_PART):
                if now - status.st_mtime > _ABANDONED_SECONDS:
                    error = _unlink(path)
                    if error is None:
                        continue
                    fault = error
            elif _key_of(path.rpartition(os.sep)[2]) is None:
                continue  # not ours: neither counted nor touched
            else:
                found.append((status.st_mtime_ns, size, path))
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


_MIN_BLOCKS = 64  # of all KV groups, that the cap has to have room for

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_tier_options(config: EngineConfig) -> None:
    """Make the folder that is asked for, if any is. Raises LoadError where no model at all can be served so."""
    for field, asked in (("persist", config.cache.persist), ("host_memory", config.cache.host_memory)):
        if asked is not None and not config.cache.prefix_caching:
            raise LoadError(
                f"`cache.{field}` keeps what prompts share, and they share nothing without `cache.prefix_caching`"
            )
    free, size = available_memory(), config.cache.host_memory
    if size is not None and free is not None and size > free:
        raise LoadError(f"`cache.host_memory` is {gib(size)}, and {gib(free)} of main memory are free: lower it")
    if config.cache.persist is not None:
        prepare_folder(config.cache.persist)


def check_tier_support(config: EngineConfig, token_bytes: int, *, is_bidirectional: bool, on_device: bool) -> None:
    """Raises LoadError where blocks of this model cannot be kept as asked for. token_bytes: of a token in the cache. on_device:
    whether the cache lies in a memory of its own."""
    cache = config.cache
    if cache.host_memory is not None and not on_device:
        raise LoadError(
            "`cache.host_memory` takes what a GPU's cache evicts, and this cache lies in main memory already: leave it out and "
            "raise `cache.memory`"
        )
    for field, size in (
        ("persist", None if cache.persist is None else cache.persist_size or PERSIST_SIZE),
        ("host_memory", cache.host_memory),
    ):
        if size is None:
            continue
        if is_bidirectional:
            raise LoadError(
                f"`cache.{field}` keeps what texts share, and a token of this model sees those behind it: leave it out"
            )
        fewest = _MIN_BLOCKS * cache.block_size * token_bytes
        if size < fewest:
            name = "persist_size" if field == "persist" else field
            raise LoadError(
                f"`cache.{name}` is {gib(size)}, and {_MIN_BLOCKS} blocks of this model take {gib(fewest)}: raise it"
            )


def prepare_folder(name: str) -> Path:
    """The folder, for its owner alone where it is made here. Raises LoadError that says what is wrong with it."""
    path = Path(name)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = path.stat().st_mode
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:
        raise LoadError(f"`cache.persist={name}` is a file: give a folder") from None
    except OSError as error:
        raise LoadError(
            f"`cache.persist={name}` cannot be written to ({error.strerror or error}): give a folder of this user's"
        ) from None
    if mode & _OTHERS_MAY_WRITE and os.name == "posix":
        raise LoadError(
            f"`cache.persist={name}` may be written to by other users, who could plant what is answered from it: "
            f"chmod 700 {name}, or give a new folder in it"
        )
    return path
