"""The supported model families, as data: what distinguishes each from the next. `read_spec` turns config.json into a
ModelSpec with it, refusing what it does not understand.

Defaults follow the configuration classes of transformers, since checkpoints leave them out; those of the rotation and of
the sizes it depends on are in `rotary.family_defaults`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.formats import describe_architecture, describe_quantized
from windlass.engine.model.spec import AttentionSpec, CheckpointLayout, KVGroupSpec, LayerSpec, ModelSpec
from windlass.engine.rotary.config_names import RotaryLayout, read_rotary_layout
from windlass.engine.rotary.config_values import Config, read_flag, read_number, read_size
from windlass.engine.rotary.older_names import OLDER_NAMES

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

# Keys that would change the maths in a way no family here implements, with the values that change nothing.
_MUST_BE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
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
    "attn_logit_softcapping final_logit_softcapping eos_token_id quantization_config".split()
) | frozenset(OLDER_NAMES)
# Bookkeeping of the library that wrote the file; nothing at inference depends on it.
_HARMLESS = frozenset(
    "_name_or_path transformers_version torch_dtype dtype use_cache initializer_range attention_dropout pretraining_tp "
    "bos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id hidden_dropout cache_implementation "
    "output_attentions output_hidden_states return_dict torchscript use_bfloat16 pruned_heads chunk_size_feed_forward "
    "id2label label2id problem_type tie_encoder_decoder is_decoder cross_attention_hidden_size tokenizer_class prefix "
    "task_specific_params finetuning_task _attn_implementation_autoset auto_map attn_implementation resid_pdrop embd_pdrop "
    "eod_token_id".split()
)


@dataclass(frozen=True, slots=True)
class Family:
    """What a family adds to the plain decoder (RMS pre-norm, silu-gated MLP, no biases).

    A bias is always there, never, or where config.json sets the named key (`bias_default` when it says nothing).
    kv_heads: the default of num_key_value_heads, None for as many as heads. gemma: offset norms, scaled embeddings, soft
    caps, a scale of its own. eos: the default of eos_token_id.
    """

    model_type: str
    kv_heads: int | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    bias_default: bool = False
    qk_norm: Literal["before", "after"] | None = None
    norms: Literal["pre", "sandwich"] = "pre"
    tied: bool = False
    gemma: bool = False
    eos: tuple[int, ...] = ()
    checkpoint: CheckpointLayout = field(default_factory=CheckpointLayout)


_BIAS = "attention_bias"
_GLM_EOS = (151329, 151336, 151338)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family("mistral", kv_heads=8),
    # With position-dependent query temperature.
    "Ministral3ForCausalLM": Family("ministral3", kv_heads=8, norm_eps=1e-5),
    "Qwen2ForCausalLM": Family("qwen2", kv_heads=32, qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", kv_heads=32, qkv_bias=_BIAS, out_bias=_BIAS, qk_norm="before"),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        kv_heads=4,
        qkv_bias=_BIAS,
        out_bias=_BIAS,
        qk_norm="before",
        norms="sandwich",
        tied=True,
        gemma=True,
        checkpoint=CheckpointLayout(norms="gemma"),
    ),
    # Every fourth layer without rotation.
    "SmolLM3ForCausalLM": Family("smollm3", kv_heads=4, qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias="mlp_bias", tied=True),
    "HeliumForCausalLM": Family(
        "helium",
        kv_heads=20,
        norm_eps=1e-8,
        qkv_bias=_BIAS,
        mlp_bias="mlp_bias",
        checkpoint=CheckpointLayout(interleaved=True),
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        kv_heads=2,
        norm_eps=1e-5,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        tied=True,
        checkpoint=CheckpointLayout(interleaved=True),
    ),
    "GlmForCausalLM": Family(
        "glm",
        kv_heads=2,
        norm_eps=1.5625e-7,
        qkv_bias=_BIAS,
        bias_default=True,
        eos=_GLM_EOS,
        checkpoint=CheckpointLayout(interleaved=True, fused_gate_up=True),
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        kv_heads=2,
        norm_eps=1.5625e-7,
        qkv_bias=_BIAS,
        bias_default=True,
        norms="sandwich",
        eos=_GLM_EOS,
        checkpoint=CheckpointLayout(interleaved=True, fused_gate_up=True, norms="glm4"),
    ),
    "Phi3ForCausalLM": Family("phi3", norm_eps=1e-5, checkpoint=CheckpointLayout(fused_qkv=True, fused_gate_up=True)),
    # Query and key norms behind the rotation.
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense",
        norm_eps=1e-5,
        qkv_bias=_BIAS,
        out_bias=_BIAS,
        qk_norm="after",
        checkpoint=CheckpointLayout(norms="hunyuan"),
    ),
}


def read_spec(config: Config, generation_config: Config | None = None) -> ModelSpec:
    """The spec of the model that config.json describes; raises LoadError with one line that says what is not supported."""
    architecture = _architecture(config)
    family = FAMILIES.get(architecture)
    if family is None:
        kind = describe_architecture(architecture, config)
        what = f"{kind}, which" if kind is not None and "," not in kind else f"{kind} and" if kind else ""
        raise LoadError(
            f"architecture {architecture!r} in config.json is {f'{what} is ' if what else ''}not supported: use one of "
            f"{', '.join(sorted(FAMILIES))}"
        )
    if config.get("model_type", family.model_type) != family.model_type:
        raise LoadError(
            f"config.json names architecture {architecture} and model_type {config['model_type']!r}, which do not belong "
            f"together: {architecture} is {family.model_type!r}"
        )
    quantized = describe_quantized(config)
    if quantized is not None:
        raise LoadError(quantized)
    for key, neutral in _MUST_BE_NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise LoadError(f"config.json sets {key}={config[key]!r}, which changes the model and is not supported")
    layout = read_rotary_layout({**config, "model_type": family.model_type})
    layers, kv_groups = _layers(config, family, layout)
    hidden = read_size(config, "hidden_size")
    return ModelSpec(
        architecture=architecture,
        vocab_size=read_size(config, "vocab_size"),
        hidden_size=hidden,
        layers=layers,
        rotary_groups=layout.groups,
        kv_groups=kv_groups,
        trained_len=layout.groups[0].base.trained_len,
        norm_eps=read_number(config, "rms_norm_eps") or family.norm_eps,
        norm_offset=1.0 if family.gemma else 0.0,
        embedding_scale=float(hidden) ** 0.5 if family.gemma else 1.0,
        tied_embeddings=read_flag(config, "tie_word_embeddings", family.tied),
        logit_soft_cap=read_number(config, "final_logit_softcapping") if family.gemma else None,
        eos_token_ids=_eos(config, generation_config or {}, family),
        temperature=layout.temperature,
        checkpoint=family.checkpoint,
        notices=_notices(config),
    )


def _architecture(config: Config) -> str:
    named = config.get("architectures")
    found = named[0] if isinstance(named, list) and named else named
    if found is None:
        raise LoadError(
            "config.json names no architecture and is not supported without: it needs a line such as "
            '"architectures": ["LlamaForCausalLM"]'
        )
    return str(found)


def _layers(
    config: Config, family: Family, layout: RotaryLayout
) -> tuple[tuple[LayerSpec, ...], tuple[KVGroupSpec, ...]]:
    hidden, heads = read_size(config, "hidden_size"), read_size(config, "num_attention_heads")
    read_size(config, "num_hidden_layers")  # required, where the rotation has a default
    kv_heads = read_size(config, "num_key_value_heads", family.kv_heads or heads)
    dim = layout.groups[0].base.head_dim
    if heads % kv_heads:
        raise LoadError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None and dim == hidden // heads and hidden % heads:
        raise LoadError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}: set head_dim"
        )
    scale = (read_number(config, "query_pre_attn_scalar") or 256.0) ** -0.5 if family.gemma else dim**-0.5
    intermediate, activation = read_size(config, "intermediate_size"), _activation(config, family)
    windows = list(dict.fromkeys(layer.window for layer in layout.layers))
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                scale=scale,
                rotary_group=group,
                kv_group=windows.index(layer.window),
                window=layer.window,
                soft_cap=read_number(config, "attn_logit_softcapping") if family.gemma else None,
                qkv_bias=_has_bias(config, family, family.qkv_bias),
                out_bias=_has_bias(config, family, family.out_bias),
                qk_norm=family.qk_norm,
            ),
            intermediate_size=intermediate,
            activation=activation,
            mlp_bias=_has_bias(config, family, family.mlp_bias),
            norms=family.norms,
        )
        for layer, group in zip(layout.layers, layout.layer_groups, strict=True)
    )
    kv_groups = tuple(
        KVGroupSpec(tuple(i for i, layer in enumerate(layout.layers) if layer.window == window), kv_heads, dim, window)
        for window in windows
    )
    return layers, kv_groups


def _has_bias(config: Config, family: Family, bias: bool | str) -> bool:
    return read_flag(config, bias, family.bias_default) if isinstance(bias, str) else bias


def _activation(config: Config, family: Family) -> Literal["silu", "gelu_tanh"]:
    name = (
        (config.get("hidden_activation") or "gelu_pytorch_tanh") if family.gemma else config.get("hidden_act") or "silu"
    )
    activation = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if activation is None:
        raise LoadError(f"config.json: activation {name!r} is not supported: use one of {', '.join(_ACTIVATIONS)}")
    return "silu" if activation == "silu" else "gelu_tanh"


def _notices(config: Config) -> tuple[str, ...]:
    understood = _READ | _HARMLESS | _MUST_BE_NEUTRAL.keys()
    unknown = sorted(key for key in config if key not in understood and config[key] is not None)
    return (f"config.json keys not understood and left unused: {', '.join(unknown)}",) if unknown else ()


def _eos(config: Config, generation_config: Config, family: Family) -> tuple[int, ...]:
    value = generation_config.get("eos_token_id", config.get("eos_token_id"))
    ids = [i for i in (value if isinstance(value, list) else [value]) if i is not None]
    if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise LoadError(f"config.json or generation_config.json: eos_token_id must be token ids, got {value!r}")
    return tuple(ids) or family.eos
