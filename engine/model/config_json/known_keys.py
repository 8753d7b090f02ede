"""Which keys of config.json are understood: those that are read, those that change nothing, and those that must not be set.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.older_names import LEGACY_ROPE_KEYS
from windlass.engine.model.config_json.values import Config
from windlass.engine.rotary.fields import format_value

# Keys that would change the maths in a way no family here implements, with the values that change nothing.
_MUST_BE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
    "apply_residual_connection_post_layernorm": (None, False),
    "qk_layernorm": (None, False),
    "use_qk_norm": (None, False),
    "num_experts": (None, 0, 1),
    "use_cla": (None, False),
    "use_mla": (None, False),
    "use_mixed_mlp_moe": (None, False),
    "num_local_experts": (None, 0, 1),
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}

_READ = frozenset(
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim hidden_act hidden_activation max_position_embeddings rms_norm_eps tie_word_embeddings "
    "rope_theta rope_scaling rope_parameters rope_local_base_freq partial_rotary_factor original_max_position_embeddings "
    "attention_bias mlp_bias use_bias sliding_window sliding_window_pattern _sliding_window_pattern layer_types "
    "use_sliding_window max_window_layers no_rope_layers no_rope_layer_interval layer_rope_theta query_pre_attn_scalar "
    "attn_logit_softcapping final_logit_softcapping eos_token_id quantization_config attention_out_bias "
    "compression_config layer_norm_eps norm_epsilon norm_eps use_qkv_bias use_parallel_residual "
    "num_nextn_predict_layers id2label num_labels problem_type layer_norm_epsilon activation activation_function bias "
    "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave "
    "scale_emb scale_depth dim_model_base first_k_dense_replace mlp_layer_types "
    "classifier_from_token method is_original_qwen3_reranker".split()
) | frozenset(LEGACY_ROPE_KEYS)
# Bookkeeping of the library that wrote the file; nothing at inference depends on it.
_HARMLESS = frozenset(
    "_name_or_path transformers_version torch_dtype dtype use_cache initializer_range attention_dropout pretraining_tp "
    "bos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id hidden_dropout cache_implementation "
    "output_attentions output_hidden_states return_dict torchscript use_bfloat16 pruned_heads chunk_size_feed_forward "
    "label2id tie_encoder_decoder is_decoder cross_attention_hidden_size tokenizer_class prefix "
    "task_specific_params finetuning_task _attn_implementation_autoset auto_map attn_implementation resid_pdrop embd_pdrop "
    "eod_token_id classifier_dropout hidden_dropout residual_dropout embedding_dropout attn_pdrop n_ctx "
    "rotary scale_attn_weights _from_model_config gradient_checkpointing "
    "summary_type summary_use_proj summary_activation summary_first_dropout summary_proj_to_labels "
    "output_router_logits router_aux_loss_coef router_jitter_noise input_jitter_noise qk_head_dim "
    "embedding_initializer_range".split()
)


def check_unsupported_keys(config: Config, read: Container[str] = ()) -> None:
    """LoadError for a key that would make another model of it. read: those that the family reads."""
    for key, neutral in _MUST_BE_NEUTRAL.items():
        if key in config and key not in read and config[key] not in neutral:
            raise LoadError(
                f"config.json sets {key}={format_value(config[key])}, which changes the model and is not supported"
            )


def unknown_key_notices(config: Config, read: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """A notice of the keys that nobody here knows, none where there are none. read: those that the family reads."""
    understood = _READ | _HARMLESS | _MUST_BE_NEUTRAL.keys() | read
    unknown = sorted(key for key in config if key not in understood and config[key] is not None)
    return (f"config.json keys not understood and left unused: {', '.join(unknown)}",) if unknown else ()
