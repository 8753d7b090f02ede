"""Families for `tiny_models` that only the logit tests of all families use."""

from __future__ import annotations

from typing import Any

OFFSET_NORMS = ("Gemma", "Gemma2", "Gemma3", "VaultGemma", "Nemotron", "Qwen3_5", "Qwen3_5Moe", "Qwen3Next")
TEXT_PARTS = ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")  # with configuration classes of the same name
# Other names of sizes in some families.
COMMON: dict[str, dict[str, Any]] = {}
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_LOCAL = {"sliding_window": 8}
_GPTJ = {"rotary_dim": 8, "n_inner": 96, "tie_word_embeddings": False}
_FALCON = {"ffn_hidden_size": 96, "bias": True}

_LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "initializer_range": 0.06,  # otherwise scores are nearly equal, or far apart
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_EXPERTS = {
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.7,
}
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}

# Local heads of size 16, global ones of size 32.
_GEMMA4 = {
    **_LOCAL,
    "tie_word_embeddings": True,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
}
_IN_TURN = ["sliding_attention", "full_attention"]
# Two value heads per key head, and different sizes. Normed states are sometimes nearly zero: with a smaller eps, float32 results
# would differ too much.
DELTA = {
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
CONVOLUTIONS = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 3,
    "norm_eps": 1e-3,
}

_FALCON_H1 = {
    "rms_norm_eps": 1e-3,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 3,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 0.8, 1.1, 1.3, 0.7],
    "mlp_multipliers": [0.75, 0.5],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {}),
    "gemma4_31b": (
        "Gemma4",
        {**_GEMMA4, "layer_types": _IN_TURN * 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_e2b": (
        "Gemma4",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": _IN_TURN * 3,
            "hidden_size_per_layer_input": 12,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "attention_bias": True,
        },
    ),
    "gemma4_26b": (
        "Gemma4",
        {
            **_GEMMA4,
            "layer_types": _IN_TURN * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma2": ("Gemma2", {**_LOCAL, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0}),
    "vaultgemma": ("VaultGemma", {**_LOCAL, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0}),
    "ministral": (
        "Ministral",
        {**_LOCAL, "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]},
    ),
    "ministral_local": ("Ministral", _LOCAL),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            **_LOCAL,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500_000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                    "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            },
        },
    ),
    "exaone4": ("Exaone4", {**_LOCAL, "sliding_window_pattern": 2}),
    "exaone4_full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "seed_oss": ("SeedOss", {"mlp_bias": True, "attention_out_bias": True}),
    "cwm": ("Cwm", _LOCAL),
    "granite": (
        "Granite",
        {
            "attention_bias": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
        },
    ),
    "starcoder2": ("Starcoder2", _LOCAL),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "head_dim": None}),
    "stablelm_normed": ("StableLm", {"qk_layernorm": True, "head_dim": None}),
    "stablelm_parallel": ("StableLm", {"use_parallel_residual": True, "head_dim": None}),
    "phi": ("Phi", {}),
    "phi_normed": ("Phi", {"qk_layernorm": True}),
    "nemotron": ("Nemotron", {"attention_bias": True, "mlp_bias": True}),
    "gpt_neox": ("GPTNeoX", {"head_dim": None, "num_key_value_heads": None}),
    "gpt_neox_in_turn": ("GPTNeoX", {"use_parallel_residual": False, "head_dim": None, "num_key_value_heads": None}),
    "cohere": ("Cohere", {"attention_bias": True, "tie_word_embeddings": True}),
    "cohere_normed": ("Cohere", {"use_qk_norm": True, "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", {**_LOCAL, "tie_word_embeddings": True}),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "olmo": ("Olmo", {"clip_qkv": 0.5, "attention_bias": True}),
    "internlm3": ("InternLM3", {"attention_bias": True, "mlp_bias": True}),
    "gptj": ("GPTJ", _GPTJ),
    "codegen": ("CodeGen", _GPTJ),
    "falcon": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_one_norm": (
        "Falcon",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": False},
    ),
    "falcon_multi_query": ("Falcon", _FALCON),
    "falcon_in_turn": ("Falcon", {**_FALCON, "multi_query": False, "parallel_attn": False}),
    "apertus": (
        "Apertus",
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    "jais2": ("Jais2", {}),
    "bitnet": ("BitNet", {"attention_bias": True}),
    "nanochat": ("NanoChat", {"attention_bias": True, "final_logit_softcapping": 5.0}),
    "persimmon": ("Persimmon", {"intermediate_size": 96}),
    "deepseek_v2": (
        "DeepseekV2",
        {**_LATENT, **_EXPERTS, "topk_method": "group_limited_greedy", "attention_bias": True},
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        {**_LATENT, **_EXPERTS, "q_lora_rank": None, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**_LATENT, **_EXPERTS, "attention_bias": True, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek_v3_half": ("DeepseekV3", {**_LATENT, **_EXPERTS, "first_k_dense_replace": 4, "rope_interleave": False}),
    "youtu": ("Youtu", _LATENT),
    "glm4_moe_lite": ("Glm4MoeLite", {**_LATENT, **_EXPERTS, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4}),
    "lfm2": (  # feed-forward width differs from the configured one
        "Lfm2",
        {**CONVOLUTIONS, "conv_bias": True, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3},
    ),
    "lfm2_plain": (
        "Lfm2",
        {**CONVOLUTIONS, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
    ),
    "falcon_h1": ("FalconH1", {**_FALCON_H1, "mlp_bias": True}),
    "falcon_h1_normed": ("FalconH1", {**_FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon_h1_normed_before": (
        "FalconH1",
        {
            **_FALCON_H1,
            "mamba_rms_norm": True,
            "attention_bias": True,
            "attention_in_multiplier": 1.0,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "ssm_in_multiplier": 1.0,
        },
    ),
    "qwen3_5": ("Qwen3_5", {**DELTA, "attention_bias": True}),
    "minicpm3": (
        "MiniCPM3",
        {
            **_LATENT,
            "scale_emb": 3.0,
            "dim_model_base": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 4,
                "short_factor": [1.0 + 0.1 * i for i in range(4)],
                "long_factor": [1.5 + 0.5 * i for i in range(4)],
            },
        },
    ),
}

COMMON |= {name: _SIZES for name, (kind, _) in FAMILIES.items() if kind in ("GPTJ", "CodeGen", "Falcon", "Persimmon")}
