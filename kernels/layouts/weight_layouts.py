"""Weight layouts: quantized blocks in GGUF's formats, 16-bit panels, stacked weights and experts.

Both layouts consist of panels of 16 rows; rows are padded to full panels. Block weights: a panel holds the groups of K in
order; within a group, lines of 64 bytes hold one byte for each of four adjacent elements (a quad) of each of the 16 rows.

- 8 bits: a line is a quad, signed bytes.
- 4 bits: line j holds quad 2j in the lower halves of its bytes and quad 2j + 1 in the upper halves.
- 5 bits: as 4, then a line for every eight quads whose bytes hold the fifth bit of quad i as bit i.
- 6 bits: as 4, then a line for every four quads whose bytes hold the upper two bits of quad i as bits 2i and 2i + 1.

Scales and minima of the 16 rows are adjacent; padding has scales and minima of zero. Panel weights: for every two elements of
K a line of 64 bytes with those of the 16 rows. bfloat16: the two elements of a row are adjacent. float16: first elements of
all rows, then the second ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Codes of `bits` bits; each `group` of adjacent elements of a row has a scale, and in some forms a minimum.

    super_groups 0: scales and minima are float16, and a number is scale * (code - offset), or scale * code + minimum.
    Else they are bytes, multiplied by a float16 scale and minimum that `super_groups` groups share:
    (super_scale * scale) * (code - offset), or (super_scale * scale) * code - super_minimum * minimum. Scales are signed
    bytes in a form without minima. Every product and sum is rounded to float32. Codes of 8 bits are signed.
    """

    name: str
    bits: int
    group: int
    super_groups: int = 0
    minimum: bool = False
    offset: int = 0

    @property
    def parts(self) -> int:
        """Parts per group: a scale, or a scale and a minimum."""
        return 2 if self.minimum else 1

    @property
    def group_bytes(self) -> int:
        """Bytes of the codes of one group of one row."""
        return self.group * self.bits // 8


FORMS = {
    form.name: form
    for form in (
        BlockForm("q4_0", bits=4, group=32, offset=8),
        BlockForm("q4_1", bits=4, group=32, minimum=True),
        BlockForm("q5_0", bits=5, group=32, offset=16),
        BlockForm("q5_1", bits=5, group=32, minimum=True),
        BlockForm("q8_0", bits=8, group=32),
        BlockForm("q4_k", bits=4, group=32, super_groups=8, minimum=True),
        BlockForm("q5_k", bits=5, group=32, super_groups=8, minimum=True),
        BlockForm("q6_k", bits=6, group=16, super_groups=16, offset=32),
    )
}

# Version of block weights in the weight cache on disk: increase it when the layout or the rounding changes.
LAYOUT_VERSION = 3

PANEL = 16

QUAD = 4

MAX_COLUMNS = 1 << 24  # far above any model; sums are formed per group and cannot overflow

# Makes an uninitialised contiguous tensor of a shape and a type.
Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]


def allocate_default(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


class _InPanels:
    """What weights in panels have in common."""

    __slots__ = ()

    rows: int
    columns: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows, self.columns))

    def numel(self) -> int:
        return self.rows * self.columns

    def _check_rows(self, first: int, count: int) -> None:
        if first < 0 or count < 0 or first + count > self.rows:
            raise IndexError(f"rows {first} .. {first + count} of a weight of {self.rows}")


@dataclass(frozen=True, slots=True)
class BlockWeight(_InPanels):
    """A weight [rows, columns] in panels.

    codes: uint8 [panels, groups, lines, 16, 4]. scales: [panels, groups, parts, 16] float16, or with super groups uint8 (int8
    in a form without minima); parts: the scale, then the minimum. supers: float16 [panels, super groups, parts, 16], None
    in a form without.
    """

    form: BlockForm
    rows: int
    columns: int
    codes: Tensor
    scales: Tensor
    supers: Tensor | None

    @classmethod
    def empty(cls, rows: int, columns: int, form: BlockForm, allocate: Allocate = allocate_default) -> BlockWeight:
        """An uninitialised weight whose padding rows are zeros. Raises ValueError for an invalid number of columns."""
        if not 0 < columns <= MAX_COLUMNS:
            raise ValueError(f"a block weight has 1 to {MAX_COLUMNS} columns, not {columns}")
        panels, groups = -(-rows // PANEL), -(-columns // form.group)
        codes = allocate((panels, groups, form.group_bytes // QUAD, PANEL, QUAD), torch.uint8)
        byte = torch.uint8 if form.minimum else torch.int8
        scales = allocate((panels, groups, form.parts, PANEL), byte if form.super_groups else torch.float16)
        supers = None
        if form.super_groups:
            supers = allocate((panels, -(-groups // form.super_groups), form.parts, PANEL), torch.float16)
        if rows % PANEL:
            for tensor in (codes.transpose(3, 4), scales, supers):
                if tensor is not None:
                    tensor[-1, ..., rows % PANEL :] = 0
        return cls(form, rows, columns, codes, scales, supers)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the weight, by name."""
        parts = {"codes": self.codes, "scales": self.scales, "supers": self.supers}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of memory, padding and scales included."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def narrow(self, first: int, count: int) -> BlockRows:
        """Rows first .. first + count, for writing. Raises IndexError for rows out of range."""
        self._check_rows(first, count)
        return BlockRows(self, first, count)

    def panels(self, first: int, count: int) -> BlockWeight:
        """Rows first .. first + count as a weight in the same memory. Raises IndexError unless they begin and end at panel
        boundaries (or at the last row)."""
        end = first + count
        if first % PANEL or not 0 <= first < end <= self.rows or (end % PANEL and end != self.rows):
            raise IndexError(f"rows {first} .. {end} of a weight of {self.rows} in panels of {PANEL}")
        own = slice(first // PANEL, -(-end // PANEL))
        supers = None if self.supers is None else self.supers[own]
        return BlockWeight(self.form, count, self.columns, self.codes[own], self.scales[own], supers)

    def dequantize(self, ids: Tensor | None = None) -> Tensor:
        """The rows `ids` (any shape), or all rows, dequantized: float32 [..., columns]. Raises IndexError."""
        index = torch.arange(self.rows, device=self.device) if ids is None else ids
        flat = index.flatten()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.rows:
            raise IndexError(f"rows outside 0 .. {self.rows - 1}")
        scale, minimum = group_scales(self, flat)  # [R, G, 1] each
        numbers = scale * (unpack_codes(self, flat).float() - self.form.offset)
        if minimum is not None:
            numbers += minimum
        return numbers.flatten(1)[:, : self.columns].view(*index.shape, self.columns)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Consecutive rows of a BlockWeight, to be filled."""

    weight: BlockWeight
    first: int
    count: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count, self.weight.columns))


def unpack_codes(weight: BlockWeight, rows: Tensor) -> Tensor:
    """The codes of some rows, padding of K included: uint8, int8 with 8 bits, [len(rows), groups, group]."""
    form = weight.form
    lines = weight.codes[rows // PANEL, :, :, rows % PANEL]  # [R, G, lines, 4]
    if form.bits == 8:
        return lines.view(torch.int8).flatten(2)
    halves = lines[:, :, : form.group // 8]
    codes = torch.stack((halves & 0x0F, halves >> 4), dim=3).flatten(2, 3)  # [R, G, quads, 4]
    if form.bits > 4:
        width = form.bits - 4  # bits of a code in the following lines
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=lines.device)[:, None]
        upper = (lines[:, :, form.group // 8 :, None] >> shifts) & ((1 << width) - 1)  # [R, G, lines, 8 / width, 4]
        codes = codes | (upper.flatten(2, 3) << 4)
    return codes.flatten(2)


def group_scales(weight: BlockWeight, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Final scale and minimum of each group of some rows: float32 [len(rows), groups, 1].

    A number is scale * (code - offset) + minimum.
    """
    form, panel, row = weight.form, rows // PANEL, rows % PANEL
    scales = weight.scales[panel, :, :, row].float()  # [R, G, parts]
    if weight.supers is not None:
        supers = weight.supers[panel, :, :, row].float().repeat_interleave(form.super_groups, dim=1)
        scales = scales * supers[:, : scales.shape[1]]
    if not form.minimum:
        return scales, None
    return scales[:, :, :1], -scales[:, :, 1:] if form.super_groups else scales[:, :, 1:]


def copy_rows(target: BlockRows, source: BlockWeight) -> None:
    """Copy all rows of another weight of this form and width, on any device, into those of the target."""
    ids = torch.arange(source.rows)
    here, there = (ids + target.first).to(target.weight.device), ids.to(source.device)
    for own, other in zip(target.weight.tensors().values(), source.tensors().values(), strict=True):
        own[here // PANEL, :, :, here % PANEL] = other[there // PANEL, :, :, there % PANEL].to(own.device)


def store_block_rows(target: BlockRows, codes: Tensor, scales: Tensor, supers: Tensor | None = None) -> None:
    """Store quantized rows.

    codes: [count, columns], uint8, or int8 with 8 bits. scales: [count, groups, parts] and supers: [count, super groups,
    parts], of the stored types.
    """
    weight = target.weight
    form = weight.form
    rows = torch.arange(target.first, target.first + target.count, device=weight.device)
    panel, row = rows // PANEL, rows % PANEL
    codes = F.pad(codes.view(torch.uint8), (0, -weight.columns % form.group))
    quads = codes.view(target.count, -1, form.group // QUAD, QUAD)  # [R, G, quads, 4]
    if form.bits == 8:
        lines = quads
    else:
        lines = (quads[:, :, 0::2] & 0x0F) | (quads[:, :, 1::2] << 4)
        if form.bits > 4:
            width = form.bits - 4
            shape = (*quads.shape[:2], form.group * width // (8 * QUAD), 8 // width, QUAD)
            upper = (quads >> 4).view(shape)  # [R, G, lines, 8 / width, 4]
            more = torch.zeros_like(upper[:, :, :, 0])
            for i in range(8 // width):
                more |= upper[:, :, :, i] << (i * width)
            lines = torch.cat((lines, more), dim=2)
    weight.codes[panel, :, :, row] = lines.to(weight.device)
    weight.scales[panel, :, :, row] = scales.to(weight.device)
    if weight.supers is not None and supers is not None:
        weight.supers[panel, :, :, row] = supers.to(weight.device)


def randomize(weight: BlockWeight, generator: torch.Generator | None = None) -> None:
    """Fill a weight: every code is equally likely, and numbers have the mean 0 and the variance 1 / columns."""
    form, groups = weight.form, weight.scales.shape[1]
    # Eight bytes at a time, all bits random.
    weight.codes.view(-1).view(torch.int64).random_(-(1 << 63), None, generator=generator)
    # Codes without a minimum have the mean -1/2, which scales of both signs cancel.
    spread = (4**form.bits - 1) / 12 + (0.0 if form.minimum else 0.25)
    scale = 1.0 / math.sqrt(weight.columns * spread)
    centre = ((1 << form.bits) - 1) / 2
    # As bytes: the largest scale for which the minimum fits a byte too.
    byte = int(255 / centre) if form.minimum else 64
    if weight.supers is not None:
        weight.supers.fill_(scale / byte)
    unit = float(byte) if form.super_groups else scale
    if form.minimum:
        weight.scales[:, :, 0] = unit
        weight.scales[:, :, 1] = unit * centre * (1.0 if form.super_groups else -1.0)
    else:
        signs = torch.randint(
            0, 2, (len(weight.scales), groups, 1, PANEL), generator=generator, device=weight.scales.device
        )
        weight.scales.copy_((signs * 2 - 1) * unit)
    if weight.rows % PANEL:  # padding
        for tensor in (weight.codes.transpose(3, 4), weight.scales, weight.supers):
            if tensor is not None:
                tensor[-1, ..., weight.rows % PANEL :] = 0


PANEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class PanelWeight(_InPanels):
    """A bfloat16 or float16 weight [rows, columns] in panels.

    data: [panels, lines, 16, 2] (bfloat16) or [panels, lines, 2, 16] (float16).
    """

    rows: int
    columns: int
    data: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, allocate: Allocate = allocate_default) -> PanelWeight:
        """An uninitialised weight whose padding is zeros. Raises ValueError for other types than bfloat16 and float16."""
        if dtype not in PANEL_DTYPES:
            raise ValueError(f"a panel weight is bfloat16 or float16, not {dtype}")
        line = (PANEL, 2) if dtype == torch.bfloat16 else (2, PANEL)
        weight = cls(rows, columns, allocate((-(-rows // PANEL), -(-columns // 2), *line), dtype))
        by_row = weight._by_row()
        if rows % PANEL:
            by_row[-1, rows % PANEL :] = 0
        if columns % 2:
            by_row[:, :, -1, 1] = 0
        return weight

    def _by_row(self) -> Tensor:
        """The data as [panels, 16, lines, 2], a view."""
        return self.data.permute(0, 2, 1, 3) if self.dtype == torch.bfloat16 else self.data.permute(0, 3, 1, 2)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of memory, padding included."""
        return self.data.nbytes

    def narrow(self, first: int, count: int) -> PanelRows:
        """Rows first .. first + count, for writing. Raises IndexError for rows out of range."""
        self._check_rows(first, count)
        return PanelRows(self, first, count)

    def unpack(self) -> Tensor:
        """A copy of the weight as rows, [rows, columns] in its dtype."""
        return self._by_row().flatten(2).flatten(0, 1)[: self.rows, : self.columns].clone()


@dataclass(frozen=True, slots=True)
class PanelRows:
    """Consecutive rows of a PanelWeight, to be filled from a checkpoint's tensor."""

    weight: PanelWeight
    first: int
    count: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count, self.weight.columns))


Part: TypeAlias = Tensor | PanelWeight | BlockWeight

PartRows: TypeAlias = Tensor | PanelRows | BlockRows


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """A weight [rows, columns] in parts [rows of the part, columns], in the order of its rows."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for parts of different widths."""
        if not self.parts or len({part.shape[1] for part in self.parts}) > 1:
            raise ValueError(f"parts of one weight have the same columns, not {[tuple(p.shape) for p in self.parts]}")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, padding and scales included."""
        return sum(part.nbytes for part in self.parts)

    def spans(self) -> list[tuple[Part, int, int]]:
        """Each part with its first row and the one after its last."""
        found, first = [], 0
        for part in self.parts:
            found.append((part, first, first + part.shape[0]))
            first += part.shape[0]
        return found

    def narrow(self, first: int, count: int) -> PartRows:
        """Rows first .. first + count, for writing. Raises IndexError unless one part contains all of them."""
        for part, begin, end in self.spans():
            if begin <= first and count >= 0 and first + count <= end:
                return (
                    part.narrow(0, first - begin, count)
                    if isinstance(part, Tensor)
                    else part.narrow(first - begin, count)
                )
        raise IndexError(
            f"rows {first} .. {first + count} are not all in one part of {[p.shape[0] for p in self.parts]}"
        )


ExpertWeight = Tensor | PanelWeight | BlockWeight | StackedWeight


class ExpertWeights:
    """weights: [columns, inner] of each expert, all of one shape. biases: [columns] of each, or None.

    Raises ValueError for experts of different shapes.
    """

    def __init__(self, weights: Sequence[ExpertWeight], biases: Sequence[Tensor] | None = None) -> None:
        self.weights, self.biases = tuple(weights), None if biases is None else tuple(biases)
        shapes = {tuple(weight.shape) for weight in self.weights}
        if len(shapes) != 1:
            raise ValueError(f"experts have one shape, not {sorted(shapes)}")
        self.columns, self.inner = shapes.pop()
        if self.biases is not None and {tuple(bias.shape) for bias in self.biases} != {(self.columns,)}:
            raise ValueError("each expert needs a bias with one number per row")
        if self.biases is not None and len(self.biases) != len(self.weights):
            raise ValueError(f"{len(self.weights)} experts and {len(self.biases)} biases")

    def __len__(self) -> int:
        return len(self.weights)

    def bias(self, expert: int) -> Tensor | None:
        return None if self.biases is None else self.biases[expert]
