"""Where compressed-tensors keeps a weight of integers.

Packed: `weight_packed` int32 [rows, columns * bits / 32], codes plus half the range, packed along a row from the lowest bit on,
one behind the other or, as releases up to 0.13 have it, 32 // bits in each word; `weight_shape`, two integers; `weight_scale`
[rows, groups]; perhaps `weight_zero_point` int32, packed down the rows like the codes; and perhaps `weight_g_idx` int32
[columns], the group of every column, or -1: nothing is said.
Plain: `weight` int8 [rows, columns], `weight_scale` with a number for the tensor, for each row or for each group of one, and
perhaps `weight_zero_point` int8 of the same shape. Imports no torch.
"""

from __future__ import annotations

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.quantization import QuantizationConfig
from windlass.engine.model.loading.quantized.files import (
    Located,
    fits_float16,
    has_consecutive_groups,
    is_repeated,
    read_integers,
)
from windlass.engine.model.loading.quantized.floats import describe_floats
from windlass.engine.model.loading.quantized.plan import QuantizedTensor, choose_storage
from windlass.engine.model.loading.quantized.shapes import (
    SCALE_TYPES,
    ExpectedTensor,
    check_shape,
    code_bits,
    find_tensor,
    num_words,
    size_of_groups,
)


def describe_compressed(
    located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig
) -> QuantizedTensor | None:
    """What a weight is made of; None for one that is not quantized. Raises LoadError."""
    if f"{wanted.module}.weight_packed" in located:
        return _describe_packed(located, wanted, quant_config.bits)
    stored = located.get(wanted.name)
    if stored is not None and stored.dtype == "I8":
        return _describe_plain(located, wanted)
    return describe_floats(located, wanted, quant_config)


def _describe_packed(located: Located, wanted: ExpectedTensor, quant_config: tuple[int, ...]) -> QuantizedTensor:
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
    bits, padded = code_bits(codes, words, columns, quant_config or range(1, 9), padded=True)
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
    storage, reason = choose_storage(
        bits, group_size, columns, symmetric=symmetric, scales_fit=fits_float16(scales), ordered=ordered
    )
    return QuantizedTensor(
        wanted.name,
        rows,
        columns,
        "padded" if padded else "packed",
        sources,
        bits,
        group_size,
        symmetric=symmetric,
        storage=storage,
        reason=reason,
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
    storage, reason = choose_storage(
        8, group_size, columns, symmetric=symmetric, scales_fit=fits_float16(scales), ordered=True
    )
    return QuantizedTensor(
        wanted.name, rows, columns, "bytes", sources, 8, group_size, symmetric=symmetric, storage=storage, reason=reason
    )
