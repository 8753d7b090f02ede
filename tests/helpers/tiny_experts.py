"""Families with experts for `tiny_models`, in the format of `tiny_families`."""

from __future__ import annotations

from typing import Any

from helpers.tiny_families import CONVOLUTIONS, DELTA

# Name suffixes of parameters and buffers that are zero by default.
BIASES = ("e_score_correction_bias", "expert_bias", "proj_bias", "router.bias")

_LOCAL = {"sliding_window": 8}
_SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GRANITE = {
    "num_local_experts": 6,
    "attention_bias": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 8.0,
}
_GROUPED = {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
_GRANITE4 = {
    "layer_types": ["full_attention"] * 4,
    "position_embedding_type": "rope",
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,
}

# Two heads per group, and different sizes; eps as in other families with states.
STATES = {
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 4,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, **_LOCAL}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **_SPARSE,
            **_LOCAL,
            "use_sliding_window": True,
            "max_window_layers": 3,
            "num_experts": 6,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**_SPARSE, "num_experts": 6, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**DELTA, **_SPARSE, "num_experts": 6, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **DELTA,
            **_SPARSE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": False,
            "mlp_only_layers": [1, 4],
        },
    ),
    "qwen3_next_interval": (
        "Qwen3Next",
        {
            **DELTA,
            **_SPARSE,
            "layer_types": None,
            "full_attention_interval": 2,
            "num_experts": 6,
            "shared_expert_intermediate_size": 32,
            "decoder_sparse_step": 2,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {**CONVOLUTIONS, **_SPARSE, "num_experts": 6, "num_dense_layers": 1, "routed_scaling_factor": 1.25},
    ),
    "lfm2_moe_unbiased": (
        "Lfm2Moe",
        {
            **CONVOLUTIONS,
            **_SPARSE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_dense_layers": 2,
            "use_expert_bias": False,
            "norm_topk_prob": False,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "granitemoe": ("GraniteMoe", _GRANITE),
    "granitemoeshared": ("GraniteMoeShared", {**_GRANITE, "shared_intermediate_size": 32}),
    "granite4": (
        "GraniteMoeHybrid",
        {**_GRANITE, **_GRANITE4, "num_local_experts": 0, "attention_bias": True},
    ),
    "granite4_experts": ("GraniteMoeHybrid", {**_GRANITE, **_GRANITE4}),
    "granite4_h": (
        "GraniteMoeHybrid",
        {**_GRANITE, **_GRANITE4, **STATES, "num_local_experts": 0, "mamba_proj_bias": True},
    ),
    "granite4_h_experts": (
        "GraniteMoeHybrid",
        {**_GRANITE, **_GRANITE4, **STATES, "mamba_n_groups": 1, "mamba_conv_bias": False},
    ),
    "phimoe": (
        "Phimoe",
        {**_LOCAL, "num_local_experts": 6, "router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True},
    ),
    "hunyuan_moe": ("HunYuanMoEV1", {"num_experts": 6, "moe_topk": 2}),
    "gpt_oss": (
        "GptOss",
        {
            **_LOCAL,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
    ),
    "llama4": (
        "Llama4",
        {
            "attention_chunk_size": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 80,
            "attn_scale": 0.5,
            "floor_scale": 8,
            "no_rope_layer_interval": 2,
        },
    ),
    "llama4_all_experts": (
        "Llama4",
        {
            "attention_chunk_size": 10,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
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
    "glm4_moe": ("Glm4Moe", {**_SPARSE, **_GROUPED, "attention_bias": True, "use_qk_norm": True}),
    "dots1": ("Dots1", {**_SPARSE, **_GROUPED, **_LOCAL, "max_window_layers": 2, "first_k_dense_replace": 2}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_intermediate_size": 48, "moe_k": 2, "moe_num_experts": 6, "moe_layer_end_index": 2, "use_bias": True},
    ),
    "afmoe": ("Afmoe", {**_SPARSE, **_LOCAL, "num_experts": 6, "route_scale": 1.5, "mup_enabled": True}),
}
