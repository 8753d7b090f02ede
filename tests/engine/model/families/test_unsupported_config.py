"""Unsupported architectures and quantization methods in config.json are refused with the reason; supported methods are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from engine_helpers.quantized_checkpoints import AWQ, FP8, GPTQ, compressed
from transformers import CONFIG_MAPPING, AutoConfig

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.quantization_config import QuantizationConfig, read_quantization_config
from windlass.engine.model.config_json.unsupported import describe_architecture, describe_quantized, describe_tensors
from windlass.engine.model.families.multimodal import text_config_of
from windlass.engine.model.families.registry import FAMILIES
from windlass.engine.model.families.spec_reader import read_spec

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


# -- unsupported architectures -----------------------------------------------------------------------------------------

RECURRENT = "a hybrid of attention and other recurrent layers"
REASONS = {
    "OlmoHybridForCausalLM": RECURRENT,
    "BambaForCausalLM": RECURRENT,
    "JambaForCausalLM": RECURRENT,
    "RecurrentGemmaForCausalLM": RECURRENT,
    "Zamba2ForCausalLM": RECURRENT,
    "Gemma3nForCausalLM": "a model whose layers share keys and have per-layer embeddings (Gemma 3n)",
    "MptForCausalLM": "a model without rotary attention (ALiBi)",
    "OPTForCausalLM": "a model without rotary attention (learned or sinusoidal positions)",
    "DeepseekV32ForCausalLM": "a model whose attention reads selected keys only (sparse attention)",
    "GlmMoeDsaForCausalLM": "a model whose attention reads selected keys only (sparse attention)",
    "JetMoeForCausalLM": "a mixture of experts of another kind than the supported ones",
    "MambaForCausalLM": "a model without attention",
}


def config_of(architecture: str) -> dict[str, Any]:
    """Return the config.json that transformers writes for this class with its defaults."""
    config = getattr(transformers, architecture).config_class()
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture]}


@pytest.mark.parametrize("architecture", REASONS)
def test_refusal_names_the_reason(architecture: str) -> None:
    with pytest.raises(LoadError) as refused:
        read_spec(config_of(architecture))
    told = str(refused.value)
    reason = REASONS[architecture]
    behind = "and" if "," in reason else "which"
    assert told.startswith(f"architecture {architecture!r} in config.json is {reason.rstrip(',')}")
    assert f" {behind} is not supported: use one of " in told


GRANITE4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 2,
    "layer_types": ["attention"] * 2,
    "position_embedding_type": "rope",
}
VARIANTS = {
    "alibi": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "alibi": True},
        "alibi=true, which changes",
    ),
    "chatglm": (
        {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "position_encoding_2d": True},
        "the first ChatGLM, whose positions have two dimensions",
    ),
    "layer norms": (
        {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "rmsnorm": False},
        "rmsnorm=false, which changes the model",
    ),
    "heads": (
        {"architectures": ["CodeGenForCausalLM"], "model_type": "codegen", "n_head": 6},
        "n_head 6 is not a multiple of 4",
    ),
    "other norms": (
        {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "qk_norm": False},
        "qk_norm=false",
    ),
    "another stream": (
        {
            "architectures": ["FalconForCausalLM"],
            "apply_residual_connection_post_layernorm": True,
            "model_type": "falcon",
        },
        "apply_residual_connection_post_layernorm=true, which changes the model",
    ),
    "other kinds of layers": (
        {**GRANITE4, "layer_types": ["attention", "wavelet"]},
        "layer_types has 'wavelet': supported are full_attention, sliding_attention, linear_attention",
    ),
    "no kinds of layers": ({**GRANITE4, "layer_types": None}, "layer_types must be a list with one name per layer"),
    "too few kinds of layers": ({**GRANITE4, "layer_types": ["attention"]}, "must be a list with one name per layer"),
    "no positions": (
        {**GRANITE4, "position_embedding_type": "nope"},
        "position_embedding_type 'nope' is not supported: a model with attention in every layer",
    ),
    "tokens that see those behind them": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "is_causal": False},
        "is_causal=false, which changes the model",
    ),
    "two names": (
        {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 64, "hidden_size": 32},
        "hidden_size is 32 and n_embd is 64: keep one",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_unsupported_variant_is_refused_with_the_reason(name: str) -> None:
    config, reason = VARIANTS[name]
    with pytest.raises(LoadError, match=reason):
        read_spec(config)


def test_unsupported_layer_types_are_named() -> None:
    config = {"layer_types": ["full_attention", "wavelet", "sliding_attention"]}
    assert describe_architecture("NewForCausalLM", config) == "a model with layers that are not attention (wavelet)"
    assert describe_architecture("NewForCausalLM", {"layer_types": ["full_attention", "chunked_attention"]}) is None


@pytest.mark.parametrize("layer_types", [7, "mamba", {"a": 1}, [None], [["mamba"]], [{}]])
def test_invalid_layer_types_are_refused(layer_types: object) -> None:
    with pytest.raises(LoadError, match=r"'NewForCausalLM'.*not supported"):
        read_spec({"architectures": ["NewForCausalLM"], "layer_types": layer_types})


# A class named a model, like others without their head, is found earlier.
NAMED = [family for family in FAMILIES if not family.architecture.endswith("Model")]


@pytest.mark.quick_cases(14)
@pytest.mark.parametrize("family", NAMED, ids=lambda family: family.model_type)
def test_supported_families_are_not_refused(family: Any) -> None:
    known = family.model_type in CONFIG_MAPPING
    config = json.loads(AutoConfig.for_model(family.model_type).to_json_string(use_diff=False)) if known else {}
    described = describe_architecture(family.architecture, config)
    others = family.rules.other_layers  # in an unknown class they indicate another kind of model
    assert (
        described is None
        or (family.experts is not None and "experts" in described)
        or ("n_routed_experts" in family.extra_keys and "experts" in described)  # of optional layers
        or any(kind in described for kind in others)
    )


DRAFT_HEADS: dict[str, dict[str, Any]] = {
    "EAGLE 3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 32_000},
    "EAGLE in vLLM": {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"},
    "speculators": {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"},
    "Medusa": {"medusa_num_heads": 4, "medusa_num_layers": 1, "base_model_name_or_path": "a/b"},
    "Hydra": {"hydra_num_heads": 4},
    "an MLP speculator": {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"},
    "an MTP head": {"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"},
}


@pytest.mark.parametrize("name", DRAFT_HEADS)
def test_draft_heads_are_named(name: str) -> None:
    with pytest.raises(LoadError, match=r"describes a draft head .*: serve that model"):
        read_spec(DRAFT_HEADS[name])


def test_weights_of_a_draft_head_are_named() -> None:
    """EAGLE's first heads have the config.json of a Llama model of one layer."""
    for tensors in (["fc.weight", "layers.0.mlp.up_proj.weight"], ["medusa_head.0.0.linear.weight"]):
        assert "the weights of a draft head" in str(describe_tensors(tensors))
    assert describe_tensors(["model.embed_tokens.weight", "fc.weight"]) is None


def test_the_first_qwen_is_named() -> None:
    code = {"AutoConfig": "configuration_qwen.QWenConfig", "AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"}
    config = {"architectures": ["QWenLMHeadModel"], "model_type": "qwen", "auto_map": code, "use_logn_attn": True}
    with pytest.raises(
        LoadError, match=r"is the first generation of Qwen .*Qwen 1\.5 and later are supported.* not supported"
    ):
        read_spec(config)
    other = {"architectures": ["FooLMHeadModel"], "auto_map": {"AutoModelForCausalLM": "modeling_foo.FooLMHeadModel"}}
    with pytest.raises(LoadError, match=r"custom code in the checkpoint \(modeling_foo\.FooLMHeadModel\)"):
        read_spec(other)


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}


def test_a_temperature_of_zero_has_no_effect() -> None:
    """Devstral 2."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 4096}
    config = {**SMALL, "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    without = read_spec({**config, "rope_parameters": {**rope, "llama_4_scaling_beta": None}})
    for beta in (0, 0.0):
        assert read_spec({**config, "rope_parameters": {**rope, "llama_4_scaling_beta": beta}}) == without
    assert read_spec({**config, "rope_parameters": {**rope, "llama_4_scaling_beta": 0.1}}).temperature == (0.1, 4096)
    with pytest.raises(LoadError, match="must be a positive number"):
        read_spec({**config, "rope_parameters": {**rope, "llama_4_scaling_beta": -1}})


def test_the_first_name_of_the_text_part_of_exaone() -> None:
    text = {**SMALL, "model_type": "exaone4_5_text"}
    whole = {"architectures": ["Exaone4_5_ForConditionalGeneration"], "model_type": "exaone4_5", "text_config": text}
    newer = {**whole, "text_config": {**text, "model_type": "exaone4"}}
    assert read_spec(text_config_of(whole).config) == read_spec(text_config_of(newer).config)


@pytest.mark.parametrize(
    ("length", "scaling", "allowed"),
    [
        (4096, {"type": "linear", "factor": 4.0}, 16_384),  # Vicuna 1.5 16k
        (16_384, {"type": "linear", "factor": 4.0}, None),  # raised: DeepSeek Coder
        (4096, {"type": "dynamic", "factor": 2.0}, 8192),
        (4096, {"type": "dynamic", "factor": 1.0}, None),
        (4096, {"rope_type": "yarn", "factor": 4.0}, None),
        (4096, None, None),
    ],
)
def test_the_length_that_a_factor_allows_is_noted(length: int, scaling: Any, allowed: int | None) -> None:
    llama = {**SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    notices = read_spec({**llama, "max_position_embeddings": length, "rope_scaling": scaling}).notices
    assert [f"set `max_model_len` to {allowed}" in notice for notice in notices] == ([] if allowed is None else [True])
