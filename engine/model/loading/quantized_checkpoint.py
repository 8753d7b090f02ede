"""Quantized checkpoints: GPTQ, AWQ, FP8, compressed-tensors, MXFP4 and BitNet.

Finds the tensors that make up each weight, and the block format that stores it exactly. A quantized row has groups of columns,
each with a scale and a zero point: value = scale * (code - zero). A block format has a float16 scale for 32 elements (16 in
q6_k), so a group must consist of whole blocks and its scale must be a float16 number. Then

- without zero points, up to 4 bits are q4_0, 5 bits q5_0, 6 bits q6_k, more q8_0;
- with zero points, up to 4 bits are q4_k and 5 bits q5_k: the common scale and the common minimum are both the float16 scale,
  the scale byte is 1 and the minimum byte is the zero point; of 6 or 7 bits, code - zero is a signed byte, which is q8_0.

Ternary weights are q4_0, MXFP4 is q5_0. Products and differences of such short numbers are exact in float32, so nothing is
rounded. Other weights are dequantized.

For a linear layer with K inputs and N outputs:

- GPTQ (AutoGPTQ, GPTQModel): `qweight` int32 [K * bits / 32, N], packed along the inputs from the lowest bit; `qzeros` int32
  [groups, N * bits / 32], packed along the outputs, minus one in the first format; `scales` [groups, N]; optional `g_idx` int32
  [K], the group of each input.
- AWQ ("gemm" files of AutoAWQ): `qweight` int32 [K, N / 8], `qzeros` int32 [groups, N / 8], `scales` [groups, N]. The eight
  outputs of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits.
- FP8: `weight` float8 [N, K] and `weight_scale` or `weight_scale_inv`, both multiplied: one number, one per row or one per
  block. No block format holds these, so they are dequantized.
- compressed-tensors, packed: `weight_packed` int32 [N, K * bits / 32], codes plus half the range, consecutive or (releases up to
  0.13) 32 // bits in each word; `weight_shape`; `weight_scale` [N, groups]; optional `weight_zero_point` int32, packed along the
  rows; optional `weight_g_idx` int32 [K], -1 for unspecified. Plain: `weight` int8 [N, K], `weight_scale` for the tensor, a row
  or a group, optional `weight_zero_point` int8.
- MXFP4 (gpt-oss experts): `<name>_blocks` uint8 [experts, N, K / 32, 16], two floats per byte, lower half first, and
  `<name>_scales` uint8 [experts, N, K / 32], the block exponents. Rows are outputs, unlike those of the unquantized tensor.
- BitNet (2402.17764, as packed by transformers): `weight` uint8 [N / 4, K], the lowest two bits for the first quarter of the rows
  plus one, and so on; `weight_scale`, one number that multiplies or, in the older layer class, divides. A reciprocal is rounded
  to float16, by at most 2^-11.

Imports no torch: the API process checks a checkpoint before an engine starts.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config
from windlass.engine.model.config_json.quantization_config import QuantizationConfig, read_quantization_config
from windlass.engine.model.loading.safetensors_header import TensorLocation
from windlass.engine.model.model_spec import ModelSpec

# Upper bytes, with either sign, of bfloat16 numbers from 2^-17 to 2^15: float16 holds them exactly.
_EXACT = bytes(byte | sign for byte in range(55, 71) for sign in (0, 0x80))


def fits_float16(tensor: TensorLocation) -> bool:
    """Whether float16 holds all numbers exactly."""
    if tensor.dtype == "F16":
        return True
    if tensor.dtype not in ("BF16", "F32"):
        return False
    data = tensor.read()
    if tensor.dtype == "BF16":
        if not data[1::2].translate(None, _EXACT):
            return True
        # A bfloat16 is the upper half of a float32.
        words = array("I", (word << 16 for word in set(_numbers("H", data))))
        return all(map(_is_half, _numbers("f", words.tobytes())))
    if any(data[0::4]):  # more digits than a float16 has: the common case, found without a loop over numbers
        return False
    return all(map(_is_half, set(_numbers("f", data))))


def _is_half(value: float) -> bool:
    try:
        return bool(struct.unpack("<e", struct.pack("<e", value))[0] == value)
    except OverflowError:
        return False


def is_repeated(tensor: TensorLocation, pattern: bytes) -> bool:
    """Whether the data is a repetition of `pattern`."""
    data = tensor.read()
    return len(data) % len(pattern) == 0 and data == pattern * (len(data) // len(pattern))


def has_consecutive_groups(tensor: TensorLocation, group_size: int) -> bool:
    """Whether the groups of an int32 tensor, one number per column, are consecutive columns."""
    numbers = _numbers("i", tensor.read())
    return numbers == array("i", (column // group_size for column in range(len(numbers))))


def read_integers(tensor: TensorLocation) -> tuple[int, ...]:
    """The numbers of a small tensor of integers; empty for other types."""
    code = {"I64": "q", "I32": "i"}.get(tensor.dtype)
    return tuple(_numbers(code, tensor.read())) if code is not None else ()


def _numbers(code: str, data: bytes) -> array[Any]:
    """Little-endian numbers; all supported machines are little-endian."""
    numbers = array(code)
    numbers.frombytes(data[: len(data) // numbers.itemsize * numbers.itemsize])
    return numbers


Packing = Literal["gptq", "awq", "packed", "padded", "bytes", "floats", "mxfp4", "ternary", "divided ternary"]
BLOCK = 32  # elements that share a scale in block formats, except q6_k
_HALF_BLOCK = 16

# Reasons to dequantize a weight.
ACT_ORDER = "columns are grouped in the order of activations (desc_act)"
ODD_GROUPS = "groups are not a multiple of 32 columns"
WIDE_SCALES = "scales are not float16 numbers"
WIDE_ZEROS = "no block format holds 8 bits with zero points"
FLOATS = "no block format holds 8-bit floating point"


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A quantized tensor that is [rows, columns] in the unquantized model.

    sources: tensors of the checkpoint by role ("codes", "scales", "zeros", "order"). bits: of a code. group_size: columns that
    share a scale. block: rows and columns that share one, if not group_size columns of one row. zeros_less_one: zero points are
    stored minus one. storage: the block format that holds it exactly, as in a storage plan; None for the given `reason`.
    """

    name: str
    rows: int
    columns: int
    packing: Packing
    sources: Mapping[str, TensorLocation]
    bits: int
    group_size: int
    block: tuple[int, int] | None = None
    zeros_less_one: bool = False
    symmetric: bool = True
    storage: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """The quantized tensors of a checkpoint by their names in the unquantized model.

    title: of the method. sources: names of all tensors that they consist of, and of unused scales of activations. zero_biases:
    biases that the model does not have and some writers add; they must be zero.
    """

    title: str
    tensors: Mapping[str, QuantizedTensor]
    sources: frozenset[str]
    zero_biases: frozenset[str]

    @property
    def is_integers(self) -> bool:
        """Whether any weight consists of integers, which cannot be quantized again."""
        return any(tensor.packing != "floats" for tensor in self.tensors.values())

    def storages(self) -> dict[str, str]:
        """The storages of the tensors that are not dequantized, by name."""
        return {name: tensor.storage for name, tensor in self.tensors.items() if tensor.storage is not None}

    def notices(self, dtype: str) -> tuple[str, ...]:
        """One line on dequantized tensors, none if there are none. dtype: the resulting type."""
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
            f"{reasons.total()} of {len(self.tensors)} quantized weights ({self.title}) are stored as {dtype}, like those that "
            f"are not quantized: {why}",
        )


def choose_storage(tensor: QuantizedTensor, *, ordered: bool) -> tuple[str | None, str]:
    """The block format that holds integers exactly, with its number of groups per common scale; or None and the reason.

    ordered: groups are consecutive columns.
    """
    bits, span = tensor.bits, min(tensor.group_size, tensor.columns)
    if not ordered:
        return None, ACT_ORDER
    if span < tensor.columns and span % BLOCK:
        return None, ODD_GROUPS
    if tensor.packing != "divided ternary" and not fits_float16(tensor.sources["scales"]):  # reciprocals are rounded
        return None, WIDE_SCALES
    if tensor.symmetric:
        if bits <= 5:
            return "q4_0" if bits <= 4 else "q5_0", ""
        return (f"q6_k:{-(-span // _HALF_BLOCK)}" if bits == 6 else "q8_0"), ""
    if bits <= 5:
        return f"{'q4_k' if bits <= 4 else 'q5_k'}:{-(-span // BLOCK)}", ""
    return ("q8_0", "") if bits < 8 else (None, WIDE_ZEROS)


SCALE_TYPES = ("F16", "BF16", "F32", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor of the unquantized model. located: every tensor of the checkpoint. module: its name without ".weight". stacked:
    number of parts of the tensor "name", if the module is "name[3]"."""

    located: Mapping[str, TensorLocation]
    module: str
    rows: int
    columns: int
    stacked: int = 1

    @property
    def name(self) -> str:
        return f"{self.module}.weight"

    def has(self, end: str) -> bool:
        """Whether the checkpoint has the tensor `module.end`."""
        return f"{self.module}.{end}" in self.located

    def find(self, end: str, *dtypes: str) -> TensorLocation:
        """The tensor `module.end`. Raises LoadError if it is missing or of another type."""
        found = self.located.get(f"{self.module}.{end}")
        if found is None:
            raise LoadError(
                f"{self.module!r} is quantized, but its tensor {self.module + '.' + end!r} is missing: the checkpoint is "
                "incomplete: download it again"
            )
        if found.dtype not in dtypes:
            raise LoadError(
                f"tensor {found.name!r} is {found.dtype} where {' or '.join(dtypes)} is expected: download it again"
            )
        return found

    def integers(
        self,
        packing: Packing,
        sources: Mapping[str, TensorLocation],
        bits: int,
        group_size: int,
        *,
        symmetric: bool,
        ordered: bool = True,
        zeros_less_one: bool = False,
    ) -> QuantizedTensor:
        """A tensor of integers with the block format that holds it exactly, if there is one. ordered: as in `choose_storage`."""
        found = QuantizedTensor(self.name, self.rows, self.columns, packing, sources, bits, group_size)
        found = replace(found, zeros_less_one=zeros_less_one, symmetric=symmetric)
        storage, reason = choose_storage(found, ordered=ordered)
        return replace(found, storage=storage, reason=reason)


def check_shape(tensor: TensorLocation, *shapes: tuple[int, ...]) -> None:
    """Raise LoadError for a tensor that has none of these shapes."""
    if tensor.shape not in shapes:
        raise LoadError(
            f"tensor {tensor.name!r} has shape {list(tensor.shape)} where config.json asks for {list(shapes[0])}: take the "
            "config.json that belongs to the checkpoint"
        )


def num_words(count: int, bits: int, *, padded: bool = False) -> int:
    """Number of 32-bit words for `count` codes. padded: each word holds only whole codes."""
    return -(-count // (32 // bits)) if padded else -(-count * bits // 32)


def code_bits(
    tensor: TensorLocation, words: int, count: int, choices: Sequence[int], *, padded: bool = False
) -> tuple[int, bool]:
    """Bits of a code if `count` codes fill `words` words of 32 bits, and whether words are padded. padded: they may be.

    Raises LoadError if no width fits.
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


def size_of_groups(tensor: TensorLocation, groups: int, columns: int, expected_size: int | None) -> int:
    """Columns of a group in a row of `groups` groups. expected_size: from config.json. Raises LoadError."""
    if expected_size is not None and groups == -(-columns // expected_size):
        return min(expected_size, columns)
    if groups < 1 or columns % groups:
        raise LoadError(
            f"tensor {tensor.name!r} has {groups} groups for {columns} columns: take the config.json that belongs to the "
            "checkpoint"
        )
    return columns // groups


# Each describe function returns the quantized form of a weight; None if the weight is not quantized. It raises LoadError for
# tensors that are missing or do not match config.json.

_GPTQ_BITS, _AWQ_BITS = (2, 3, 4, 8), 4


def describe_gptq(wanted: ExpectedTensor, quant_config: QuantizationConfig) -> QuantizedTensor | None:
    """GPTQ, and AWQ, whose codes are packed along the outputs like zero points."""
    if not wanted.has("qweight"):
        return None
    is_awq, rows, columns = quant_config.method == "AWQ", wanted.rows, wanted.columns
    codes, zeros = (wanted.find(end, "I32") for end in ("qweight", "qzeros"))
    scales = wanted.find("scales", *SCALE_TYPES)
    if is_awq:
        bits, shape = _AWQ_BITS, (columns, num_words(rows, _AWQ_BITS))
    else:
        bits, _ = code_bits(codes, codes.shape[0] if codes.shape else 0, columns, _GPTQ_BITS)
        shape = (columns * bits // 32, rows)
    check_shape(codes, shape)
    groups = scales.shape[0] if scales.shape else 0
    group_size = size_of_groups(scales, groups, columns, quant_config.group_size)
    check_shape(scales, (groups, rows))
    check_shape(zeros, (groups, num_words(rows, bits)))
    sources, ordered = {"codes": codes, "zeros": zeros, "scales": scales}, True
    if not is_awq and wanted.has("g_idx"):
        sources["order"] = order = wanted.find("g_idx", "I32")
        check_shape(order, (columns,))
        ordered = has_consecutive_groups(order, group_size)
    less_one = quant_config.zeros_less_one
    symmetric = bits != 3 and is_repeated(zeros, _middle(bits, less_one))
    packing: Packing = "awq" if is_awq else "gptq"
    return wanted.integers(
        packing, sources, bits, group_size, symmetric=symmetric, ordered=ordered, zeros_less_one=less_one
    )


def _middle(bits: int, less_one: bool) -> bytes:
    """A stored byte of zero points that are all the middle of the range."""
    zero = (1 << (bits - 1)) - less_one
    return bytes([sum(zero << shift for shift in range(0, 8, bits))])


_FP8_TYPES = ("F8_E4M3", "F8_E5M2")


def describe_floats(wanted: ExpectedTensor, quant_config: QuantizationConfig) -> QuantizedTensor | None:
    codes = wanted.located.get(wanted.name)
    if codes is None or codes.dtype not in _FP8_TYPES:
        return None
    rows, columns = wanted.rows, wanted.columns
    check_shape(codes, (rows, columns))
    end = "weight_scale_inv" if wanted.has("weight_scale_inv") else "weight_scale"
    scales = wanted.find(end, *SCALE_TYPES)
    block = None
    if scales.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        block = _fp8_block(scales, rows, columns, quant_config.block)
    sources = {"codes": codes, "scales": scales}
    return QuantizedTensor(wanted.name, rows, columns, "floats", sources, 8, columns, block=block, reason=FLOATS)


def _fp8_block(scales: TensorLocation, rows: int, columns: int, block: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns of a block. block: as config.json names it."""
    shape = scales.shape
    if block is not None:
        if shape == (-(-rows // block[0]), -(-columns // block[1])):
            return block
    elif len(shape) == 2 and min(shape) and rows % shape[0] == 0 and columns % shape[1] == 0:
        return rows // shape[0], columns // shape[1]
    raise LoadError(
        f"tensor {scales.name!r} has shape {list(shape)}, which are not the scales of a weight {[rows, columns]}: take the "
        "config.json that belongs to the checkpoint"
    )


def describe_compressed(wanted: ExpectedTensor, quant_config: QuantizationConfig) -> QuantizedTensor | None:
    if wanted.has("weight_packed"):
        return _describe_packed(wanted, quant_config.bits)
    stored = wanted.located.get(wanted.name)
    if stored is not None and stored.dtype == "I8":
        return _describe_plain(wanted)
    return describe_floats(wanted, quant_config)


def _describe_packed(wanted: ExpectedTensor, widths: tuple[int, ...]) -> QuantizedTensor:
    rows, columns = wanted.rows, wanted.columns
    codes = wanted.find("weight_packed", "I32")
    scales = wanted.find("weight_scale", *SCALE_TYPES)
    shape = wanted.find("weight_shape", "I64", "I32")
    if read_integers(shape) != (rows, columns):
        raise LoadError(
            f"tensor {shape.name!r} states {list(read_integers(shape))} where config.json requires {[rows, columns]}: take the "
            "config.json that belongs to the checkpoint"
        )
    words = codes.shape[1] if len(codes.shape) == 2 else 0
    bits, padded = code_bits(codes, words, columns, widths or range(1, 9), padded=True)
    check_shape(codes, (rows, words))
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    group_size = size_of_groups(scales, groups, columns, None)
    check_shape(scales, (rows, groups), *([(rows,), (1,), ()] if groups == 1 else []))
    sources, ordered = {"codes": codes, "scales": scales}, True
    symmetric = not wanted.has("weight_zero_point")
    if not symmetric:
        sources["zeros"] = zeros = wanted.find("weight_zero_point", "I32")
        check_shape(zeros, (num_words(rows, bits, padded=padded), groups))
    if wanted.has("weight_g_idx"):
        order = wanted.find("weight_g_idx", "I32", "I64")
        check_shape(order, (columns,))
        numbers = read_integers(order)
        if -1 not in numbers:
            sources["order"] = order
            ordered = order.dtype == "I32" and has_consecutive_groups(order, group_size)
    packing: Packing = "padded" if padded else "packed"
    return wanted.integers(packing, sources, bits, group_size, symmetric=symmetric, ordered=ordered)


def _describe_plain(wanted: ExpectedTensor) -> QuantizedTensor:
    rows, columns = wanted.rows, wanted.columns
    codes = wanted.find("weight", "I8")
    check_shape(codes, (rows, columns))
    scales = wanted.find("weight_scale", *SCALE_TYPES)
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    group_size = size_of_groups(scales, groups, columns, None)
    shapes = [(rows, groups), *([(rows,), (1, 1), (1,), ()] if groups == 1 else [])]
    check_shape(scales, *shapes)
    sources = {"codes": codes, "scales": scales}
    symmetric = True
    if wanted.has("weight_zero_point"):
        zeros = wanted.find("weight_zero_point", "I8")
        check_shape(zeros, *shapes)
        symmetric = is_repeated(zeros, b"\0")
        if not symmetric:
            sources["zeros"] = zeros
    return wanted.integers("bytes", sources, 8, group_size, symmetric=symmetric)


_MXFP4_BLOCK_BYTES = 16  # of floats, without the scale


def describe_mxfp4(wanted: ExpectedTensor, quant_config: QuantizationConfig) -> QuantizedTensor | None:
    stack, bracket, index = wanted.module.partition("[")
    codes = wanted.located.get(f"{stack}_blocks")
    if not bracket or codes is None:
        return None
    scales = wanted.located.get(f"{stack}_scales")
    if scales is None:
        raise LoadError(f"tensor {stack + '_scales'!r} is missing: the checkpoint is incomplete: download it again")
    rows, columns = wanted.rows, wanted.columns
    if columns % BLOCK:
        raise LoadError(f"{stack!r} has rows of {columns} numbers, which are not whole blocks of {BLOCK}")
    check_shape(codes, (wanted.stacked, rows, columns // BLOCK, _MXFP4_BLOCK_BYTES))
    check_shape(scales, (wanted.stacked, rows, columns // BLOCK))
    for tensor in (codes, scales):
        if tensor.dtype != "U8":
            raise LoadError(f"tensor {tensor.name!r} is {tensor.dtype} where U8 is expected: download it again")
    number = int(index.removesuffix("]"))
    sources = {"codes": codes.part(number), "scales": scales.part(number)}
    return QuantizedTensor(wanted.module, rows, columns, "mxfp4", sources, 4, BLOCK, storage="q5_0")


_TERNARY_BITS = 2
_ROWS_PER_BYTE = 4


def describe_ternary(wanted: ExpectedTensor, quant_config: QuantizationConfig) -> QuantizedTensor | None:
    codes = wanted.located.get(wanted.name)
    if codes is None or codes.dtype != "U8":
        return None
    rows, columns = wanted.rows, wanted.columns
    check_shape(codes, (-(-rows // _ROWS_PER_BYTE), columns))
    scales = wanted.find("weight_scale", *SCALE_TYPES)
    check_shape(scales, (1,), ())
    if not any(scales.read()):
        raise LoadError(f"tensor {scales.name!r} is zero: the checkpoint is damaged: download or copy it again")
    sources = {"codes": codes, "scales": scales}
    packing: Packing = "divided ternary" if quant_config.divides_by_scale else "ternary"
    return wanted.integers(packing, sources, _TERNARY_BITS, columns, symmetric=True)


_DESCRIBE = {
    "GPTQ": describe_gptq,
    "AWQ": describe_gptq,
    "compressed-tensors": describe_compressed,
    "FP8": describe_floats,
    "MXFP4": describe_mxfp4,
    "BitNet": describe_ternary,
}

# Tensors that some writers add to a quantized weight.
_ADDITIONAL = (
    *("g_idx", "qzeros", "weight_shape", "weight_g_idx"),
    *("weight_zero_point", "weight_scale", "weight_scale_inv"),
)

# Scales by which activations, keys and values were rounded during calibration; here options determine their types.
_ACTIVATIONS = re.compile(r"\.(input|output|activation|prob|kv|[qkv])_(scale|scale_ub|global_scale|zero_point)$")


def describe_quantized_weights(
    config: Config, spec: ModelSpec, located: Mapping[str, TensorLocation]
) -> QuantizedCheckpoint | None:
    """The quantized weights of a checkpoint; None if config.json names no supported method.

    located: every tensor of the checkpoint. Reads scales, zero points and column orders that determine the storage. Raises
    LoadError for a checkpoint that is incomplete or does not match its config.json.
    """
    quant_config = read_quantization_config(config)
    if quant_config is None:
        return None
    tensors: dict[str, QuantizedTensor] = {}
    sources = {name for name in located if _ACTIVATIONS.search(name)}
    biases: set[str] = set()
    expected = {tensor.name for weight in spec.weights() for tensor in weight.stored}
    stacked = Counter(name.rpartition("[")[0] for name in expected if name.endswith("]"))
    for weight in spec.weights():
        if len(weight.shape) != 2:
            continue
        for stored in weight.stored:
            count = stacked[stored.name.rpartition("[")[0]] or 1
            wanted = ExpectedTensor(located, stored.name.removesuffix(".weight"), stored.rows, weight.shape[1], count)
            found = _DESCRIBE[quant_config.method](wanted, quant_config)
            if found is None:
                continue
            tensors[stored.name] = found
            sources |= {source.name.partition("[")[0] for source in found.sources.values()}
            sources |= {f"{wanted.module}.{end}" for end in _ADDITIONAL if wanted.has(end)}
            biases |= {f"{wanted.module}.bias"} & located.keys() - expected
    return QuantizedCheckpoint(quant_config.method, tensors, frozenset(sources), frozenset(biases))
