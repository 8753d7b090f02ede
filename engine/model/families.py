"""Hugging Face config.json -> ModelSpec, for each supported family, refusing what it does not understand.

Defaults follow the configuration classes of transformers, since checkpoints leave them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.spec import AttentionSpec, KVGroupSpec, LayerSpec, ModelSpec
from windlass.engine.rotary.config_names import read_rotary_groups

Config = Mapping[str, Any]

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

# Keys that would change the maths in a way no family here implements, with the values that change nothing.
_MUST_BE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0, 1),
    "alibi": (None, False),
    "no_rope_layers": (None, [], 0),
    "no_rope_layer_interval": (None, 0),
    "attention_chunk_size": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}

_READ = frozenset(
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim hidden_act hidden_activation max_position_embeddings rms_norm_eps tie_word_embeddings "
    "rope_theta rope_scaling rope_parameters rope_local_base_freq partial_rotary_factor original_max_position_embeddings "
    "attention_bias mlp_bias sliding_window sliding_window_pattern _sliding_window_pattern layer_types use_sliding_window "
    "max_window_layers query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping eos_token_id".split()
)
# Bookkeeping of the library that wrote the file; nothing at inference depends on it.
_HARMLESS = frozenset(
    "_name_or_path transformers_version torch_dtype dtype use_cache initializer_range attention_dropout pretraining_tp "
    "bos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id hidden_dropout cache_implementation "
    "output_attentions output_hidden_states return_dict torchscript use_bfloat16 pruned_heads chunk_size_feed_forward "
    "id2label label2id problem_type tie_encoder_decoder is_decoder cross_attention_hidden_size tokenizer_class prefix "
    "task_specific_params finetuning_task _attn_implementation_autoset auto_map attn_implementation".split()
)


def read_spec(config: Config, generation_config: Config | None = None) -> ModelSpec:
    """The spec of the model that config.json describes; raises LoadError with one line that says what is not supported."""
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    family = _FAMILIES.get(str(architecture))
    if family is None:
        raise LoadError(
            f"architecture {architecture!r} in config.json is not supported: use one of {', '.join(sorted(_FAMILIES))}"
        )
    for key, neutral in _MUST_BE_NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise LoadError(f"config.json sets {key}={config[key]!r}, which changes the model and is not supported")
    return family(str(architecture), config, generation_config or {})


def _build(
    architecture: str,
    config: Config,
    generation_config: Config,
    *,
    windows: Callable[[Config, int], list[int | None]],
    kv_heads: int | None = None,
    head_dim: int | None = None,
    max_len: int = 32768,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    gemma: bool = False,
) -> ModelSpec:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    num_layers, intermediate = _size(config, "num_hidden_layers"), _size(config, "intermediate_size")
    num_kv_heads = _size(config, "num_key_value_heads", kv_heads or heads)
    if heads % num_kv_heads:
        raise LoadError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if config.get("head_dim") is None and head_dim is None and hidden % heads:
        raise LoadError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}: set head_dim"
        )
    dim = _size(config, "head_dim", head_dim or hidden // heads)
    act_name = config.get("hidden_activation" if gemma else "hidden_act") or ("gelu_pytorch_tanh" if gemma else "silu")
    activation = _ACTIVATIONS.get(act_name) if isinstance(act_name, str) else None
    if activation is None:
        raise LoadError(f"config.json: activation {act_name!r} is not supported: use one of {', '.join(_ACTIVATIONS)}")
    rotary_groups = read_rotary_groups(config)
    rotary_index = {group.name: i for i, group in enumerate(rotary_groups)}
    window_of = windows(config, num_layers)
    distinct = list(dict.fromkeys(window_of))
    scale = (_number(config, "query_pre_attn_scalar") or 256.0) ** -0.5 if gemma else dim**-0.5
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                num_heads=heads,
                num_kv_heads=num_kv_heads,
                head_dim=dim,
                scale=scale,
                rotary_group=rotary_index.get("full_attention" if window is None else "sliding_attention", 0),
                kv_group=distinct.index(window),
                window=window,
                soft_cap=_number(config, "attn_logit_softcapping") if gemma else None,
                qkv_bias=qkv_bias,
                out_bias=out_bias,
                qk_norm=qk_norm,
            ),
            intermediate_size=intermediate,
            activation=activation,  # type: ignore[arg-type]
            mlp_bias=mlp_bias,
            norms="sandwich" if gemma else "pre",
        )
        for window in window_of
    )
    kv_groups = tuple(
        KVGroupSpec(tuple(i for i, w in enumerate(window_of) if w == window), num_kv_heads, dim, window)
        for window in distinct
    )
    unknown = sorted(
        k for k in config if k not in _READ | _HARMLESS and k not in _MUST_BE_NEUTRAL and config[k] is not None
    )
    notices = (f"config.json keys not understood and left unused: {', '.join(unknown)}",) if unknown else ()
    return ModelSpec(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        layers=layers,
        rotary_groups=rotary_groups,
        kv_groups=kv_groups,
        trained_len=_size(config, "max_position_embeddings", max_len),
        norm_eps=_number(config, "rms_norm_eps") or 1e-6,
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=float(hidden) ** 0.5 if gemma else 1.0,
        tied_embeddings=bool(config.get("tie_word_embeddings", gemma)),
        logit_soft_cap=_number(config, "final_logit_softcapping") if gemma else None,
        eos_token_ids=_eos(config, generation_config),
        notices=notices,
    )


def _llama(architecture: str, config: Config, generation_config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return _build(
        architecture,
        config,
        generation_config,
        windows=lambda _, n: [None] * n,
        max_len=2048,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _mistral(architecture: str, config: Config, generation_config: Config) -> ModelSpec:
    def windows(config: Config, n: int) -> list[int | None]:
        return [_window(config, 4096)] * n

    return _build(architecture, config, generation_config, windows=windows, kv_heads=8, max_len=4096 * 32)


def _qwen2(architecture: str, config: Config, generation_config: Config) -> ModelSpec:
    return _build(architecture, config, generation_config, windows=_qwen_windows, kv_heads=32, qkv_bias=True)


def _qwen3(architecture: str, config: Config, generation_config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return _build(
        architecture,
        config,
        generation_config,
        windows=_qwen_windows,
        kv_heads=32,
        head_dim=128,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )


def _gemma3(architecture: str, config: Config, generation_config: Config) -> ModelSpec:
    def windows(config: Config, n: int) -> list[int | None]:
        pattern = _size(config, "sliding_window_pattern", 6)
        default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(n)]
        if config.get("sliding_window", 4096) is None:
            # Local layers would turn by their own theta without a window; nothing here says which layers those are.
            raise LoadError("config.json: sliding_window is null, and Gemma 3's local layers need one: give its size")
        return _windows_by_type(config, default, n, 4096)

    bias = bool(config.get("attention_bias", False))
    return _build(
        architecture,
        config,
        generation_config,
        windows=windows,
        kv_heads=4,
        head_dim=256,
        max_len=131072,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        gemma=True,
    )


_FAMILIES: dict[str, Callable[[str, Config, Config], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
}


def _qwen_windows(config: Config, n: int) -> list[int | None]:
    if not config.get("use_sliding_window", False):
        return [None] * n
    first = 0 if config.get("max_window_layers") == 0 else _size(config, "max_window_layers", 28)
    return _windows_by_type(
        config, ["sliding_attention" if i >= first else "full_attention" for i in range(n)], n, 4096
    )


def _windows_by_type(config: Config, default: list[str], n: int, window: int) -> list[int | None]:
    types = list(config.get("layer_types") or default)
    if len(types) != n or set(types) - {"full_attention", "sliding_attention"}:
        raise LoadError(f"config.json: layer_types must name {n} layers, each full_attention or sliding_attention")
    return [_window(config, window) if t == "sliding_attention" else None for t in types]


def _window(config: Config, default: int) -> int | None:
    value = config.get("sliding_window", default)
    return None if value is None else _size(config, "sliding_window", default)


def _size(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LoadError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _number(config: Config, key: str) -> float | None:
    """A positive, finite number, or None where the file says nothing."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise LoadError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def _eos(config: Config, generation_config: Config) -> tuple[int, ...]:
    value = generation_config.get("eos_token_id", config.get("eos_token_id"))
    ids = [i for i in (value if isinstance(value, list) else [value]) if i is not None]
    if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise LoadError(f"config.json or generation_config.json: eos_token_id must be token ids, got {value!r}")
    return tuple(ids)
