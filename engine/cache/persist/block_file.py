"""The file of one block: an ordinary safetensors file of its planes, with what it is and a checksum in the metadata.

Responsible for bytes only. What is read back is compared with all that would be written: a file with one bit changed, be it
in the header, is damaged; a whole file of something else is foreign.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.engine.cache.persist.keys import BlockKey, PassageRecord

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
