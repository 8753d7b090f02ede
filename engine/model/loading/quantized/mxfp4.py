"""Where a checkpoint of gpt-oss keeps the weights of its experts in MXFP4.

Beside a tensor that would hold all experts there are `<name>_blocks` uint8 [experts, rows, columns / 32, 16], two floats a byte,
the lower half first, and `<name>_scales` uint8 [experts, rows, columns / 32], the exponents of blocks. Rows are outputs, unlike
those of the tensor that they stand for. Imports no torch.
"""

from __future__ import annotations

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.quantization import QuantizationConfig
from windlass.engine.model.loading.quantized.files import Located
from windlass.engine.model.loading.quantized.plan import BLOCK, QuantizedTensor
from windlass.engine.model.loading.quantized.shapes import ExpectedTensor, check_shape

_MXFP4_BLOCK_BYTES = 16  # of a block's floats


def describe_mxfp4(
    located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig
) -> QuantizedTensor | None:
    """What the weight of an expert is made of; None for one that is not quantized. Raises LoadError."""
    stack, bracket, place = wanted.module.partition("[")
    codes = located.get(f"{stack}_blocks")
    if not bracket or codes is None:
        return None
    scales = located.get(f"{stack}_scales")
    if scales is None:
        raise LoadError(f"tensor {stack + '_scales'!r} is missing: the checkpoint is incomplete: download it again")
    rows, columns = wanted.rows, wanted.columns
    if columns % BLOCK:
        raise LoadError(f"{stack!r} has rows of {columns} numbers, which are no whole blocks of {BLOCK}")
    check_shape(codes, (wanted.stacked, rows, columns // BLOCK, _MXFP4_BLOCK_BYTES))
    check_shape(scales, (wanted.stacked, rows, columns // BLOCK))
    for tensor in (codes, scales):
        if tensor.dtype != "U8":
            raise LoadError(f"tensor {tensor.name!r} is {tensor.dtype} where U8 is expected: download it again")
    sources = {"codes": f"{codes.name}[{place}", "scales": f"{scales.name}[{place}"}
    return QuantizedTensor(wanted.module, rows, columns, "mxfp4", sources, 4, BLOCK, storage="q5_0")
