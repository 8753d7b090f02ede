"""Quantization config of a checkpoint: GPTQ, AWQ, compressed-tensors, FP8, MXFP4 and BitNet.

Group sizes and bit widths are taken from the shapes of the tensors where those determine them, since a checkpoint may mix
them; this module reads the rest. Other methods are named in `unsupported`. Opens no file and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from windlass.engine.model.config_json.config_rules import Config

Method = Literal["GPTQ", "AWQ", "compressed-tensors", "FP8", "MXFP4", "BitNet"]

_COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Information on a quantized checkpoint that its tensors do not contain.

    group_size: of GPTQ and AWQ, None: one group per row. zeros_less_one: zero points are stored minus one (GPTQ's first format).
    block: rows and columns that share a scale, if 8-bit floating-point weights have blocks. divides_by_scale: ternary weights
    are divided by their scale. bits: of codes of compressed-tensors, empty if not given. unsupported_reason: why the checkpoint
    cannot be read, in a few words; None if it can.
    """

    method: Method
    group_size: int | None = None
    zeros_less_one: bool = False
    block: tuple[int, int] | None = None
    divides_by_scale: bool = False
    bits: tuple[int, ...] = ()
    unsupported_reason: str | None = None


def read_quantization_config(config: Config) -> QuantizationConfig | None:
    """The quantization in config.json; None if there is none, or its method is not supported."""
    for key in ("quantization_config", "compression_config"):
        found = config.get(key)
        if isinstance(found, Mapping):
            read = _READERS.get(str(found.get("quant_method")).lower())
            if read is not None:
                return read(found)
    return None


def _gptq(found: Config) -> QuantizationConfig:
    form = str(found.get("checkpoint_format") or found.get("format") or "gptq").lower()
    bits, packed = found.get("bits"), str(found.get("pack_dtype") or "int32")
    unsupported_reason = None
    if form not in ("gptq", "gptq_v2") or found.get("is_marlin_format") is True:
        unsupported_reason = f"format {'marlin' if found.get('is_marlin_format') is True else form}"
    elif bits is not None and bits not in (2, 3, 4, 8):
        unsupported_reason = f"{bits} bits"
    elif packed.removeprefix("torch.") != "int32":
        unsupported_reason = f"packed into {packed}"
    return QuantizationConfig(
        "GPTQ", _group_size(found), zeros_less_one=form == "gptq", unsupported_reason=unsupported_reason
    )


def _awq(found: Config) -> QuantizationConfig:
    form = str(found.get("version") or found.get("checkpoint_format") or found.get("format") or "gemm").lower()
    bits = found.get("bits", found.get("w_bit", 4))
    unsupported_reason = f"version {form}" if form != "gemm" else f"{bits} bits" if bits != 4 else None
    return QuantizationConfig("AWQ", _group_size(found), unsupported_reason=unsupported_reason)


def _compressed(found: Config) -> QuantizationConfig:
    groups = found.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    weights = [group["weights"] for group in groups if _is_object(group) and _is_object(group.get("weights"))]
    forms = [found.get("format"), *(group.get("format") for group in groups if _is_object(group))]
    unsupported_reason = None
    if other := [form for form in forms if form is not None and form not in _COMPRESSED_FORMATS]:
        unsupported_reason = f"format {other[0]}"
    elif _is_object(found.get("transform_config")) and found["transform_config"].get("config_groups"):
        unsupported_reason = "with transforms"
    elif _is_object(found.get("sparsity_config")) and found["sparsity_config"].get("format", "dense") != "dense":
        unsupported_reason = f"sparse, {found['sparsity_config']['format']}"
    elif found.get("quantization_status", "compressed") != "compressed" and set(forms) <= {None, "dense"}:
        # Older releases left "frozen" in files with a format that stores codes.
        unsupported_reason = f"status {found['quantization_status']}"
    elif float4 := [w for w in weights if w.get("type") == "float" and w.get("num_bits", 8) != 8]:
        unsupported_reason = f"floating point of {float4[0].get('num_bits')} bits"
    block = next((block for w in weights if (block := _block(w.get("block_structure"))) is not None), None)
    widths = [w.get("num_bits", 8) for w in weights]  # the default is 8
    bits = tuple(sorted({bits for bits in widths if type(bits) is int and 1 <= bits <= 8}))
    return QuantizationConfig("compressed-tensors", block=block, bits=bits, unsupported_reason=unsupported_reason)


def _fp8(found: Config) -> QuantizationConfig:
    return QuantizationConfig("FP8", block=_block(found.get("weight_block_size")))


def _bitnet(found: Config) -> QuantizationConfig:
    unsupported_reason = None
    if found.get("quantization_mode", "offline") != "offline":
        unsupported_reason = f"rounded while it runs (quantization_mode {found['quantization_mode']})"
    elif found.get("use_rms_norm"):
        unsupported_reason = "with a norm in front of each product (use_rms_norm)"
    return QuantizationConfig(
        "BitNet",
        divides_by_scale=found.get("linear_class", "bitlinear") == "bitlinear",
        unsupported_reason=unsupported_reason,
    )


def _group_size(found: Config) -> int | None:
    size = found.get("group_size", found.get("q_group_size"))
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _block(value: Any) -> tuple[int, int] | None:
    """Rows and columns from [128, 128] or "128x128"; None for anything else."""
    sides = value.split("x") if isinstance(value, str) else value
    if not isinstance(sides, list) or len(sides) != 2 or not all(str(side).isdecimal() and int(side) for side in sides):
        return None
    return int(sides[0]), int(sides[1])


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


_READERS: dict[str, Callable[[Config], QuantizationConfig]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": lambda found: QuantizationConfig("MXFP4"),
    "bitnet": _bitnet,
}
