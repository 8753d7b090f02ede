"""Where AWQ keeps a weight (the "gemm" files of AutoAWQ).

For a layer of K inputs and N outputs there are `qweight` int32 [K, N / 8], `qzeros` int32 [groups, N / 8] and `scales`
[groups, N]. The eight outputs of a word lie in it, from the lowest four bits on, in the order 0, 2, 4, 6, 1, 3, 5, 7. Imports no
torch.
"""

from __future__ import annotations

from windlass.engine.model.config_json.quantization import StoredQuantization
from windlass.engine.model.loading.quantized.files import Located, are_halves, holds_only
from windlass.engine.model.loading.quantized.plan import QuantizedTensor, choose_storage
from windlass.engine.model.loading.quantized.shapes import SCALE_TYPES, WantedTensor, check_shape, find, size_of_groups

_BITS = 4


def describe_awq(located: Located, wanted: WantedTensor, told: StoredQuantization) -> QuantizedTensor | None:
    """What a weight is made of; None for one that is not quantized. Raises LoadError."""
    if f"{wanted.module}.qweight" not in located:
        return None
    rows, columns = wanted.rows, wanted.columns
    codes, zeros = (find(located, wanted, end, ("I32",)) for end in ("qweight", "qzeros"))
    scales = find(located, wanted, "scales", SCALE_TYPES)
    check_shape(codes, (columns, -(-rows * _BITS // 32)))
    groups = scales.shape[0] if scales.shape else 0
    group_size = size_of_groups(scales, groups, columns, told.group_size)
    check_shape(scales, (groups, rows))
    check_shape(zeros, (groups, -(-rows * _BITS // 32)))
    symmetric = holds_only(zeros, b"\x88")
    storage, reason = choose_storage(
        _BITS, group_size, columns, symmetric=symmetric, scales_fit=are_halves(scales), ordered=True
    )
    sources = {"codes": codes.name, "zeros": zeros.name, "scales": scales.name}
    return QuantizedTensor(
        wanted.name,
        rows,
        columns,
        "awq",
        sources,
        _BITS,
        group_size,
        symmetric=symmetric,
        storage=storage,
        reason=reason,
    )
