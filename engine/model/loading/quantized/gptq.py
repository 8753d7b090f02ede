"""Where GPTQ keeps a weight (the files of AutoGPTQ and GPTQModel).

For a layer of K inputs and N outputs there are `qweight` int32 [K * bits / 32, N], codes packed down the inputs from the lowest
bit on; `qzeros` int32 [groups, N * bits / 32], zero points packed along the outputs, minus one in the first format; `scales`
[groups, N]; and perhaps `g_idx` int32 [K], the group of every input. Imports no torch.
"""

from __future__ import annotations

from windlass.engine.model.config_json.quantization import StoredQuantization
from windlass.engine.model.loading.quantized.files import Located, are_halves, counts_up, holds_only
from windlass.engine.model.loading.quantized.plan import QuantizedTensor, choose_storage
from windlass.engine.model.loading.quantized.shapes import (
    SCALE_TYPES,
    WantedTensor,
    check_shape,
    code_bits,
    find,
    size_of_groups,
)

_BITS = (2, 3, 4, 8)


def describe_gptq(located: Located, wanted: WantedTensor, told: StoredQuantization) -> QuantizedTensor | None:
    """What a weight is made of; None for one that is not quantized. Raises LoadError."""
    if f"{wanted.module}.qweight" not in located:
        return None
    rows, columns = wanted.rows, wanted.columns
    codes, zeros = (find(located, wanted, end, ("I32",)) for end in ("qweight", "qzeros"))
    scales = find(located, wanted, "scales", SCALE_TYPES)
    bits, _ = code_bits(codes, codes.shape[0] if codes.shape else 0, columns, _BITS)
    check_shape(codes, (columns * bits // 32, rows))
    groups = scales.shape[0] if scales.shape else 0
    group_size = size_of_groups(scales, groups, columns, told.group_size)
    check_shape(scales, (groups, rows))
    check_shape(zeros, (groups, -(-rows * bits // 32)))
    sources = {"codes": codes.name, "zeros": zeros.name, "scales": scales.name}
    ordered = True
    if f"{wanted.module}.g_idx" in located:
        order = find(located, wanted, "g_idx", ("I32",))
        check_shape(order, (columns,))
        sources["order"] = order.name
        ordered = counts_up(order, group_size)
    symmetric = bits != 3 and holds_only(zeros, _middle(bits, told.zeros_less_one))
    storage, reason = choose_storage(
        bits, group_size, columns, symmetric=symmetric, scales_fit=are_halves(scales), ordered=ordered
    )
    return QuantizedTensor(
        wanted.name,
        rows,
        columns,
        "gptq",
        sources,
        bits,
        group_size,
        zeros_less_one=told.zeros_less_one,
        symmetric=symmetric,
        storage=storage,
        reason=reason,
    )


def _middle(bits: int, less_one: bool) -> bytes:
    """A byte of zero points that are all the middle of the range, as they are stored."""
    zero = (1 << (bits - 1)) - less_one
    return bytes([sum(zero << shift for shift in range(0, 8, bits))])
