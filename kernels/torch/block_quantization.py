"""Block quantization in plain torch: GGUF blocks repacked into panels, and floats quantized into blocks.

Repacking is exact; bit positions are ggml's (ggml-common.h). Quantization is the oracle of the compiled kernels: each step is
one float32 operation and sums follow the order of elements, so all instruction sets produce the same bytes. q8_0 is
llama.cpp's rule. In the formats with super groups each group searches the scale (and minimum) of least squared error, as
`make_qkx2_quants` in ggml-quants.c. A group whose magnitudes are all below 2^-100 is zero. A super group (q8_0: a group) with
NaN, infinity or an overflow of float16 is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.layouts.weight_layouts import FORMS, BlockForm, BlockRows, store_block_rows

# Codes [n, elements], scales [n, groups, parts] and supers [n, parts] of n blocks.
Parts: TypeAlias = tuple[Tensor, Tensor, Tensor | None]

_REPACK_ELEMENTS = 1 << 22  # of a weight, repacked at a time

_SCALE_BYTES = 12  # of a block with eight scales and eight minima of 6 bits


def block_elements(form: BlockForm) -> int:
    """Elements per block in a file."""
    return form.group * max(form.super_groups, 1)


def row_bytes(form: BlockForm, columns: int) -> int:
    """Bytes per row in a file. Raises ValueError for a form that files do not have, or columns that do not fill blocks."""
    elements = block_elements(form)
    if FORMS.get(form.name) != form:
        raise ValueError(f"no file has blocks of the form {form}")
    if columns % elements:
        raise ValueError(f"rows of {columns} elements are not whole {form.name} blocks of {elements}")
    scales = 2 * form.parts
    if form.super_groups:
        scales += _SCALE_BYTES if form.minimum else form.super_groups
    return columns // elements * (elements * form.bits // 8 + scales)


def check_blocks(target: BlockRows, blocks: Tensor) -> None:
    """Raises ValueError unless `blocks` are those of the target's rows."""
    shape = (target.count, row_bytes(target.weight.form, target.weight.columns))
    if blocks.dtype != torch.uint8 or blocks.shape != shape:
        raise ValueError(
            f"blocks are {blocks.dtype} {tuple(blocks.shape)}; {target.weight.form.name} wants uint8 {shape}"
        )


def repack_gguf_blocks(target: BlockRows, source: Tensor) -> None:
    """`Backend.repack`. Raises ValueError."""
    check_blocks(target, source)
    weight, form = target.weight, target.weight.form
    read = _READERS[form.name] if form.super_groups else functools.partial(_read_single_group, form=form)
    step = max(1, _REPACK_ELEMENTS // weight.columns)
    for begin in range(0, target.count, step):
        part = source[begin : begin + step]
        rows = BlockRows(weight, target.first + begin, len(part))
        per_row = weight.columns // block_elements(form)
        codes, scales, supers = read(part.reshape(len(part) * per_row, -1))
        store_block_rows(
            rows,
            codes.reshape(len(part), weight.columns),
            scales.reshape(len(part), -1, form.parts),
            None if supers is None else supers.reshape(len(part), per_row, -1),
        )


def _halves(block: Tensor) -> Tensor:
    """Bytes as float16. [n, 2 * k] -> [n, k]."""
    return block.contiguous().view(torch.float16)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Bytes in runs: the lower halves of a run are the first codes, its upper halves the next ones. [n, k] -> [n, 2 * k]."""
    runs = packed.view(len(packed), -1, run)
    return torch.stack((runs & 0x0F, runs >> 4), dim=2).flatten(1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bit i of four bytes belongs to code i. [n, 4] -> [n, 32], as 16 or 0."""
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(1) << 4


def _read_single_group(blocks: Tensor, form: BlockForm) -> Parts:
    """Blocks of a form without super groups: scale and minimum, fifth bits, codes."""
    end = 2 * form.parts
    scales, codes = _halves(blocks[:, :end])[:, None], blocks[:, end:]
    if form.bits == 4:
        codes = _nibbles(codes, 16)
    elif form.bits == 5:
        codes = _nibbles(codes[:, 4:], 16) | _fifth_bits(codes[:, :4])
    return codes, scales, None


def _scales_of_six_bits(packed: Tensor) -> Tensor:
    """Eight scales and eight minima. [n, 12] -> [n, 8, 2].

    The first four of each are the lower six bits of bytes 0 .. 3 and 4 .. 7; the others have their lower four bits in the
    halves of bytes 8 .. 11 and their upper two at the top of the first eight bytes.
    """
    scales, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    first = torch.stack((scales & 0x3F, minima & 0x3F), dim=2)
    last = torch.stack(((rest & 0x0F) | (scales >> 6 << 4), (rest >> 4) | (minima >> 6 << 4)), dim=2)
    return torch.cat((first, last), dim=1)


def _read_q4_k(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 16:], 32), _scales_of_six_bits(blocks[:, 4:16]), _halves(blocks[:, :4])


def _read_q5_k(blocks: Tensor) -> Parts:
    # Bit i of byte j belongs to code j of group i.
    upper = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = _nibbles(blocks[:, 48:], 32) | (upper << 4).flatten(1)
    return codes, _scales_of_six_bits(blocks[:, 4:16]), _halves(blocks[:, :4])


def _read_q6_k(blocks: Tensor) -> Parts:
    # Halves of a block, 128 codes each. Bits 2i and 2i + 1 of byte j belong to code 32i + j of a half.
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    codes = _nibbles(blocks[:, :128], 64) | ((upper & 3) << 4).flatten(1)
    return codes, blocks[:, 192:208].contiguous().view(torch.int8), _halves(blocks[:, 208:])


# Of forms with super groups.
_READERS: dict[str, Callable[[Tensor], Parts]] = {"q4_k": _read_q4_k, "q5_k": _read_q5_k, "q6_k": _read_q6_k}

TINY, HUGE = 2.0**-100, 2.0**100

# By how many steps the codes reach past the ends of a group's values; below zero, they clip there.
SHIFTS = (-0.6, -0.2, 0.2, 0.6, 1.0)

# How far inside the end of the codes the largest magnitude of a group may fall, or past it, in symmetric forms.
REACHES = tuple(0.5 * step for step in range(-8, 3))

LEAST_SPREAD = 1e-5  # of codes, relative: below it the fit of a scale and a minimum is not determined

_QUANTIZE_ELEMENTS = 1 << 18  # quantized at a time; intermediate results stay in the cache


def quantize_into_blocks(target: BlockRows, source: Tensor) -> None:
    """Quantize source [count, columns], float32 or narrower, into rows of a weight. Raises ValueError."""
    if source.shape != target.shape:
        raise ValueError(f"source {tuple(source.shape)} for rows {tuple(target.shape)}")
    step = max(1, _QUANTIZE_ELEMENTS // target.weight.columns)
    for begin in range(0, target.count, step):
        part = source[begin : begin + step].float()
        store_block_rows(
            BlockRows(target.weight, target.first + begin, len(part)), *quantize_blocks(part, target.weight.form)
        )


def quantize_blocks(x: Tensor, form: BlockForm, weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and supers of rows, for `store_block_rows`. x: float32 [R, K].

    weights: how much the squared error of an element counts, float32 >= 0 of ordinary size, broadcast to [R, K]; q8_0 has
    no use for them. Raises ValueError for a form that floats are not quantized into.
    """
    if form.name == "q8_0":
        return _quantize_eight(x, form)
    if not form.super_groups:
        raise ValueError(f"floats are quantized into q8_0, q4_k, q5_k or q6_k, not into {form.name}")
    rows, columns = x.shape
    per_element = torch.ones_like(x) if weights is None else weights.expand(rows, columns)
    values, counts = _in_groups(x, form), _in_groups(per_element, form)  # [group, R * G]
    top = values.abs().amax(0)
    finite = top < HUGE  # false for NaN
    usable = finite & (top >= TINY)
    # Scaled by powers of two, exactly, so that sums neither overflow nor underflow.
    exponent = (torch.where(usable, top, 1.0).view(torch.int32) >> 23) << 23
    down, up = (0x7F000000 - exponent).view(torch.float32), exponent.view(torch.float32)
    scaled = torch.where(usable, values * down, 0.0)
    parts = _fit_with_minimum(scaled, counts, form) if form.minimum else _fit_symmetric(scaled, counts, form)
    wanted = torch.stack([part * up for part in parts], dim=1).view(rows, -1, form.parts)
    scales, supers = _store_scales(wanted, finite.view(rows, -1), form)
    return _codes(values, scales, supers, form)[:, :columns], scales, supers


def _in_groups(x: Tensor, form: BlockForm) -> Tensor:
    """Groups as columns, zeros after a row's end. [R, K] -> [group, R * groups]."""
    return F.pad(x, (0, -x.shape[1] % form.group)).reshape(-1, form.group).T.contiguous()


def _in_order(terms: Tensor) -> Tensor:
    """The sum over the first dimension, in order."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def _quotient(a: float, b: Tensor) -> Tensor:
    """a / b. Torch multiplies by the reciprocal instead."""
    return torch.full_like(b, a) / b


def _quantize_eight(x: Tensor, form: BlockForm) -> tuple[Tensor, Tensor, None]:
    groups = F.pad(x, (0, -x.shape[1] % form.group)).view(len(x), -1, form.group)
    top = groups.abs().amax(2, keepdim=True)
    scale = top / torch.full_like(top, 127.0)
    usable = (top >= TINY) & scale.half().isfinite()
    stored = torch.where(usable | (top < TINY), torch.where(usable, scale, 0.0), torch.nan).half()
    product = torch.where(usable, groups * _quotient(1.0, torch.where(usable, scale, 1.0)), 0.0).abs()
    # Ties away from zero: corrects those that were rounded down to an even number.
    rounded = product.round()
    rounded += (product - rounded >= 0.5).float()
    codes = rounded.copysign(groups).to(torch.int8)
    return codes.flatten(1)[:, : x.shape[1]], stored, None


class _Sums:
    """Weighted sums over each group for a fit by codes q."""

    def __init__(self, y: Tensor, weights: Tensor) -> None:
        self.weights, self.wy = weights, weights * y  # [group, N]
        self.w, self.y = _in_order(weights), _in_order(self.wy)

    def of_codes(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of w q, w q q and w y q."""
        wq = self.weights * q
        total = _in_order(torch.stack((wq, wq * q, self.wy * q), dim=1))  # [3, N]
        return total[0], total[1], total[2]


def _fit_with_minimum(y: Tensor, weights: Tensor, form: BlockForm) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each group: y is near scale * code - minimum; neither is negative. y, weights: [group, N]."""
    top = float((1 << form.bits) - 1)
    sums = _Sums(y, weights)
    low = y.amin(0).clamp(max=0.0)
    span = y.amax(0) - low
    # Values between 0 and 1; all equal if the span is 0.
    z = (y - low) * torch.where(span > 0, _quotient(1.0, torch.where(span > 0, span, 1.0)), 0.0)
    scale, minimum = span / torch.full_like(span, top), low
    q1, qq, yq = sums.of_codes((z * top).round())
    # The reduction of the squared error by a fit.
    gain = 2.0 * (scale * yq + minimum * sums.y)
    gain = gain - (scale * scale * qq + 2.0 * (scale * minimum) * q1 + minimum * minimum * sums.w)

    def take_if_better(q: Tensor) -> None:
        nonlocal scale, minimum, gain
        q1, qq, yq = sums.of_codes(q)
        spread = sums.w * qq - q1 * q1
        determined = spread > LEAST_SPREAD * (sums.w * qq)
        divisor = torch.where(determined, spread, 1.0)
        new_scale, new_minimum = (sums.w * yq - sums.y * q1) / divisor, (qq * sums.y - q1 * yq) / divisor
        above = new_minimum > 0  # a minimum is at most zero
        new_scale = torch.where(above, yq / torch.where(qq > 0, qq, 1.0), new_scale)
        new_minimum = torch.where(above, 0.0, new_minimum)
        new_gain = new_scale * yq + new_minimum * sums.y
        better = determined & (new_scale > 0) & (new_gain > gain)
        scale, minimum = torch.where(better, new_scale, scale), torch.where(better, new_minimum, minimum)
        gain = torch.where(better, new_gain, gain)

    for below in SHIFTS:
        for over in SHIFTS:
            take_if_better((z * (top + (below + over)) - below).clamp(0.0, top).round())
    by = torch.where(scale > 0, _quotient(1.0, torch.where(scale > 0, scale, 1.0)), 0.0)
    take_if_better(((y - minimum) * by).clamp(0.0, top).round())
    return scale, -minimum


def _fit_symmetric(y: Tensor, weights: Tensor, form: BlockForm) -> tuple[Tensor]:
    """The scale of each group, of either sign: y is near scale * (code - offset). y, weights: [group, N]."""
    low, high = float(-form.offset), float(form.offset - 1)
    sums = _Sums(y, weights)
    most, least = y.amax(0), y.amin(0)
    extreme = torch.where(most >= -least, most, least)
    by = torch.where(extreme != 0, _quotient(1.0, torch.where(extreme != 0, extreme, 1.0)), 0.0)
    z = y * by
    square, norm, product = torch.zeros_like(by), torch.ones_like(by), torch.zeros_like(by)
    # The extreme is near one end of the codes or the other.
    for reach in (*(low - past for past in REACHES), *(high + past for past in REACHES)):
        _, qq, yq = sums.of_codes((z * reach).clamp(low, high).round())
        # The squared error is least where (sum of y q)^2 / (sum of q^2) is largest.
        better = yq * yq * norm > square * qq
        square, norm = torch.where(better, yq * yq, square), torch.where(better, qq, norm)
        product = torch.where(better, yq, product)
    return (product / norm,)


def _store_scales(wanted: Tensor, finite: Tensor, form: BlockForm) -> tuple[Tensor, Tensor]:
    """Scales (and minima) of groups as bytes, with their supers. wanted: [R, G, parts]; finite: [R, G], of the values."""
    most = 255.0 if form.minimum else 127.0
    spare = -wanted.shape[1] % form.super_groups
    wanted = F.pad(wanted, (0, 0, 0, spare)).view(len(wanted), -1, form.super_groups, form.parts)
    finite = F.pad(finite, (0, spare), value=True).view(len(finite), -1, form.super_groups)
    finite = finite.all(2)[:, :, None]  # [R, S, 1]
    top = wanted.abs().amax(2)
    exact = top / torch.full_like(top, most)
    # Rounded up, so that the largest byte is at most `most` whatever the precision of float16.
    supers = exact.half()
    low = supers.float() < exact
    supers = torch.where(low, (supers.view(torch.int16) + 1).view(torch.float16), supers)
    finite = finite & supers.isfinite().all(2, keepdim=True)
    supers = torch.where(finite, supers, torch.nan)
    wide = supers.float()[:, :, None]  # [R, S, 1, parts]
    counts = finite[:, :, None] & (wide > 0)
    scales = torch.where(counts, wanted / torch.where(counts, wide, 1.0), 0.0).round().clamp(-most, most)
    scales = scales.to(torch.uint8 if form.minimum else torch.int8).flatten(1, 2)
    return scales[:, : scales.shape[1] - spare], supers


def _codes(values: Tensor, scales: Tensor, supers: Tensor, form: BlockForm) -> Tensor:
    """The nearest codes for the stored scales. values: [group, R * G]. Returns uint8 [R, groups * group]."""
    groups = scales.shape[1]
    wide = scales.float() * supers.float().repeat_interleave(form.super_groups, 1)[:, :groups]  # [R, G, parts]
    scale = wide[:, :, 0].flatten()
    usable = (scale != 0) & scale.isfinite()
    by = torch.where(usable, _quotient(1.0, torch.where(usable, scale, 1.0)), 0.0)
    shifted = values + wide[:, :, 1].flatten() if form.minimum else values
    low, high = float(-form.offset), float((1 << form.bits) - 1 - form.offset)
    codes = torch.where(usable, shifted * by, low).clamp(low, high).round() - low
    return codes.to(torch.uint8).T.reshape(len(scales), -1)
