"""Where checkpoints keep a weight of 8-bit floating point (FP8, and the same of compressed-tensors).

`weight` float8 [rows, columns] and `weight_scale` or `weight_scale_inv`, which is multiplied by all the same: one number, one
for each row, or one for each block of rows and columns. No form of blocks holds such numbers, so they are dequantized. Imports
no torch.
"""

from __future__ import annotations

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.quantization import QuantizationConfig
from windlass.engine.model.loading.quantized.files import Located
from windlass.engine.model.loading.quantized.plan import FLOATS, QuantizedTensor
from windlass.engine.model.loading.quantized.shapes import SCALE_TYPES, ExpectedTensor, check_shape, find_tensor

_FP8_TYPES = ("F8_E4M3", "F8_E5M2")


def describe_floats(
    located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig
) -> QuantizedTensor | None:
    """What a weight is made of; None for one that is not quantized. Raises LoadError."""
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
    name: str, shape: tuple[int, ...], rows: int, columns: int, quant_config: tuple[int, int] | None
) -> tuple[int, int]:
    """Rows and columns of a block. told: what config.json says."""
    if quant_config is not None:
        if shape == (-(-rows // quant_config[0]), -(-columns // quant_config[1])):
            return quant_config
    elif len(shape) == 2 and min(shape) and rows % shape[0] == 0 and columns % shape[1] == 0:
        return rows // shape[0], columns // shape[1]
    raise LoadError(
        f"tensor {name!r} has shape {list(shape)}, which are not the scales of a weight {[rows, columns]}: take the "
        "config.json that belongs to the checkpoint"
    )
