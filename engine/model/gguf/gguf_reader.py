"""Header of a GGUF file: metadata as plain values, and the location of each tensor.

Uses the `gguf` package, with every length, count and offset checked before it is used: a damaged file is a one-line LoadError.
Imports gguf and numpy, so import it only where a GGUF file must be read.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.safetensors_header import FileHeader, TensorLocation
from windlass.engine.rotary.scaling_fields import format_key

_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of keys
_VERSIONS = (2, 3)

# Above any model: the largest vocabulary has a quarter of a million tokens, each with a score and a type, and half a million
# merges, some 20 MB in total.
_MOST_KEYS = 10_000
_MOST_TENSORS = 10_000
_MOST_STRINGS = 1 << 20  # in all arrays of a file
_MOST_NUMBERS = 1 << 21  # in all arrays of a file
_MOST_METADATA = 1 << 26  # bytes of all keys and values
_LONGEST_NAME = 65_535  # bytes of a key or a tensor's name
_LONGEST_STRING = 1 << 24  # bytes of a value
_MOST_DIMENSIONS = 4


def read_header(path: Path) -> FileHeader:
    """Read the header of a GGUF file. Raises LoadError, one line that names the file and the fault, for any other file.

    Metadata are numbers, bools, strings and flat lists of them. Tensors have gguf's names of types ("Q4_K") and shapes as
    [rows, columns] or [size].
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_HEADER.size)
        _check_start(path, start)
        reader = _CheckedReader(path, size)
        metadata = {name: _value(value) for name, value in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = {
            tensor.name: TensorLocation(
                tensor.name,
                path,
                tensor.tensor_type.name,
                tuple(int(n) for n in reversed(tensor.shape.tolist())),
                tensor.data_offset,
                tensor.data_offset + tensor.n_bytes,
            )
            for tensor in reader.tensors
        }
    except LoadError:
        raise
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError, struct.error) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise LoadError(f"{path} is damaged ({reason}): download it again") from None
    _refuse_overlaps(path, tensors)
    return FileHeader(path, tensors, metadata)


def _check_start(path: Path, start: bytes) -> None:
    if start[:4] != b"GGUF":
        raise LoadError(f"{path} is not a GGUF file (it does not begin with GGUF): download it again")
    if len(start) < _HEADER.size:
        raise LoadError(f"{path} is damaged (it ends within its header): download it again")
    _, version, tensors, keys = _HEADER.unpack(start)
    if version & 0xFFFF == 0:
        raise LoadError(f"{path} is a big-endian GGUF file: get a little-endian one, as nearly all are")
    if version not in _VERSIONS:
        raise LoadError(
            f"{path} is GGUF version {version}, supported are {' and '.join(map(str, _VERSIONS))}: get a newer file"
        )
    if keys > _MOST_KEYS or tensors > _MOST_TENSORS:
        raise LoadError(f"{path} is damaged (it announces {keys} keys and {tensors} tensors): download it again")


class _CheckedReader(GGUFReader):
    """The package's reader, with every length checked before it is used.

    The package slices a memory map for each string of a vocabulary, which takes seconds.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._end = min(size, _MOST_METADATA)  # of the keys
        self._where = "the header"
        self._strings = self._numbers = 0
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        item = np.dtype(dtype).newbyteorder("<")
        self._check_end(offset + item.itemsize * int(count))
        return np.frombuffer(self.data, item, int(count), offset)

    def _check_end(self, offset: int) -> None:
        """Refuse a part of the header that would end at `offset`."""
        if offset > self._size:
            self._damaged(f"{self._where} reaches beyond its end")
        if offset > self._end:
            self._damaged(f"its keys have more than {self._end} bytes")

    def _get_str(self, offset: int) -> tuple[Any, Any]:
        length = self._get(offset, np.uint64)
        if int(length[0]) > _LONGEST_STRING:
            self._damaged(f"{self._where} has a text of {length[0]} bytes")
        return length, self._get(offset + 8, np.uint8, length[0])

    def _get_name(self, offset: int) -> None:
        if int(self._get(offset, np.uint64)[0]) > _LONGEST_NAME:
            self._damaged(f"{self._where} is followed by a name of more than {_LONGEST_NAME} bytes")

    def _push_field(self, field: ReaderField, skip_sum: bool = False) -> int:
        if field.name in self.fields:
            self._damaged(f"key {format_key(field.name)} appears twice")
        end = super()._push_field(field, skip_sum)
        self._where = f"key {format_key(field.name)} or the one after it"
        return end

    def _build_fields(self, offs: int, count: int) -> int:
        for _ in range(int(count)):
            self._get_name(offs)
            offs = super()._build_fields(offs, 1)
        self._where, self._end = "the list of tensors", self._size
        return offs

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        """Like the package's method, but an array is one part: of numbers, or a list of texts."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        offset = orig_offs + 12
        types = [GGUFValueType.ARRAY, kind]
        if kind == GGUFValueType.ARRAY:
            self._damaged(f"{self._where} is an array of arrays, which no model has")
        if kind != GGUFValueType.STRING:
            self._numbers += count
            if self._numbers > _MOST_NUMBERS:
                self._damaged(f"its arrays hold more than {_MOST_NUMBERS} numbers")
            values = self._get(offset, self.gguf_scalar_to_np[kind], count)
            return 12 + values.nbytes, [values], [0], types
        self._strings += count
        if self._strings > _MOST_STRINGS:
            self._damaged(f"its arrays hold more than {_MOST_STRINGS} texts")
        self._check_end(offset + 8 * count)  # of empty texts
        data: Any = self.data
        view, end, texts = memoryview(data), self._end, list[str]()
        read_length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = offset + 8
            if begin > end:
                self._check_end(begin)
            offset = begin + read_length(view, offset)[0]
            if offset > end or offset - begin > _LONGEST_NAME:
                self._damaged(f"{self._where} has a text of {offset - begin} bytes")
            texts.append(str(view[begin:offset], "utf-8", "replace"))
        return offset - orig_offs, [texts], [0], types

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        self._get_name(orig_offs)
        info = super()._get_tensor_info_field(orig_offs)
        self._where = f"tensor {format_key(info.name)} or the one after it"
        return info

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[ReaderField]]:
        offs, infos = super()._build_tensor_info(offs, int(count))
        return int(offs), infos

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Check sizes first: the package multiplies in 64 bits, which may wrap."""
        start_offs, names = int(start_offs), set()
        for info in fields:
            name, label = info.name, f"tensor {format_key(info.name)}"
            dims, raw_type, offset = (info.parts[i].tolist() for i in (3, 4, 5))
            if name in names:
                self._damaged(f"{label} appears twice")
            names.add(name)
            if not 1 <= len(dims) <= _MOST_DIMENSIONS or 0 in dims:
                self._damaged(f"{label} has the shape {dims[:8]}")
            if raw_type[0] not in GGMLQuantizationType._value2member_map_:
                raise LoadError(
                    f"{self._path}: {label} is of type {raw_type[0]}, which the gguf package does not know: update it "
                    "with pip, or get another quantization of the model"
                )
            group, size = GGML_QUANT_SIZES[GGMLQuantizationType(raw_type[0])]
            if dims[0] % group:
                self._damaged(f"{label} has rows of {dims[0]} elements, which are not whole blocks of {group}")
            if offset[0] % int(self.alignment):
                self._damaged(f"{label} is at {offset[0]}, which is not a multiple of {self.alignment}")
            if start_offs + offset[0] + prod(dims) // group * size > self._size:
                self._damaged(f"{label} reaches beyond the end of the file")
        super()._build_tensors(start_offs, fields)

    def _damaged(self, fault: str) -> NoReturn:
        raise LoadError(f"{self._path} is damaged ({fault}): download it again")


def _value(field: ReaderField) -> Any:
    """A field as a plain value. Bytes that are not UTF-8 are replaced."""
    parts: list[Any] = field.parts
    if field.types[0] == GGUFValueType.STRING:
        return parts[-1].tobytes().decode("utf-8", "replace")
    if field.types[0] != GGUFValueType.ARRAY:
        return parts[-1].tolist()[0]
    values = parts[field.data[0]]
    return values if field.types[-1] == GGUFValueType.STRING else values.tolist()


def _refuse_overlaps(path: Path, tensors: dict[str, TensorLocation]) -> None:
    """Raise LoadError if tensors share bytes: a small file could then describe a huge model."""
    ordered = sorted(tensors.items(), key=lambda item: item[1].begin)
    for (_, before), (name, after) in pairwise(ordered):
        if after.begin < before.end:
            raise LoadError(f"{path} is damaged (tensor {format_key(name)} overlaps another one): download it again")
