"""Decoding of quantized tensors to block formats or to floats.

Handles the bit order of every method (GPTQ, AWQ, compressed-tensors, FP8, MXFP4, BitNet) and of GGUF blocks. Works on a range
of rows at a time to limit memory. The block format of each weight is chosen in `quantized_checkpoint`. GGUF types without a
kernel are dequantized with the `gguf` package, which is imported on demand.

MXFP4 (OCP Microscaling Formats 1.0) has 4-bit floats ±0, ½, 1, 1½, 2, 3, 4 and 6 in blocks of 32 with an exponent e that
multiplies by 2^(e - 127). Twice a float is an integer up to 12, which fits a 5-bit code, and half of 2^(e - 127) is a float16
number down to e = 104, so q5_0 holds MXFP4 exactly. Blocks below that (largest number under 2^-20) are rounded to multiples of
2^-24.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from windlass.engine.errors import LoadError, reason_of
from windlass.engine.model.loading.gguf_index import GGUF_TYPES
from windlass.engine.model.loading.quantized_checkpoint import QuantizedCheckpoint, QuantizedTensor
from windlass.engine.model.loading.tensor_reader import TensorEntry, read_entries, tensor_entry
from windlass.kernels.layouts.weight_layouts import FORMS

# -- MXFP4 ------------------------------------------------------------------------------------------------------------

_OFFSET = 16  # the code of zero in q5_0
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # floats times two, by their lower three bits; the fourth bit is the sign
_CODES = torch.tensor([_OFFSET + n for n in _TWICE] + [_OFFSET - n for n in _TWICE], dtype=torch.uint8)
_MIN_EXPONENT, _MAX_EXPONENT = 104, 143  # of scales whose half is a float16 number
_BIAS = 128  # 127, plus one for the half


def codes_of_fp4(floats: Tensor) -> Tensor:
    """q5_0 codes of 4-bit floats given as 0 to 15. uint8, any shape."""
    return torch.index_select(_CODES, 0, floats.flatten().int()).view(floats.shape)


def scales_of_fp4(codes: Tensor, exponents: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of `q5_0`: uint8 [..., groups, 32] and float16 [..., groups].

    codes: q5_0 codes of the floats, [..., groups, 32]. exponents: uint8 [..., groups]. name: of the tensor, for the error.
    Raises LoadError for NaN and for numbers beyond a million, which no weights have.
    """
    zeros = (codes == _OFFSET).all(dim=-1)
    if bool((exponents > _MAX_EXPONENT).logical_and(~zeros | (exponents == 255)).any()):
        raise LoadError(
            f"tensor {name!r} contains numbers that are NaN or far beyond those of weights: the checkpoint is damaged: "
            "download or copy it again, or take another"
        )
    powers = exponents.int()
    if bool((powers < _MIN_EXPONENT).any()):
        shrunk = torch.ldexp(codes.float() - _OFFSET, (powers - _MIN_EXPONENT).clamp(max=0)[..., None])
        codes = (shrunk.round() + _OFFSET).to(torch.uint8)
    exact = powers.clamp(_MIN_EXPONENT, _MAX_EXPONENT) - _BIAS
    scales = torch.ldexp(torch.ones(exact.shape), exact)
    return codes, scales.to(torch.float16)


# -- GGUF -------------------------------------------------------------------------------------------------------------


def to_block_format(blocks: Tensor, kind: str, name: str) -> Tensor:
    """Rows of bytes of a GGUF type, in the GGUF layout of the block format that stores them (MXFP4 becomes Q5_0).

    name: of the tensor, for the error. Raises LoadError for numbers that no weights have.
    """
    if kind != "MXFP4":
        return blocks
    each = blocks.reshape(-1, GGUF_TYPES[kind].num_bytes)
    data = each[:, 1:]
    codes, scales = scales_of_fp4(codes_of_fp4(torch.cat((data & 0x0F, data >> 4), dim=1)), each[:, 0], name)
    fifth = (codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)  # [N, 4, 8]
    low = codes & 0x0F
    parts = (
        scales[:, None].view(torch.uint8),
        fifth.sum(2, dtype=torch.uint8),
        low[:, :16] | (low[:, 16:] << 4),
    )
    return torch.cat(parts, dim=1).view(*blocks.shape[:-1], -1)


def dequantize_gguf(blocks: Tensor, kind: str) -> Tensor:
    """Dequantize rows of bytes of any type that the `gguf` package supports: float32 [..., columns]."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        return torch.from_numpy(np.ascontiguousarray(dequantize(blocks.numpy(), GGMLQuantizationType[kind])))


# -- Quantized checkpoints --------------------------------------------------------------------------------------------


def read_quantized(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[QuantizedTensor, dict[str, Tensor]]]:
    """Each quantized tensor with its source tensors by role. Raises LoadError."""
    owners = {
        source.name: (tensor, role) for tensor in checkpoint.tensors.values() for role, source in tensor.sources.items()
    }
    files = dict.fromkeys(source.file for tensor in checkpoint.tensors.values() for source in tensor.sources.values())
    found: dict[str, dict[str, Tensor]] = {name: {} for name in checkpoint.tensors}
    for file in files:
        try:
            for part in read_entries(
                file, _entries(checkpoint, file), lambda _, dtype, shape: torch.empty(shape, dtype=dtype)
            ):
                if not part.finite:
                    raise LoadError(
                        f"{file}: tensor {part.name!r} contains numbers that are NaN or infinite: the checkpoint is damaged: "
                        "download or copy it again, or take another"
                    )
                tensor, role = owners[part.name]
                found[tensor.name][role] = part.tensor
                if len(found[tensor.name]) == len(tensor.sources):
                    yield tensor, found.pop(tensor.name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"cannot read {file}: {reason_of(error)}: download or copy the file again") from None


def _entries(checkpoint: QuantizedCheckpoint, file: Path) -> Iterator[TensorEntry]:
    """Source tensors in this file, weight by weight in the order of their codes."""
    for tensor in sorted(checkpoint.tensors.values(), key=lambda tensor: tensor.sources["codes"].begin):
        yield from (tensor_entry(source) for source in tensor.sources.values() if source.file == file)


_ELEMENTS = 4 << 20  # decoded at once
_ALIGNED = 32  # rows: a multiple of the codes in a word, whatever their width

# The output of each position in a word of AWQ, from the lowest bits.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class BlockData:
    """Rows as `store_block_rows` takes them."""

    codes: Tensor
    scales: Tensor
    supers: Tensor | None

    def __getitem__(self, rows: Tensor) -> BlockData:
        return BlockData(self.codes[rows], self.scales[rows], None if self.supers is None else self.supers[rows])


@dataclass(frozen=True, slots=True)
class _Integers:
    """Rows of integers. A number is scales * (codes - zeros), with the scale and zero of its column's group.

    codes: uint8, or int8 for plain bytes, [R, K]. zeros: int32 [R, G]; None: `middle` everywhere. scales: [R, G], as stored.
    """

    codes: Tensor
    zeros: Tensor | None
    middle: int
    scales: Tensor


def decode_blocks(
    tensor: QuantizedTensor, sources: Mapping[str, Tensor], *, whole: bool = False
) -> Iterator[tuple[int, BlockData]]:
    """Rows of a tensor that has a storage, in its block format: (first row, rows), in order.

    sources: by role. whole: all rows at once.
    """
    assert tensor.storage is not None
    for first, integers in _integers(tensor, sources, whole):
        yield first, _blocks(tensor, integers)


def decode_numbers(
    tensor: QuantizedTensor, sources: Mapping[str, Tensor], *, whole: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """Rows of a tensor as float32 [R, K]: (first row, rows), in order. Raises LoadError for columns without a group."""
    if tensor.packing == "floats":
        yield from _scaled(tensor, sources, whole)
        return
    groups = _group_of_columns(tensor, sources)
    for first, integers in _integers(tensor, sources, whole):
        zeros = integers.middle if integers.zeros is None else integers.zeros[:, groups]
        yield first, (integers.codes.to(torch.int32) - zeros).float() * integers.scales.float()[:, groups]


def _group_of_columns(tensor: QuantizedTensor, sources: Mapping[str, Tensor]) -> Tensor:
    """The group of each column: int64 [K]."""
    order, groups = sources.get("order"), -(-tensor.columns // tensor.group_size)
    if order is None:
        return torch.arange(tensor.columns) // tensor.group_size
    if not 0 <= int(order.min()) <= int(order.max()) < groups:
        raise LoadError(
            f"tensor {tensor.sources['order'].name!r} names groups outside 0 .. {groups - 1}: the checkpoint is damaged: "
            "download it again"
        )
    return order.long()


def _scaled(tensor: QuantizedTensor, sources: Mapping[str, Tensor], whole: bool) -> Iterator[tuple[int, Tensor]]:
    codes, scales = sources["codes"], sources["scales"].float()
    scales = scales.view(-1, 1) if tensor.block is None else scales
    height, width = tensor.block or (1, tensor.columns)
    for first, count in _steps(tensor, whole):
        rows = (
            torch.arange(first, first + count) // height
            if scales.shape[0] > 1
            else torch.zeros(count, dtype=torch.int64)
        )
        wide = scales[rows].repeat_interleave(width, dim=1)[:, : tensor.columns]
        yield first, codes[first : first + count].float() * wide


def _steps(tensor: QuantizedTensor, whole: bool) -> Iterator[tuple[int, int]]:
    step = tensor.rows if whole else max(1, _ELEMENTS // tensor.columns // _ALIGNED) * _ALIGNED
    for first in range(0, tensor.rows, step):
        yield first, min(step, tensor.rows - first)


def _integers(tensor: QuantizedTensor, sources: Mapping[str, Tensor], whole: bool) -> Iterator[tuple[int, _Integers]]:
    decode = _DECODE[tensor.packing]
    for first, count in _steps(tensor, whole):
        yield first, decode(tensor, sources, first, count)


def _gptq(tensor: QuantizedTensor, sources: Mapping[str, Tensor], first: int, count: int) -> _Integers:
    bits = tensor.bits
    codes = _unpack(sources["codes"][:, first : first + count].t(), bits, tensor.columns)
    scales = sources["scales"][:, first : first + count].t()
    if tensor.symmetric:
        return _Integers(codes, None, 1 << (bits - 1), scales)
    words = sources["zeros"][:, first * bits // 32 : -(-(first + count) * bits // 32)]
    if tensor.zeros_less_one and bits != 3:
        # One was subtracted from whole words, so that a zero point of 0 borrowed from the next one.
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = ((words.long() + ones) & 0xFFFF_FFFF).to(torch.uint32).view(torch.int32)
    zeros = _unpack(words, bits, count).t().int()
    if tensor.zeros_less_one and bits == 3:
        zeros = (zeros + 1) & 7
    return _Integers(codes, zeros, 0, scales)


def _awq(tensor: QuantizedTensor, sources: Mapping[str, Tensor], first: int, count: int) -> _Integers:
    def unpack(words: Tensor) -> Tensor:
        part = words[:, first // 8 : -(-(first + count) // 8)]
        nibbles = _unpack(part, 4, 8 * part.shape[1]).view(len(words), -1, 8)
        positions = torch.tensor(_AWQ_ORDER).argsort()  # of output i
        return nibbles[:, :, positions].flatten(1)[:, :count].t()  # [R, words]

    scales = sources["scales"][:, first : first + count].t()
    codes = unpack(sources["codes"]).contiguous()
    return _Integers(codes, None if tensor.symmetric else unpack(sources["zeros"]).int(), 8, scales)


def _packed(tensor: QuantizedTensor, sources: Mapping[str, Tensor], first: int, count: int) -> _Integers:
    bits = tensor.bits
    codes = _unpack(sources["codes"][first : first + count], bits, tensor.columns)
    zeros = None
    if not tensor.symmetric:
        words = sources["zeros"][first * bits // 32 : -(-(first + count) * bits // 32)]
        zeros = _unpack(words.t(), bits, count).t().int()
    return _Integers(codes, zeros, 1 << (bits - 1), _row_scales(tensor, sources["scales"], first, count))


def _padded(tensor: QuantizedTensor, sources: Mapping[str, Tensor], first: int, count: int) -> _Integers:
    """Each word holds only whole codes."""
    bits, each = tensor.bits, 32 // tensor.bits
    shifts = torch.arange(each) * bits

    def unpack(words: Tensor) -> Tensor:
        return ((words.long()[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)

    codes = unpack(sources["codes"][first : first + count])[:, : tensor.columns].to(torch.uint8)
    zeros = None
    if not tensor.symmetric:
        word = first // each
        found = unpack(sources["zeros"][word : -(-(first + count) // each)].t())  # from the word of the first row
        zeros = found[:, first - word * each :][:, :count].t().int()
    return _Integers(codes, zeros, 1 << (bits - 1), _row_scales(tensor, sources["scales"], first, count))


def _bytes(tensor: QuantizedTensor, sources: Mapping[str, Tensor], first: int, count: int) -> _Integers:
    zeros = None if tensor.symmetric else _row_scales(tensor, sources["zeros"], first, count).int()
    scales = _row_scales(tensor, sources["scales"], first, count)
    return _Integers(sources["codes"][first : first + count], zeros, 0, scales)


def _mxfp4(tensor: QuantizedTensor, sources: Mapping[str, Tensor], first: int, count: int) -> _Integers:
    data = sources["codes"][first : first + count]  # [R, G, 16]
    codes = codes_of_fp4(torch.stack((data & 0x0F, data >> 4), dim=3).flatten(2))  # [R, G, 32]
    codes, scales = scales_of_fp4(codes, sources["scales"][first : first + count], tensor.name)
    return _Integers(codes.flatten(1), None, 16, scales)


def _ternary(tensor: QuantizedTensor, sources: Mapping[str, Tensor], first: int, count: int) -> _Integers:
    packed = sources["codes"]
    rows = torch.arange(first, first + count)
    quarter, row = rows // len(packed), rows % len(packed)
    codes = (packed[row] >> (2 * quarter).to(torch.uint8)[:, None]) & 3
    scale = sources["scales"].reshape(1, 1)
    if tensor.packing == "divided ternary":
        scale = 1 / scale.float()
        scale = scale if tensor.storage is None else scale.to(torch.float16)
    if not bool(scale.isfinite().all()):
        raise LoadError(
            f"tensor {tensor.sources['scales'].name!r} is too small to divide by: the checkpoint is damaged"
        )
    return _Integers(codes, None, 1, scale.expand(count, 1))


def _row_scales(tensor: QuantizedTensor, scales: Tensor, first: int, count: int) -> Tensor:
    """Scales of some rows, [count, groups]; the tensor may have a single one."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(count, 1)
    return scales.view(tensor.rows, -1)[first : first + count]


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack consecutive numbers of `bits` bits from the lowest bit on, across words: int32 [R, W] -> uint8 [R, count]."""
    if bits in (4, 8):
        data = words.contiguous().view(torch.uint8)  # all supported machines are little-endian
        if bits == 4:
            data = torch.stack((data & 0x0F, data >> 4), dim=2).flatten(1)
        return data[:, :count]
    start = torch.arange(count) * bits
    word, shift = start // 32, start % 32
    # Two adjacent words hold a number wherever it begins.
    wide = torch.nn.functional.pad(words.long() & 0xFFFF_FFFF, (0, 1))
    pairs = wide[:, word] | (wide[:, word + 1] << 32)
    return ((pairs >> shift) & ((1 << bits) - 1)).to(torch.uint8)


_DECODE = {
    "gptq": _gptq,
    "awq": _awq,
    "packed": _packed,
    "padded": _padded,
    "bytes": _bytes,
    "mxfp4": _mxfp4,
    "ternary": _ternary,
    "divided ternary": _ternary,
}


def _blocks(tensor: QuantizedTensor, integers: _Integers) -> BlockData:
    name, _, supers = str(tensor.storage).partition(":")
    form, span = FORMS[name], min(tensor.group_size, tensor.columns)
    groups = -(-tensor.columns // form.group)
    scales = _exact(tensor, integers.scales)  # [R, G]
    # Groups of the block format per group of the checkpoint; a group of a whole row is padded at its end.
    repeats = -(-span // form.group)
    if not form.minimum:
        codes = _shifted(integers, tensor, form.offset, signed=form.bits == 8)
        if not supers:
            return BlockData(codes, scales.repeat_interleave(repeats, dim=1)[:, :groups, None], None)
        ones = torch.ones((len(codes), groups, 1), dtype=torch.int8)
        return BlockData(codes, ones, scales[:, :, None])
    assert integers.zeros is not None
    zeros = integers.zeros.to(torch.uint8).repeat_interleave(repeats, dim=1)[:, :groups]
    return BlockData(
        integers.codes, torch.stack((torch.ones_like(zeros), zeros), dim=2), torch.stack((scales, scales), dim=2)
    )


def _shifted(integers: _Integers, tensor: QuantizedTensor, offset: int, *, signed: bool) -> Tensor:
    """Codes whose zero point is `offset`: uint8, or int8."""
    zeros: int | Tensor = integers.middle
    if integers.zeros is not None:
        zeros = integers.zeros.repeat_interleave(tensor.group_size, dim=1)[:, : tensor.columns]
    elif zeros == offset:
        return integers.codes
    codes = integers.codes.to(torch.int16) - zeros + offset
    return codes.to(torch.int8 if signed else torch.uint8)


def _exact(tensor: QuantizedTensor, scales: Tensor) -> Tensor:
    halves = scales.to(torch.float16)
    if not torch.equal(halves.to(scales.dtype), scales):
        raise LoadError(f"tensor {tensor.sources['scales'].name!r} changed while it was read: start again")
    return halves
