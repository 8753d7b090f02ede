"""Detection of models and config.json keys that are not supported.

Lists the keys that are read, the keys that change nothing, and the keys that must have a neutral value. Describes an
unsupported architecture or quantization in one line for the user. Opens no file and imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config
from windlass.engine.model.config_json.quantization_config import read_quantization_config
from windlass.engine.model.config_json.rotary_layout import LEGACY_ROPE_KEYS
from windlass.engine.rotary.scaling_fields import format_value

# Keys that would change the model in a way that no family here implements, with their neutral values.
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
    "head_copies_embedding classifier_from_token method is_original_qwen3_reranker".split()
) | frozenset(LEGACY_ROPE_KEYS)

# Keys of the library that wrote the file, without effect at inference.
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
    """Raise LoadError for a key that would change the model. read: keys that the family reads."""
    for key, neutral in _MUST_BE_NEUTRAL.items():
        if key in config and key not in read and config[key] not in neutral:
            raise LoadError(
                f"config.json sets {key}={format_value(config[key])}, which changes the model and is not supported"
            )


def unknown_key_notices(config: Config, read: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """A notice on unknown keys, if there are any. read: keys that the family reads."""
    understood = _READ | _HARMLESS | _MUST_BE_NEUTRAL.keys() | read
    unknown = sorted(key for key in config if key not in understood and config[key] is not None)
    return (f"config.json has unknown keys, which are ignored: {', '.join(unknown)}",) if unknown else ()


_METHODS = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "exl2": "EXL2",
    "exl3": "EXL3",
}

# Ends of tensor names that only quantized checkpoints have.
_ENDS = {
    ".weight_scale_inv": "FP8",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "FP8 or compressed-tensors",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".qweight": "GPTQ or AWQ",
    ".scales": "MLX",
    "_proj_blocks": "MXFP4",
}

# Methods that are supported if config.json names them.
_NEEDS_CONFIG = ("FP8", "compressed-tensors", "FP8 or compressed-tensors", "GPTQ or AWQ", "MXFP4")

# By the lower-case class name before "For…".
_KINDS = {
    "a hybrid of attention and other recurrent layers": frozenset(
        "bamba jamba kimilinear minimax olmohybrid recurrentgemma zamba zamba2".split()
    ),
    "a model whose attention reads selected keys only (sparse attention)": frozenset(
        {"deepseekv32", "deepseekv4", "glmmoedsa"}
    ),
    "a model whose layers share keys and have per-layer embeddings (Gemma 3n)": frozenset({"gemma3n"}),
    "a model without rotary attention (ALiBi)": frozenset({"mpt"}),
    "the first generation of Qwen (custom code in the checkpoint; Qwen 1.5 and later are supported)": frozenset(
        {"qwen"}
    ),
    "a model without rotary attention (learned or sinusoidal positions)": frozenset(
        "biogpt ctrl gptbigcode gptneo openaigpt openai opt xglm".split()
    ),
}

# Entries of `layer_types` that are attention.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def _describe_kind(name: str, config: Mapping[str, Any]) -> str | None:
    """The kind of model, from its lower-case class name or its layer types; None if unknown."""
    stem = re.sub("for(causallm|conditionalgeneration|sequenceclassification)$|lmheadmodel$", "", name)
    for kind, names in _KINDS.items():
        if stem in names:
            return kind
    types = config.get("layer_types")
    others = (
        {str(kind)[:40] for kind in types if str(kind) not in _ATTENTION_LAYERS} if isinstance(types, list) else set()
    )
    return f"a model with layers that are not attention ({min(others)})" if others else None


_DRAFT_HEAD_KEYS = ("medusa_num_heads", "hydra_num_heads", "speculators_model_type", "draft_vocab_size", "eagle_config")
_DRAFT_HEAD = re.compile("eagle|medusa|hydra|speculator|mtpmodel$|draftmodel$", re.IGNORECASE)
_IS_DRAFT_HEAD = (
    "a draft head (such as EAGLE, Medusa or a separate MTP head), which only proposes tokens to the model that it was trained "
    "with: serve that model; speculation takes a smaller model of its own vocabulary, `scheduling.speculation.model`"
)


def describe_draft_head(config: Mapping[str, Any]) -> str | None:
    """Error message for the config.json of a draft head, which cannot run without its model; None for others."""
    named = config.get("architectures")
    architecture = str(named[0] if isinstance(named, list) and named else named or config.get("model_type", ""))
    if _DRAFT_HEAD.search(architecture) or any(config.get(key) is not None for key in _DRAFT_HEAD_KEYS):
        return f"config.json describes {_IS_DRAFT_HEAD}"
    return None


def describe_architecture(architecture: str, config: Mapping[str, Any]) -> str | None:
    """The kind of an unsupported architecture, from its name or config.json; None if unknown."""
    name = architecture.lower()
    if (kind := _describe_kind(name, config)) is not None:
        return kind
    if any(isinstance(config.get(key), Mapping) for key in ("vision_config", "audio_config", "thinker_config")):
        return "a multimodal model"
    experts = [config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    if any(isinstance(count, int) and count > 1 for count in experts) or "moe" in name or "mixtral" in name:
        return "a mixture of experts of another kind than the supported ones"
    if config.get("is_encoder_decoder") is True:
        return "an encoder-decoder model"
    if name.endswith("formaskedlm"):
        return "an encoder, which writes no text"
    if name.endswith(("forsequenceclassification", "fortokenclassification", "forquestionanswering")):
        return "a classifier, which writes no text"
    if name.endswith("model") and not name.endswith("lmheadmodel"):
        return "an embedding model or one without its language-model head, which writes no text"
    if name.startswith(("mamba", "rwkv", "falconmamba")):
        return "a model without attention"
    code = config.get("auto_map")
    if isinstance(code, Mapping) and (found := [str(name)[:80] for key, name in code.items() if "Model" in str(key)]):
        return f"custom code in the checkpoint ({found[0]}), which is not run,"
    return None


def describe_quantized(config: Mapping[str, Any], tensors: Iterable[str] = ()) -> str | None:
    """Error message for a checkpoint whose quantization is not supported; None for others.

    tensors: names of the checkpoint's tensors.
    """
    found = read_quantization_config(config)
    if found is not None:
        reason = found.unsupported_reason
        return None if reason is None else _not_supported(f"{found.method}, {reason}")
    if (method := _method(config)) is not None:
        return _not_supported(method)
    ends = {end for name in tensors for end in _ENDS if name.endswith(end)}
    if (method := next((_ENDS[end] for end in _ENDS if end in ends), None)) is None:
        return None
    if method not in _NEEDS_CONFIG:
        return _not_supported(method)
    return (
        f"this checkpoint is quantized ({method}), but its config.json has no quantization_config that describes it: download "
        "config.json again from the source of the weights"
    )


def _not_supported(method: str) -> str:
    return (
        f"this checkpoint is quantized ({method}), which is not read: take the unquantized one of the same model and start it "
        "with `compute.quantization=int8` (or int4), which quantizes it while it loads"
    )


def describe_tensors(tensors: Collection[str]) -> str | None:
    """Error message for a checkpoint whose tensor names are not those of a language model; None for others."""
    if not tensors or "model.embed_tokens.weight" in tensors:
        return None
    if "fc.weight" in tensors or any(name.startswith(("medusa_head", "hydra_head")) for name in tensors):
        return f"these are the weights of {_IS_DRAFT_HEAD}"
    if any("vision" in name or name.startswith("language_model.") for name in tensors):
        return (
            "these are the weights of a multimodal model, and config.json describes one of text alone: take the config.json that "
            "belongs to them"
        )
    return None


def _method(config: Mapping[str, Any]) -> str | None:
    """The quantization method named in config.json; None if there is none."""
    for key in ("quantization_config", "compression_config"):
        found = config.get(key)
        if isinstance(found, Mapping) and found.get("quant_method"):
            method = str(found["quant_method"])
            bits = found.get("bits") or next((n for n in (4, 8) if found.get(f"load_in_{n}bit")), None)
            title = _METHODS.get(method.lower(), method)
            return f"{title}, {bits} bits" if isinstance(bits, int) else title
    mlx = config.get("quantization")
    if isinstance(mlx, Mapping) and "group_size" in mlx:
        return f"MLX, {mlx['bits']} bits" if isinstance(mlx.get("bits"), int) else "MLX"
    return "quantization_config in config.json" if config.get("quantization_config") else None
