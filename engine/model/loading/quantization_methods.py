"""Tensor layouts of GPTQ, AWQ, FP8, compressed-tensors, MXFP4 and BitNet checkpoints.

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

Imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config
from windlass.engine.model.config_json.quantization_config import QuantizationConfig, read_quantization_config
from windlass.engine.model.loading.quantized_checkpoint import (
    BLOCK,
    FLOATS,
    SCALE_TYPES,
    ExpectedTensor,
    Located,
    LocatedTensor,
    Packing,
    QuantizedCheckpoint,
    QuantizedTensor,
    check_shape,
    choose_storage,
    code_bits,
    find_tensor,
    fits_float16,
    has_consecutive_groups,
    is_repeated,
    locate,
    num_words,
    read_integers,
    size_of_groups,
)
from windlass.engine.model.model_spec import ModelSpec

# Each describe function returns the sources of a weight; None if the weight is not quantized. It raises LoadError for tensors
# that are missing or do not match config.json.

_GPTQ_BITS = (2, 3, 4, 8)


def describe_gptq(located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig) -> QuantizedTensor | None:
    if f"{wanted.module}.qweight" not in located:
        return None
    rows, columns = wanted.rows, wanted.columns
    codes, zeros = (find_tensor(located, wanted, end, ("I32",)) for end in ("qweight", "qzeros"))
    scales = find_tensor(located, wanted, "scales", SCALE_TYPES)
    bits, _ = code_bits(codes, codes.shape[0] if codes.shape else 0, columns, _GPTQ_BITS)
    check_shape(codes, (columns * bits // 32, rows))
    groups = scales.shape[0] if scales.shape else 0
    group_size = size_of_groups(scales, groups, columns, quant_config.group_size)
    check_shape(scales, (groups, rows))
    check_shape(zeros, (groups, -(-rows * bits // 32)))
    sources = {"codes": codes.name, "zeros": zeros.name, "scales": scales.name}
    ordered = True
    if f"{wanted.module}.g_idx" in located:
        order = find_tensor(located, wanted, "g_idx", ("I32",))
        check_shape(order, (columns,))
        sources["order"] = order.name
        ordered = has_consecutive_groups(order, group_size)
    symmetric = bits != 3 and is_repeated(zeros, _middle(bits, quant_config.zeros_less_one))
    return _integers(
        wanted,
        "gptq",
        sources,
        bits,
        group_size,
        symmetric=symmetric,
        scales_fit=fits_float16(scales),
        ordered=ordered,
        zeros_less_one=quant_config.zeros_less_one,
    )


def _middle(bits: int, less_one: bool) -> bytes:
    """A stored byte of zero points that are all the middle of the range."""
    zero = (1 << (bits - 1)) - less_one
    return bytes([sum(zero << shift for shift in range(0, 8, bits))])


_AWQ_BITS = 4


def describe_awq(located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig) -> QuantizedTensor | None:
    if f"{wanted.module}.qweight" not in located:
        return None
    rows, columns = wanted.rows, wanted.columns
    codes, zeros = (find_tensor(located, wanted, end, ("I32",)) for end in ("qweight", "qzeros"))
    scales = find_tensor(located, wanted, "scales", SCALE_TYPES)
    check_shape(codes, (columns, -(-rows * _AWQ_BITS // 32)))
    groups = scales.shape[0] if scales.shape else 0
    group_size = size_of_groups(scales, groups, columns, quant_config.group_size)
    check_shape(scales, (groups, rows))
    check_shape(zeros, (groups, -(-rows * _AWQ_BITS // 32)))
    symmetric = is_repeated(zeros, b"\x88")
    sources = {"codes": codes.name, "zeros": zeros.name, "scales": scales.name}
    scales_fit = fits_float16(scales)
    return _integers(wanted, "awq", sources, _AWQ_BITS, group_size, symmetric=symmetric, scales_fit=scales_fit)


_FP8_TYPES = ("F8_E4M3", "F8_E5M2")


def describe_floats(
    located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig
) -> QuantizedTensor | None:
    codes = located.get(wanted.name)
    if codes is None or codes.dtype not in _FP8_TYPES:
        return None
    rows, columns = wanted.rows, wanted.columns
    check_shape(codes, (rows, columns))
    end = "weight_scale_inv" if f"{wanted.module}.weight_scale_inv" in located else "weight_scale"
    scales = find_tensor(located, wanted, end, SCALE_TYPES)
    block = None
    if scales.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        block = _fp8_block(scales.name, scales.shape, rows, columns, quant_config.block)
    return QuantizedTensor(
        wanted.name,
        rows,
        columns,
        "floats",
        {"codes": codes.name, "scales": scales.name},
        8,
        columns,
        block=block,
        reason=FLOATS,
    )


def _fp8_block(
    name: str, shape: tuple[int, ...], rows: int, columns: int, block: tuple[int, int] | None
) -> tuple[int, int]:
    """Rows and columns of a block. block: as config.json names it."""
    if block is not None:
        if shape == (-(-rows // block[0]), -(-columns // block[1])):
            return block
    elif len(shape) == 2 and min(shape) and rows % shape[0] == 0 and columns % shape[1] == 0:
        return rows // shape[0], columns // shape[1]
    raise LoadError(
        f"tensor {name!r} has shape {list(shape)}, which are not the scales of a weight {[rows, columns]}: take the "
        "config.json that belongs to the checkpoint"
    )


def describe_compressed(
    located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig
) -> QuantizedTensor | None:
    if f"{wanted.module}.weight_packed" in located:
        return _describe_packed(located, wanted, quant_config.bits)
    stored = located.get(wanted.name)
    if stored is not None and stored.dtype == "I8":
        return _describe_plain(located, wanted)
    return describe_floats(located, wanted, quant_config)


def _describe_packed(located: Located, wanted: ExpectedTensor, widths: tuple[int, ...]) -> QuantizedTensor:
    rows, columns = wanted.rows, wanted.columns
    codes = find_tensor(located, wanted, "weight_packed", ("I32",))
    scales = find_tensor(located, wanted, "weight_scale", SCALE_TYPES)
    shape = find_tensor(located, wanted, "weight_shape", ("I64", "I32"))
    if read_integers(shape) != (rows, columns):
        raise LoadError(
            f"tensor {shape.name!r} says {list(read_integers(shape))} where config.json asks for {[rows, columns]}: take the "
            "config.json that belongs to the checkpoint"
        )
    words = codes.shape[1] if len(codes.shape) == 2 else 0
    bits, padded = code_bits(codes, words, columns, widths or range(1, 9), padded=True)
    check_shape(codes, (rows, words))
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    group_size = size_of_groups(scales, groups, columns, None)
    check_shape(scales, (rows, groups), *([(rows,), (1,), ()] if groups == 1 else []))
    sources = {"codes": codes.name, "scales": scales.name}
    symmetric = f"{wanted.module}.weight_zero_point" not in located
    if not symmetric:
        zeros = find_tensor(located, wanted, "weight_zero_point", ("I32",))
        check_shape(zeros, (num_words(rows, bits, padded=padded), groups))
        sources["zeros"] = zeros.name
    ordered = True
    if f"{wanted.module}.weight_g_idx" in located:
        order = find_tensor(located, wanted, "weight_g_idx", ("I32", "I64"))
        check_shape(order, (columns,))
        numbers = read_integers(order)
        if -1 not in numbers:
            sources["order"] = order.name
            ordered = order.dtype == "I32" and has_consecutive_groups(order, group_size)
    return _integers(
        wanted,
        "padded" if padded else "packed",
        sources,
        bits,
        group_size,
        symmetric=symmetric,
        scales_fit=fits_float16(scales),
        ordered=ordered,
    )


def _describe_plain(located: Located, wanted: ExpectedTensor) -> QuantizedTensor:
    rows, columns = wanted.rows, wanted.columns
    codes = find_tensor(located, wanted, "weight", ("I8",))
    check_shape(codes, (rows, columns))
    scales = find_tensor(located, wanted, "weight_scale", SCALE_TYPES)
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    group_size = size_of_groups(scales, groups, columns, None)
    shapes = [(rows, groups), *([(rows,), (1, 1), (1,), ()] if groups == 1 else [])]
    check_shape(scales, *shapes)
    sources = {"codes": codes.name, "scales": scales.name}
    symmetric = True
    if f"{wanted.module}.weight_zero_point" in located:
        zeros = find_tensor(located, wanted, "weight_zero_point", ("I8",))
        check_shape(zeros, *shapes)
        symmetric = is_repeated(zeros, b"\0")
        if not symmetric:
            sources["zeros"] = zeros.name
    scales_fit = fits_float16(scales)
    return _integers(wanted, "bytes", sources, 8, group_size, symmetric=symmetric, scales_fit=scales_fit)


_MXFP4_BLOCK_BYTES = 16  # of floats, without the scale


def describe_mxfp4(
    located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig
) -> QuantizedTensor | None:
    stack, bracket, index = wanted.module.partition("[")
    codes = located.get(f"{stack}_blocks")
    if not bracket or codes is None:
        return None
    scales = located.get(f"{stack}_scales")
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
    sources = {"codes": f"{codes.name}[{index}", "scales": f"{scales.name}[{index}"}
    return QuantizedTensor(wanted.module, rows, columns, "mxfp4", sources, 4, BLOCK, storage="q5_0")


_TERNARY_BITS = 2
_ROWS_PER_BYTE = 4


def describe_ternary(
    located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig
) -> QuantizedTensor | None:
    codes = located.get(wanted.name)
    if codes is None or codes.dtype != "U8":
        return None
    rows, columns = wanted.rows, wanted.columns
    check_shape(codes, (-(-rows // _ROWS_PER_BYTE), columns))
    scales = find_tensor(located, wanted, "weight_scale", SCALE_TYPES)
    check_shape(scales, (1,), ())
    if not any(scales.read()):
        raise LoadError(f"tensor {scales.name!r} is zero: the checkpoint is damaged: download or copy it again")
    sources = {"codes": codes.name, "scales": scales.name}
    packing: Packing = "divided ternary" if quant_config.divides_by_scale else "ternary"
    scales_fit = quant_config.divides_by_scale or fits_float16(scales)
    return _integers(wanted, packing, sources, _TERNARY_BITS, columns, symmetric=True, scales_fit=scales_fit)


def _integers(
    wanted: ExpectedTensor,
    packing: Packing,
    sources: Mapping[str, str],
    bits: int,
    group_size: int,
    *,
    symmetric: bool,
    scales_fit: bool,
    ordered: bool = True,
    zeros_less_one: bool = False,
) -> QuantizedTensor:
    """A tensor of integers with the block format that holds it exactly, if there is one; arguments as in `choose_storage`."""
    storage, reason = choose_storage(
        bits, group_size, wanted.columns, symmetric=symmetric, scales_fit=scales_fit, ordered=ordered
    )
    return QuantizedTensor(
        wanted.name,
        wanted.rows,
        wanted.columns,
        packing,
        sources,
        bits,
        group_size,
        zeros_less_one=zeros_less_one,
        symmetric=symmetric,
        storage=storage,
        reason=reason,
    )


_DESCRIBE = {
    "GPTQ": describe_gptq,
    "AWQ": describe_awq,
    "compressed-tensors": describe_compressed,
    "FP8": describe_floats,
    "MXFP4": describe_mxfp4,
    "BitNet": describe_ternary,
}

# Tensors that some writers add to a quantized weight.
_ADDITIONAL = (
    "g_idx",
    "weight_shape",
    "weight_g_idx",
    "weight_zero_point",
    "weight_scale",
    "weight_scale_inv",
    "qzeros",
)

# Scales by which activations, keys and values were rounded during calibration; here options determine their types.
_ACTIVATIONS = re.compile(r"\.(input|output|activation|prob|kv|[qkv])_(scale|scale_ub|global_scale|zero_point)$")


def describe_quantized_weights(config: Config, spec: ModelSpec, directory: Path) -> QuantizedCheckpoint | None:
    """The quantized weights of a checkpoint; None if config.json names no supported method.

    Reads headers, and scales, zero points and column orders that determine the storage. Raises LoadError for a checkpoint that
    is incomplete or does not match its config.json.
    """
    quant_config = read_quantization_config(config)
    if quant_config is None:
        return None
    located = locate(directory)
    tensors: dict[str, QuantizedTensor] = {}
    sources: dict[str, LocatedTensor] = {}
    biases: set[str] = set()
    expected = {tensor.name for weight in spec.weights() for tensor in weight.stored}
    stacked = Counter(name.rpartition("[")[0] for name in expected if name.endswith("]"))
    for weight in spec.weights():
        if len(weight.shape) != 2:
            continue
        for stored in weight.stored:
            count = stacked[stored.name.rpartition("[")[0]] or 1
            wanted = ExpectedTensor(stored.name.removesuffix(".weight"), stored.rows, weight.shape[1], count)
            try:
                found = _DESCRIBE[quant_config.method](located, wanted, quant_config)
            except LoadError as error:
                raise LoadError(f"{directory}: {error}") from None
            if found is None:
                continue
            tensors[stored.name] = found
            for name in found.sources.values():
                sources |= {one.name: one for one in _source(located, name)}
            sources |= {name: located[name] for end in _ADDITIONAL if (name := f"{wanted.module}.{end}") in located}
            biases |= {f"{wanted.module}.bias"} & located.keys() - expected
    sources |= {name: one for name, one in located.items() if _ACTIVATIONS.search(name)}
    return QuantizedCheckpoint(quant_config.method, tensors, sources, frozenset(biases))


def _source(located: Located, name: str) -> Iterator[LocatedTensor]:
    """A tensor by its name; for "name[3]" both the whole tensor "name" and the part."""
    if name in located:
        yield located[name]
        return
    stack, _, index = name.rpartition("[")
    yield located[stack]
    yield located[stack].part(int(index.removesuffix("]")))
