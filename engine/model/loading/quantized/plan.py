"""What each weight of a quantized checkpoint is made of and which form of blocks holds it exactly.

Responsible for the rule by which integers become blocks, whatever method stored them, and for the words on those that do
not fit. Where the tensors lie is told by the modules beside, one a method; their bytes become weights in `decoding`. Imports
no torch, so that the API process can tell before an engine is started.

Integers of a row stand in groups of columns, each with a scale and a zero point: a number is scale * (code - zero). A form of
blocks has a float16 scale for 32 elements (16 in q6_k), so a group must be whole blocks and its scale a float16 number. Then

- without zero points (the middle of the range is zero), up to 4 bits are q4_0, 5 bits q5_0, 6 bits q6_k, more q8_0;
- with zero points, up to 4 bits are q4_k and 5 bits q5_k: a common scale and a common minimum are both the float16 scale, the
  scale's byte is 1 and the minimum's byte is the zero point; of 6 or 7 bits code - zero is a signed byte, which is q8_0.

Ternary numbers are q4_0, 4-bit floats of MXFP4 q5_0 (`fp4` says how). Products and differences of such short numbers are exact in
float32, so nothing is rounded anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from windlass.engine.model.loading.quantized.files import Located

Packing = Literal["gptq", "awq", "packed", "padded", "bytes", "floats", "mxfp4", "ternary", "divided ternary"]

BLOCK = 32  # elements that share a scale, in the forms that are used here except q6_k
_HALF_BLOCK = 16

# Why a weight is not multiplied as it is stored.
ACT_ORDER = "columns are grouped in the order of activations (desc_act)"
ODD_GROUPS = "groups are no multiple of 32 columns"
WIDE_SCALES = "scales are no float16 numbers"
WIDE_ZEROS = "8 bits with zero points fit no form of blocks"
FLOATS = "8-bit floating point fits no form of blocks"


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """One tensor [rows, columns] as the unquantized model has it.

    sources: names in the checkpoint by what they are ("codes", "scales", "zeros", "order"). bits: of a code. group_size:
    columns that share a scale. block: rows and columns that share one, where that is not group_size of one row.
    zeros_less_one: zero points are stored minus one. storage: the form that holds it exactly, as a plan of storage names it,
    or None, and then `reason` says why there is none.
    """

    name: str
    rows: int
    columns: int
    packing: Packing
    sources: Mapping[str, str]
    bits: int
    group_size: int
    block: tuple[int, int] | None = None
    zeros_less_one: bool = False
    symmetric: bool = True
    storage: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """The quantized tensors of a checkpoint by the names that the unquantized model has for them.

    title: of the method. sources: every tensor that they are made of or that says how activations were rounded, which is
    decided here. zero_biases: biases that the model has no place for; they must be zero, as some writers leave them.
    """

    title: str
    tensors: Mapping[str, QuantizedTensor]
    sources: Located
    zero_biases: frozenset[str]

    @property
    def is_integers(self) -> bool:
        """Whether weights of integers are among them, which cannot be quantized once more."""
        return any(tensor.packing != "floats" for tensor in self.tensors.values())

    def storages(self) -> dict[str, str]:
        """The storages of those that lie in memory as they are stored, by name."""
        return {name: tensor.storage for name, tensor in self.tensors.items() if tensor.storage is not None}

    def notices(self, dtype: str) -> tuple[str, ...]:
        """One line on those that are dequantized, none if there are none. dtype: what they become."""
        reasons: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if tensor.storage is None:
                reasons[tensor.reason] += 1
        if not reasons:
            return ()
        why = ", ".join(
            f"{reason} ({count})" if len(reasons) > 1 else reason for reason, count in reasons.most_common()
        )
        return (
            f"{reasons.total()} of {len(self.tensors)} quantized weights ({self.title}) become {dtype}, the type of those that "
            f"are not quantized: {why}",
        )


def choose_storage(
    bits: int, group_size: int, columns: int, *, symmetric: bool, scales_fit: bool, ordered: bool
) -> tuple[str | None, str]:
    """The form that holds integers exactly, with its number of groups to a common scale, or None and the reason.

    scales_fit: every scale is a float16 number. ordered: groups are consecutive columns.
    """
    whole = group_size >= columns  # one group a row
    if not ordered:
        return None, ACT_ORDER
    if not whole and group_size % BLOCK:
        return None, ODD_GROUPS
    if not scales_fit:
        return None, WIDE_SCALES
    span = min(group_size, columns)
    if symmetric:
        if bits <= 4:
            return "q4_0", ""
        if bits == 5:
            return "q5_0", ""
        return (f"q6_k:{-(-span // _HALF_BLOCK)}" if bits == 6 else "q8_0"), ""
    if bits <= 5:
        return f"{'q4_k' if bits <= 4 else 'q5_k'}:{-(-span // BLOCK)}", ""
    return ("q8_0", "") if bits < 8 else (None, WIDE_ZEROS)
