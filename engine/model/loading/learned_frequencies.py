"""Rotary frequencies that a model learned: reads them from its safetensors files.

Responsible for finding and decoding these few numbers, without torch or numpy, so that the API process, which has neither,
can report the same frequencies as the engine.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.safetensors_header import read_header
from windlass.engine.rotary.groups import RotaryGroup

_FORMATS = {"F64": "d", "F32": "f", "F16": "e", "BF16": "H"}


def with_learned_frequencies(groups: tuple[RotaryGroup, ...], directory: Path) -> tuple[RotaryGroup, ...]:
    """The groups with the frequencies of learned ones filled in; other groups as they are.

    They are called `model.rotary_emb.inv_freq`, or `model.rotary_emb.full_attention_inv_freq` and so on where groups
    differ. Raises LoadError where the files do not have them or they cannot be frequencies of this model.
    """
    return tuple(
        group if group.base.inv_freq is None else _filled(group, directory, len(groups) > 1) for group in groups
    )


def _filled(group: RotaryGroup, directory: Path, several: bool) -> RotaryGroup:
    names = [f"model.rotary_emb.{group.name}_inv_freq", "model.rotary_emb.inv_freq"]
    found = dict(_read_frequencies(directory, set(names)))
    name = next((name for name in (names[:1] if several else names) if name in found), None)
    if name is None:
        wanted = names[0] if several else names[1]
        raise LoadError(f"{directory}: rope_type 'learned' needs the tensor {wanted}: no file of this model has it")
    values = found[name]
    pairs = group.base.rotary_dim // 2
    if len(values) != pairs:
        raise LoadError(f"{directory}: tensor {name} holds {len(values)} frequencies, the model rotates {pairs} pairs")
    if not all(math.isfinite(w) and w >= 0 for w in values):
        raise LoadError(f"{directory}: tensor {name} holds numbers that are no frequencies: below 0 or not finite")
    return replace(group, base=replace(group.base, inv_freq=values))


def _read_frequencies(directory: Path, names: set[str]) -> Iterator[tuple[str, tuple[float, ...]]]:
    for path in sorted(directory.glob("*.safetensors")):
        tensors = read_header(path).tensors
        for name in names & tensors.keys():
            tensor = tensors[name]
            try:
                with path.open("rb") as file:
                    file.seek(tensor.begin)
                    data = file.read(tensor.end - tensor.begin)
            except OSError as error:
                raise LoadError(f"cannot read {path}: {error}: download or copy the file again") from None
            yield name, _decoded(tensor.dtype, data, f"{path}: tensor {name}")


def _decoded(dtype: str, data: bytes, label: str) -> tuple[float, ...]:
    code = _FORMATS.get(dtype)
    if code is None:
        raise LoadError(f"{label} is {dtype}: frequencies must be one of {', '.join(_FORMATS)}")
    values = struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
    if dtype != "BF16":
        return tuple(map(float, values))
    # bfloat16 is the upper half of a float32.
    return tuple(float(value) for value in struct.unpack(f"<{len(values)}f", b"".join(_widened(v) for v in values)))


def _widened(bits: int) -> bytes:
    return struct.pack("<I", bits << 16)
