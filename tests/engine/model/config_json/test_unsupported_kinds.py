"""An unsupported architecture is refused by name, with the reason that its name or config.json gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.unsupported import describe_architecture
from windlass.engine.model.families.registry import FAMILIES
from windlass.engine.model.families.spec_reader import read_spec

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
        "the first ChatGLM, whose positions are of two dimensions",
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
        "layer_types has 'wavelet': known are full_attention, sliding_attention, linear_attention",
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
