"""Quantization methods in config.json: supported ones, refused ones, and invalid values."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers.quantized_checkpoints import AWQ, FP8, GPTQ, compressed

from windlass.engine.model.config_json.quantization_config import QuantizationConfig, read_quantization_config
from windlass.engine.model.config_json.unsupported import describe_quantized

READ: list[tuple[dict[str, Any], QuantizationConfig]] = [
    (GPTQ, QuantizationConfig("GPTQ", 32, zeros_less_one=True)),
    ({**GPTQ, "checkpoint_format": "gptq_v2", "group_size": -1}, QuantizationConfig("GPTQ")),
    ({**GPTQ, "checkpoint_format": "gptq", "pack_dtype": "int32"}, QuantizationConfig("GPTQ", 32, zeros_less_one=True)),
    (AWQ, QuantizationConfig("AWQ", 32)),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"}, QuantizationConfig("AWQ", 128)),
    (FP8, QuantizationConfig("FP8")),
    ({**FP8, "weight_block_size": [128, 64]}, QuantizationConfig("FP8", block=(128, 64))),
    ({"quant_method": "fbgemm_fp8"}, QuantizationConfig("FP8")),
    (compressed("pack-quantized"), QuantizationConfig("compressed-tensors", bits=(4,))),
    (
        compressed("float-quantized", num_bits=8, type="float", block_structure="128x64"),
        QuantizationConfig("compressed-tensors", block=(128, 64), bits=(8,)),
    ),
    (  # the default width is 8
        {
            **compressed("pack-quantized"),
            "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}, "b": {"weights": {"type": "int"}}},
        },
        QuantizationConfig("compressed-tensors", bits=(4, 8)),
    ),
    (  # from releases that stored the codes
        {**compressed("naive-quantized", num_bits=8, type="float"), "quantization_status": "frozen"},
        QuantizationConfig("compressed-tensors", bits=(8,)),
    ),
    # Other values than a number of bits are ignored.
    *(
        (compressed("pack-quantized", num_bits=told), QuantizationConfig("compressed-tensors"))
        for told in ([4], {}, True, "4", 4.0, 0, None)
    ),
    (
        {**compressed("dense"), "sparsity_config": {"format": "dense"}, "transform_config": {}},
        QuantizationConfig("compressed-tensors", bits=(4,)),
    ),
]  # fmt: skip

UNREAD: list[tuple[dict[str, Any], str]] = [
    ({**GPTQ, "bits": 5}, "GPTQ, 5 bits"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "GPTQ, format marlin"),
    ({**GPTQ, "is_marlin_format": True}, "GPTQ, format marlin"),
    ({**GPTQ, "pack_dtype": "int8"}, "GPTQ, packed into int8"),
    ({**AWQ, "version": "gemv_fast"}, "AWQ, version gemv_fast"),
    ({**AWQ, "bits": 8}, "AWQ, 8 bits"),
    (compressed("marlin-24"), "compressed-tensors, format marlin-24"),
    (compressed("pack-quantized", type="float"), "compressed-tensors, floating point of 4 bits"),
    ({**compressed("dense"), "sparsity_config": {"format": "sparse-24"}}, "compressed-tensors, sparse, sparse-24"),
    ({**compressed("dense"), "transform_config": {"config_groups": {"a": {}}}}, "compressed-tensors, with transforms"),
    ({**compressed("dense"), "quantization_status": "frozen"}, "compressed-tensors, status frozen"),
    ({**compressed("dense"), "format": None, "quantization_status": "frozen"}, "compressed-tensors, status frozen"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
    ({"quant_method": "hqq"}, "HQQ"),
    ({"quant_method": "aqlm"}, "AQLM"),
    ({"quant_method": "torchao"}, "torchao"),
    ({"quant_method": "exl3", "bits": 3.5}, "EXL3"),
    ({"quant_method": "quark"}, "quark"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "told"), READ)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_supported_methods_are_read(config: dict[str, Any], told: QuantizationConfig, key: str) -> None:
    assert read_quantization_config({key: config}) == told
    assert describe_quantized({key: config}, ["model.norm.weight", "a.qweight", "a.scales"]) is None


@pytest.mark.parametrize(("config", "called"), UNREAD)
def test_unsupported_methods_are_refused(config: dict[str, Any], called: str) -> None:
    said = describe_quantized({"quantization_config": config})
    assert said is not None and said.startswith(
        f"this checkpoint is quantized ({called}), which is not read: take the un"
    )


@pytest.mark.parametrize("value", [None, [], "gptq", {}, {"quant_method": None}, {"quant_method": ["gptq"]}])
def test_configs_without_quantization(value: object) -> None:
    assert read_quantization_config({"quantization_config": value}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"config_groups": []},
        {"config_groups": {"a": None, "b": {"weights": 4}}},
        {"transform_config": 3},
        {"sparsity_config": "dense"},
        {"config_groups": {"a": {"weights": {"block_structure": [128]}}}},
        {"config_groups": {"a": {"weights": {"block_structure": ["a", "b"]}}}},
        {"config_groups": {"a": {"weights": {"block_structure": "0x0"}}}},
    ],
)
def test_values_of_a_wrong_type_are_refused(change: dict[str, Any]) -> None:
    assert read_quantization_config({"quantization_config": {**compressed("dense"), **change}}) is not None


@pytest.mark.parametrize("group_size", ["128", 0, -1, None, [32], True])
def test_invalid_group_sizes_are_refused(group_size: object) -> None:
    told = read_quantization_config({"quantization_config": {**GPTQ, "group_size": group_size}})
    assert told is not None and told.group_size is None
