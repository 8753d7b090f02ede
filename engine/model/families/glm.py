"""GLM: ChatGLM 2 and 3, GLM 4, GLM 4 MoE and GLM 4.7 Flash (latent attention).

Half of each head rotates, in interleaved pairs. Glm4 has norms around every part. ChatGLM's class is not in
transformers but next to the weights; its defaults are from its configuration there. GLM-4 MoE and GLM 4.7 Flash have an
MTP layer after their last layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config, ConfigRules, Sizes, read_flag, read_size, renamed
from windlass.engine.model.families.deepseek import DEEPSEEK_EXPERTS, DEEPSEEK_V3, DEEPSEEK_V3_EXPERTS
from windlass.engine.model.families.family import ATTENTION_BIAS, Biases, ConfigFlag, Family, LatentSizes
from windlass.engine.model.families.moe_rules import first_layers_dense
from windlass.engine.model.families.mtp import with_appended_mtp_layer
from windlass.engine.model.feed_forward.mlp import GatedMLPNames
from windlass.engine.model.feed_forward.moe import RouterSpec
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.model_spec import LayerNorms, OuterNames

_RULES = ConfigRules(
    sizes=Sizes(context=131_072, layers=40, kv_heads=2, head_dim=128),
    rms_norm_eps=1.5625e-7,
    eos_token_id=(151_329, 151_336, 151_338),
    partial_rotary_factor=0.5,
)

GLM = Family(
    architecture="GlmForCausalLM",
    title="GLM-4 (9B)",
    model_type="glm",
    rules=_RULES,
    biases=Biases(qkv=ConfigFlag("attention_bias", default=True)),
    interleaved=True,
    feed_forward_names=GatedMLPNames(gate_up="mlp.gate_up_proj"),
)


def _rewrite_glm4(config: Config) -> dict[str, Any]:
    """The config.json of a multimodal model's text part has no `head_dim`: it is a share of the hidden size."""
    if config.get("model_type") != "glm4v_text" or config.get("head_dim") is not None:
        return dict(config)
    return {**config, "head_dim": read_size(config, "hidden_size") // read_size(config, "num_attention_heads")}


GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    title="GLM-4 0414",
    model_type="glm4",
    other_model_types=("glm4v_text",),
    rules=replace(_RULES, rewrite=_rewrite_glm4),
    norms=LayerNorms(mixer_output="post_self_attn_layernorm", feed_forward_output="post_mlp_layernorm"),
)

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
    result = _rename_keys(config)
    if not read_flag(config, "multi_query_attention"):
        result["num_key_value_heads"] = result.get("num_attention_heads")
    return result


def _chatglm_variant(family: Family, config: Config) -> Family:
    if config.get("position_encoding_2d") is not None:
        raise LoadError(
            "config.json describes the first ChatGLM, whose positions have two dimensions: it is not supported, use "
            "ChatGLM 2 or 3"
        )
    biased = read_flag(config, "add_qkv_bias") or read_flag(config, "add_bias_linear")
    return replace(family, biases=replace(family.biases, qkv=biased))


CHATGLM = Family(
    architecture="ChatGLMModel",
    other_names=("ChatGLMForConditionalGeneration",),
    title="ChatGLM 2 and 3, GLM-4 (older files)",
    model_type="chatglm",
    rules=ConfigRules(
        sizes=Sizes(context=2048, layers=28, head_dim=128),
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        rewrite=_rewrite_chatglm,
    ),
    biases=Biases.everywhere(ConfigFlag("add_bias_linear")),
    interleaved=True,
    attention_names=AttentionNames(qkv="self_attention.query_key_value", out="self_attention.dense"),
    feed_forward_names=GatedMLPNames(gate_up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    outer_names=OuterNames(
        "transformer.embedding.word_embeddings",
        "transformer.encoder.layers",
        "transformer.encoder.final_layernorm",
        "transformer.output_layer",
    ),
    fixed_values={
        "rmsnorm": (True,),
        "post_layer_norm": (True,),
        "apply_residual_connection_post_layernorm": (False,),
    },
    variant=_chatglm_variant,
    extra_keys=frozenset(
        "multi_query_attention add_bias_linear add_qkv_bias bias_dropout_fusion original_rope "
        "apply_query_key_layer_scaling attention_softmax_in_fp32 fp32_residual_connection quantization_bit pre_seq_len "
        "prefix_projection interleaved_qkv".split()
    ),
)

GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    title="GLM-4.5 and 4.6",
    model_type="glm4_moe",
    other_model_types=("glm4v_moe_text",),
    rules=ConfigRules(
        sizes=Sizes(context=131_072, layers=46, heads=96, kv_heads=8),
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
    ),
    biases=Biases(qkv=ATTENTION_BIAS),
    qk_norm="before",
    qk_norm_flag=ConfigFlag("use_qk_norm"),
    refine=with_appended_mtp_layer,
    experts=replace(DEEPSEEK_EXPERTS, width=1408),
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    architecture="Glm4MoeLiteForCausalLM",
    title="GLM 4.7 Flash",
    model_type="glm4_moe_lite",
    other_model_types=(),
    rules=replace(
        DEEPSEEK_V3.rules,
        sizes=Sizes(context=202_752, hidden=2048, layers=47, heads=20, kv_heads=20, head_dim=64),
        rms_norm_eps=1e-5,
    ),
    experts=replace(
        DEEPSEEK_V3_EXPERTS,
        experts=64,
        top_k=4,
        width=1536,
        router=RouterSpec(scores="sigmoid", scale=1.8, least_sum=1e-20),
        dense=first_layers_dense("first_k_dense_replace", 1),
    ),
    latent=LatentSizes(kv_lora_rank=512, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256),
)
