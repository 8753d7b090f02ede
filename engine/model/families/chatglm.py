"""ChatGLM 2 and 3, and GLM-4 under its older name: half of each head rotates, in interleaved pairs, and projections are fused.

Its class is not in transformers but beside the weights; defaults are those of its configuration there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.rules import ConfigRules, renamed
from windlass.engine.model.config_json.values import Config, read_flag
from windlass.engine.model.families.family import ConfigFlag, Family
from windlass.engine.model.feed_forward.gated_spec import GatedMLPNames
from windlass.engine.model.mixers.attention_spec import AttentionNames
from windlass.engine.model.spec import OuterNames

_CHATGLM_BIAS = ConfigFlag("add_bias_linear")
_rename_keys = renamed(
    {
        "num_layers": "num_hidden_layers",
        "padded_vocab_size": "vocab_size",
        "kv_channels": "head_dim",
        "ffn_hidden_size": "intermediate_size",
        "seq_length": "max_position_embeddings",
        "layernorm_epsilon": "rms_norm_eps",
        "multi_query_group_num": "num_key_value_heads",
    }
)


def _rewrite_chatglm(config: Config) -> dict[str, Any]:
    found = _rename_keys(config)
    if not read_flag(config, "multi_query_attention"):
        found["num_key_value_heads"] = found.get("num_attention_heads")
    return found


def _chatglm_variant(family: Family, config: Config) -> Family:
    if config.get("position_encoding_2d") is not None:
        raise LoadError(
            "config.json describes the first ChatGLM, whose positions are of two dimensions: it is not supported, use "
            "ChatGLM 2 or 3"
        )
    usual = {"rmsnorm": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False}
    for key, value in usual.items():
        if read_flag(config, key, value) != value:
            raise LoadError(
                f"config.json sets {key}={str(not value).lower()}, which changes the model and is not supported"
            )
    biased = read_flag(config, "add_qkv_bias") or read_flag(config, "add_bias_linear")
    return replace(family, qkv_bias=biased)


CHATGLM = Family(
    architecture="ChatGLMModel",
    other_names=("ChatGLMForConditionalGeneration",),
    title="ChatGLM 2 and 3, GLM-4 (older files)",
    model_type="chatglm",
    rules=ConfigRules(
        max_position_embeddings=2048,
        num_hidden_layers=28,
        head_dim=128,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        rewrite=_rewrite_chatglm,
    ),
    out_bias=_CHATGLM_BIAS,
    feed_forward_bias=_CHATGLM_BIAS,
    interleaved=True,
    attention_names=AttentionNames(qkv="self_attention.query_key_value", out="self_attention.dense"),
    feed_forward_names=GatedMLPNames(gate_up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    outer_names=OuterNames(
        "transformer.embedding.word_embeddings",
        "transformer.encoder.layers",
        "transformer.encoder.final_layernorm",
        "transformer.output_layer",
    ),
    variant=_chatglm_variant,
    extra_keys=frozenset(
        "multi_query_attention add_bias_linear add_qkv_bias rmsnorm post_layer_norm bias_dropout_fusion original_rope "
        "apply_residual_connection_post_layernorm apply_query_key_layer_scaling attention_softmax_in_fp32 "
        "fp32_residual_connection quantization_bit pre_seq_len prefix_projection interleaved_qkv".split()
    ),
)
