"""Where GPTQ keeps a weight (the files of AutoGPTQ and GPTQModel).

For a layer of K inputs and N outputs there are `qweight` int32 [K * bits / 32, N], codes packed down the inputs from the lowest
bit on; `qzeros` int32 [groups, N * bits / 32], zero points packed along the outputs, minus one in the first format; `scales`
[groups, N]; and perhaps `g_idx` int32 [K], the group of every input. Imports no torch.
"""

from __future__ import annotations

from windlass.engine.model.config_json.quantization import QuantizationConfig
from windlass.engine.model.loading.quantized.files import Located, fits_float16, has_consecutive_groups, is_repeated
from windlass.engine.model.loading.quantized.plan import QuantizedTensor, choose_storage
from windlass.engine.model.loading.quantized.shapes import (
    SCALE_TYPES,
    ExpectedTensor,
    check_shape,
    code_bits,
    find_tensor,
    size_of_groups,
)

_GPTQ_BITS = (2, 3, 4, 8)


def describe_gptq(located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig) -> QuantizedTensor | None:
    """What a weight is made of; None for one that is not quantized. Raises LoadError."""
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
    storage, reason = choose_storage(
        bits, group_size, columns, symmetric=symmetric, scales_fit=fits_float16(scales), ordered=ordered
    )
    return QuantizedTensor(
        wanted.name,
        rows,
        columns,
        "gptq",
        sources,
        bits,
        group_size,
        zeros_less_one=quant_config.zeros_less_one,
        symmetric=symmetric,
        storage=storage,
        reason=reason,
    )


def _middle(bits: int, less_one: bool) -> bytes:
    """A byte of zero points that are all the middle of the range, as they are stored."""
    zero = (1 << (bits - 1)) - less_one
    return bytes([sum(zero << shift for shift in range(0, 8, bits))])
