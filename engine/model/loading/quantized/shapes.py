"""What the modules of every method ask of a checkpoint's tensors: that they are there, and their shapes. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.quantized.files import Located, LocatedTensor

SCALE_TYPES = ("F16", "BF16", "F32", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor of the unquantized model. module: its name without ".weight". stacked: how many the tensor holds whose name stands
    in front of a bracket, in "name[3]"."""

    module: str
    rows: int
    columns: int
    stacked: int = 1

    @property
    def name(self) -> str:
        return f"{self.module}.weight"


def find_tensor(located: Located, wanted: ExpectedTensor, end: str, dtypes: Collection[str]) -> LocatedTensor:
    """The tensor `module.end`. Raises LoadError where there is none or it is of another type."""
    found = located.get(f"{wanted.module}.{end}")
    if found is None:
        raise LoadError(
            f"{wanted.module!r} is quantized, but its tensor {wanted.module + '.' + end!r} is missing: the checkpoint is "
            "incomplete: download it again"
        )
    if found.dtype not in dtypes:
        raise LoadError(
            f"tensor {found.name!r} is {found.dtype} where {' or '.join(dtypes)} is expected: download it again"
        )
    return found


def check_shape(tensor: LocatedTensor, *shapes: tuple[int, ...]) -> None:
    """LoadError for a tensor that has none of these shapes."""
    if tensor.shape not in shapes:
        raise LoadError(
            f"tensor {tensor.name!r} has shape {list(tensor.shape)} where config.json asks for {list(shapes[0])}: take the "
            "config.json that belongs to the checkpoint"
        )


def num_words(count: int, bits: int, *, padded: bool = False) -> int:
    """Words of 32 bits for so many codes. padded: as many in each as it holds whole, else one behind the other."""
    return -(-count // (32 // bits)) if padded else -(-count * bits // 32)


def code_bits(
    tensor: LocatedTensor, words: int, count: int, choices: Sequence[int], *, padded: bool = False
) -> tuple[int, bool]:
    """Bits of a code where `count` of them fill `words` words of 32 bits, and whether words are padded. padded: they may be.

    Raises LoadError where no width does.
    """
    for layout in (False, True) if padded else (False,):
        for bits in choices:
            if num_words(count, bits, padded=layout) == words:
                return bits, layout
    widths = f"{choices[0]} to {choices[-1]}" if len(choices) > 1 else choices[0]
    raise LoadError(
        f"tensor {tensor.name!r} has shape {list(tensor.shape)}, into which {count} numbers of {widths} bits do not fit: take "
        "the config.json that belongs to the checkpoint"
    )


def size_of_groups(tensor: LocatedTensor, groups: int, columns: int, expected_size: int | None) -> int:
    """Columns of a group where a row has so many groups. told: what config.json says. Raises LoadError."""
    if expected_size is not None and groups == -(-columns // expected_size):
        return min(expected_size, columns)
    if groups < 1 or columns % groups:
        raise LoadError(
            f"tensor {tensor.name!r} has {groups} groups for {columns} columns: take the config.json that belongs to the "
            "checkpoint"
        )
    return columns // groups
