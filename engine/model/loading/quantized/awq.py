"""Where AWQ keeps a weight (the "gemm" files of AutoAWQ).

For a layer of K inputs and N outputs there are `qweight` int32 [K, N / 8], `qzeros` int32 [groups, N / 8] and `scales`
[groups, N]. The eight outputs of a word lie in it, from the lowest four bits on, in the order 0, 2, 4, 6, 1, 3, 5, 7. Imports no
torch.
"""

from __future__ import annotations

from windlass.engine.model.config_json.quantization import QuantizationConfig
from windlass.engine.model.loading.quantized.files import Located, fits_float16, is_repeated
from windlass.engine.model.loading.quantized.plan import QuantizedTensor, choose_storage
from windlass.engine.model.loading.quantized.shapes import (
    SCALE_TYPES,
    ExpectedTensor,
    check_shape,
    find_tensor,
    size_of_groups,
)

_AWQ_BITS = 4


def describe_awq(located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig) -> QuantizedTensor | None:
    """What a weight is made of; None for one that is not quantized. Raises LoadError."""
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
    storage, reason = choose_storage(
        _AWQ_BITS, group_size, columns, symmetric=symmetric, scales_fit=fits_float16(scales), ordered=True
    )
    sources = {"codes": codes.name, "zeros": zeros.name, "scales": scales.name}
    return QuantizedTensor(
        wanted.name,
        rows,
        columns,
        "awq",
        sources,
        _AWQ_BITS,
        group_size,
        symmetric=symmetric,
        storage=storage,
        reason=reason,
    )
