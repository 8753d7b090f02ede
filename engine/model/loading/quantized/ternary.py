"""Where a BitNet checkpoint keeps a weight of ternary numbers (2402.17764, as transformers packs them).

`weight` uint8 [rows / 4, columns]: the lowest two bits are those of the first quarter of the rows plus one, the next two those of
the second quarter, and so on. `weight_scale`, one number, multiplies them or, in the older kind of layer, divides them. A
reciprocal is no float16 number as a rule: it is rounded to one, by at most 2^-11 of itself. Imports no torch.
"""

from __future__ import annotations

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.quantization import QuantizationConfig
from windlass.engine.model.loading.quantized.files import Located, fits_float16
from windlass.engine.model.loading.quantized.plan import Packing, QuantizedTensor, choose_storage
from windlass.engine.model.loading.quantized.shapes import SCALE_TYPES, ExpectedTensor, check_shape, find_tensor

_TERNARY_BITS = 2
_ROWS_PER_BYTE = 4  # rows in a byte


def describe_ternary(
    located: Located, wanted: ExpectedTensor, quant_config: QuantizationConfig
) -> QuantizedTensor | None:
    """What a weight is made of; None for one that is not quantized. Raises LoadError."""
    codes = located.get(wanted.name)
    if codes is None or codes.dtype != "U8":
        return None
    rows, columns = wanted.rows, wanted.columns
    check_shape(codes, (-(-rows // _ROWS_PER_BYTE), columns))
    scales = find_tensor(located, wanted, "weight_scale", SCALE_TYPES)
    check_shape(scales, (1,), ())
    if not any(scales.read()):
        raise LoadError(f"tensor {scales.name!r} is zero: the checkpoint is damaged: download or copy it again")
    storage, reason = choose_storage(
        _TERNARY_BITS,
        columns,
        columns,
        symmetric=True,
        scales_fit=quant_config.divides_by_scale or fits_float16(scales),
        ordered=True,
    )
    sources = {"codes": codes.name, "scales": scales.name}
    packing: Packing = "divided ternary" if quant_config.divides_by_scale else "ternary"
    return QuantizedTensor(
        wanted.name, rows, columns, packing, sources, _TERNARY_BITS, columns, storage=storage, reason=reason
    )
