"""Weights stored in blocks of 4 to 8 bits: the type, where its bytes lie, and how codes get into it and out again.

Knows the layout that the compiled kernels read and plain torch can produce; which backend fills or multiplies is not its
business. The layout: panels of 16 rows; in a panel the groups of K follow each other; in a group, lines of 64 bytes that
hold a byte for each of four neighbouring elements (a quad) of each of the 16 rows.

- 8 bits: a line is a quad, signed bytes.
- 4 bits: line j holds quad 2j in the lower halves of its bytes and quad 2j + 1 in the upper halves.
- 5 bits: as 4, then a line for every eight quads whose bytes hold the fifth bit of quad i as bit i.
- 6 bits: as 4, then a line for every four quads whose bytes hold the upper two bits of quad i as bits 2i and 2i + 1.

Scales and minima of the 16 rows lie side by side. Rows are padded to whole panels, K to whole groups; padding has scales
and minima of zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.layouts.forms import BlockForm

# Weights in blocks are kept on disk: raise it when the layout or the rounding changes.
LAYOUT_VERSION = 3

PANEL = 16
QUAD = 4
MAX_COLUMNS = 1 << 24  # far above any model; sums are formed a group at a time and cannot overflow

# Makes an uninitialised contiguous tensor of a shape and a type.
Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]


def allocate_default(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True, slots=True)
class BlockWeight:
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
        """Room for a weight; rows of padding hold zeros, the rest nothing in particular.

        allocate: where from. Raises ValueError for a number of columns that no weight has.
        """
        if not 0 < columns <= MAX_COLUMNS:
            raise ValueError(f"a weight in blocks has 1 to {MAX_COLUMNS} columns, not {columns}")
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
    def shape(self) -> torch.Size:
        return torch.Size((self.rows, self.columns))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def numel(self) -> int:
        return self.rows * self.columns

    def tensors(self) -> dict[str, Tensor]:
        """What it consists of, by name."""
        parts = {"codes": self.codes, "scales": self.scales, "supers": self.supers}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of memory, padding and scales included."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def narrow(self, first: int, count: int) -> BlockRows:
        """Rows first .. first + count, to be written to. Raises IndexError for rows it does not have."""
        if first < 0 or count < 0 or first + count > self.rows:
            raise IndexError(f"rows {first} .. {first + count} of a weight of {self.rows}")
        return BlockRows(self, first, count)

    def panels(self, first: int, count: int) -> BlockWeight:
        """Rows first .. first + count as a weight of their own in the same memory. Raises IndexError where they do not begin
        with a panel, or end in the middle of one that is not the last."""
        end = first + count
        if first % PANEL or not 0 <= first < end <= self.rows or (end % PANEL and end != self.rows):
            raise IndexError(f"rows {first} .. {end} of a weight of {self.rows} in panels of {PANEL}")
        own = slice(first // PANEL, -(-end // PANEL))
        supers = None if self.supers is None else self.supers[own]
        return BlockWeight(self.form, count, self.columns, self.codes[own], self.scales[own], supers)

    def dequantize(self, ids: Tensor | None = None) -> Tensor:
        """The rows `ids` (any shape), or all of them, as numbers: float32 [..., columns]. Raises IndexError."""
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
        width = form.bits - 4  # bits of a code in a byte of the lines that follow
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=lines.device)[:, None]
        upper = (lines[:, :, form.group // 8 :, None] >> shifts) & ((1 << width) - 1)  # [R, G, lines, 8 / width, 4]
        codes = codes | (upper.flatten(2, 3) << 4)
    return codes.flatten(2)


def group_scales(weight: BlockWeight, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum of each group of some rows as they are meant: float32 [len(rows), groups, 1].

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
    """Write all rows of another weight of this form and width, wherever that lies, over those of the target."""
    ids = torch.arange(source.rows)
    here, there = (ids + target.first).to(target.weight.device), ids.to(source.device)
    for own, other in zip(target.weight.tensors().values(), source.tensors().values(), strict=True):
        own[here // PANEL, :, :, here % PANEL] = other[there // PANEL, :, :, there % PANEL].to(own.device)


def store_block_rows(target: BlockRows, codes: Tensor, scales: Tensor, supers: Tensor | None = None) -> None:
    """Write rows as they are quantized.

    codes: [count, columns], uint8, or int8 with 8 bits. scales: [count, groups, parts] and supers: [count, super groups,
    parts], of the types they are stored in.
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
