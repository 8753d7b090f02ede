"""Gemma 1 to 4 (text) and VaultGemma.

Norms of Gemma 1 to 3 multiply by one plus their weight; embeddings are scaled by the square root of their size. Gemma 3
has local layers with their own theta between global ones, and norms around every part. Gemma 4 has wider heads in
global layers, normed values and, depending on the model, KV sharing, per-layer embeddings, and experts in parallel with
the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from windlass.engine.cache.kv_cache_spec import KVGroupSpec
from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import (
    Config,
    ConfigRules,
    LayerFacts,
    Sizes,
    every_nth_full,
    read_flag,
    read_object,
    read_size,
)
from windlass.engine.model.families.family import ATTENTION_BIASES, Family, SoftCaps
from windlass.engine.model.families.moe_rules import MoERules, read_count, read_experts
from windlass.engine.model.feed_forward.mlp import GatedMLPSpec
from windlass.engine.model.feed_forward.moe import ExpertStacks, MoENames, ParallelExpertsSpec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.model_spec import LayerNorms, LayerSpec, ModelSpec
from windlass.engine.model.per_layer_embeddings import PerLayerEmbeddingsSpec, PerLayerProjectionSpec
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION
from windlass.engine.rotary.scaling_fields import format_value

GEMMA = Family(
    architecture="GemmaForCausalLM",
    title="Gemma",
    model_type="gemma",
    rules=ConfigRules(
        sizes=Sizes(context=8192, hidden=3072, layers=28, heads=16, kv_heads=16, head_dim=256),
        tie_word_embeddings=True,
    ),
    biases=ATTENTION_BIASES,
    norm_offset=1.0,
    activation="gelu_pytorch_tanh",
    gelu_by_tanh=True,  # as "gelu" in its first files
    scaled_embeddings=True,
)

GEMMA2 = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    title="Gemma 2",
    model_type="gemma2",
    rules=replace(
        GEMMA.rules,
        layer_pattern=every_nth_full(2),
        sizes=Sizes(context=8192, hidden=2304, layers=26, heads=8, kv_heads=4, head_dim=256),
        sliding_window=4096,
    ),
    activation_key="hidden_activation",
    gelu_by_tanh=False,
    query_pre_attn_scalar=256.0,
    soft_caps=SoftCaps(attention=50.0, logits=30.0),
    norms=LayerNorms(
        mixer="input_layernorm",
        mixer_output="post_attention_layernorm",
        feed_forward="pre_feedforward_layernorm",
        feed_forward_output="post_feedforward_layernorm",
    ),
)

VAULT_GEMMA = replace(
    GEMMA2,
    architecture="VaultGemmaForCausalLM",
    title="VaultGemma",
    model_type="vaultgemma",
    norms=LayerNorms(feed_forward="pre_feedforward_layernorm"),
)


def _local_layers(facts: LayerFacts, interval: int) -> list[str]:
    """Every `interval`-th layer is global, or those that `layer_types` lists."""
    if not facts.windowed:
        # Without a window, local layers would still rotate by their own theta, but their list would be unknown.
        raise LoadError("config.json: sliding_window is null, and local layers need one: give its size")
    return facts.given or [SLIDING_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(facts.count)]


def _gemma3_layer_pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    kinds = _local_layers(facts, read_size(config, "sliding_window_pattern", 6))
    return kinds, kinds


GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    title="Gemma 3 (text)",
    model_type="gemma3_text",
    text_part="Text",
    rules=replace(
        GEMMA2.rules,
        layer_pattern=_gemma3_layer_pattern,
        sizes=Sizes(context=131_072, hidden=2304, layers=26, heads=8, kv_heads=4, head_dim=256),
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
    ),
    qk_norm="before",
    soft_caps=SoftCaps(),
)

_WIDTH, _KV_HEADS = "global_head_dim", "num_global_key_value_heads"
_PER_LAYER_KEYS = ("head_dim", "num_key_value_heads")
_UNIFIED = "gemma4_unified_text"  # Gemma 4 12B: no per-layer embeddings and no experts

_EXPERTS = MoERules(
    experts=128,
    top_k=8,
    counts=("num_experts",),
    top_k_keys=("top_k_experts",),
    names=MoENames(router="router.proj", stacks=ExpertStacks("experts.gate_up_proj", "experts.down_proj")),
)


def _rewrite_gemma4(config: Config) -> dict[str, Any]:
    """Put the sizes of global layers under one key each. transformers 5.24 writes them for each layer."""
    result = dict(config)
    if config.get("model_type") == _UNIFIED:
        result |= {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
        result = {"sliding_window": 1024, "max_position_embeddings": 262_144, **result}
    if config.get("use_bidirectional_attention") == "vision":  # text remains causal
        del result["use_bidirectional_attention"]
    result["rope_parameters"] = _drop_default_partial_rotary_factor(config)
    result.pop("partial_rotary_factor", None)
    if not read_flag(config, "attention_k_eq_v"):
        result.pop(_KV_HEADS, None)  # it has no meaning without attention_k_eq_v
    if "per_layer_config" not in config:
        return result
    by_layer = read_object(config, "per_layer_config") or {}
    del result["per_layer_config"]
    sizes: Any = next(iter(by_layer.values()), {})
    kinds = config.get("layer_types")
    global_layers = {
        str(i) for i, kind in enumerate(kinds if isinstance(kinds, list) else ()) if kind == FULL_ATTENTION
    }
    if any(one != sizes for one in by_layer.values()) or (by_layer and by_layer.keys() != global_layers):
        raise LoadError(
            "config.json: per_layer_config must have the same values for all layers of full attention in layer_types, and no "
            f"values for others, got {format_value(by_layer)}"
        )
    if not isinstance(sizes, Mapping) or not sizes.keys() <= set(_PER_LAYER_KEYS):
        raise LoadError(
            f"config.json: per_layer_config may set {' and '.join(_PER_LAYER_KEYS)}, got {format_value(sizes)}"
        )
    result[_WIDTH] = sizes.get("head_dim", config.get("head_dim", 256))
    result[_KV_HEADS] = sizes.get("num_key_value_heads", config.get("num_key_value_heads"))
    return result


def _drop_default_partial_rotary_factor(config: Config) -> Any:
    """`rope_parameters` without the share of rotated pairs for default frequencies, where it has no meaning."""
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return given
    return {
        kind: {key: value for key, value in one.items() if key != "partial_rotary_factor"}
        if isinstance(one, Mapping) and one.get("rope_type", "default") == "default"
        else one
        for kind, one in given.items()
    }


def _gemma4_layer_pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """The last layer is always global."""
    kinds = [*_local_layers(facts, 6)[:-1], FULL_ATTENTION]
    return kinds, kinds


def _refine_gemma4(spec: ModelSpec, config: Config) -> ModelSpec:
    """Add KV sharing, per-layer embeddings, parallel experts and the sizes of global layers."""
    count, shared = len(spec.layers), read_count(config, "num_kv_shared_layers", 0)
    kv_sources = _kv_source_layers([mixer.window for mixer in spec.attention.values()], shared)
    embedding_size = read_count(config, "hidden_size_per_layer_input", 256)
    doubled = read_flag(config, "use_double_wide_mlp")
    parallel_experts = None
    first = spec.layers[0].feed_forward
    assert isinstance(first, GatedMLPSpec)
    if read_flag(config, "enable_moe_block"):
        parallel_experts = ParallelExpertsSpec(read_experts(config, _EXPERTS, first.activation, False))

    def layer(index: int, one: LayerSpec) -> LayerSpec:
        assert isinstance(one.mixer, AttentionSpec)
        kv_source, mixer = kv_sources[index], _mixer(spec, config, one.mixer)
        wide = doubled and kv_source is not None
        return replace(
            one,
            mixer=replace(mixer, kv_source_layer=kv_source),
            feed_forward=replace(first, intermediate_size=first.intermediate_size * (2 if wide else 1)),
            parallel_experts=parallel_experts,
            per_layer_projection=PerLayerProjectionSpec(embedding_size, first.activation) if embedding_size else None,
            output_scale="layer_scalar",
        )

    layers = tuple(layer(index, one) for index, one in enumerate(spec.layers))
    unused = tuple(
        f"{spec.names.layer(index)}self_attn.{name}."  # stored nevertheless
        for index in range(count - shared, count)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
    embeddings = None
    if embedding_size:
        embeddings = PerLayerEmbeddingsSpec(embedding_size, read_size(config, "vocab_size_per_layer_input", 262_144))
        if embeddings.rows < spec.vocab_size:
            raise LoadError(
                f"config.json: vocab_size_per_layer_input {embeddings.rows} is less than vocab_size {spec.vocab_size}: "
                "each token needs a row"
            )
    return replace(
        spec,
        layers=layers,
        kv_groups=_kv_groups(layers),
        unused_tensors=spec.unused_tensors + unused,
        per_layer_embeddings=embeddings,
    )


def _kv_source_layers(windows: list[int | None], shared: int) -> list[int | None]:
    """KV source of each layer: None, or for the last `shared` layers the last earlier layer of the same kind."""
    first = len(windows) - shared
    if first < 0 or set(windows[first:]) - set(windows[:first]):
        raise LoadError(
            f"config.json: num_kv_shared_layers {shared} of {len(windows)} layers leaves no layer of a kind whose keys others use"
        )
    last = {window: index for index, window in enumerate(windows[:first])}
    return [None if index < first else last[window] for index, window in enumerate(windows)]


def _mixer(spec: ModelSpec, config: Config, plain: AttentionSpec) -> AttentionSpec:
    """Attention of a layer according to its kind, without KV sharing."""
    is_global, kv_heads = plain.window is None, plain.num_kv_heads
    if is_global:
        kv_heads = read_size(config, _KV_HEADS, kv_heads)
        if plain.num_heads % kv_heads:
            raise LoadError(
                f"config.json: num_attention_heads {plain.num_heads} is not a multiple of {_KV_HEADS} {kv_heads}"
            )
    assert plain.rotary_group is not None
    return replace(
        plain,
        num_kv_heads=kv_heads,
        head_dim=spec.rotary_groups[plain.rotary_group].base.head_dim,
        soft_cap=None,
        scale=1.0,  # the weights of the query and key norms contain it
        values_normed=True,
        keys_as_values=is_global and read_flag(config, "attention_k_eq_v"),
    )


def _kv_groups(layers: tuple[LayerSpec, ...]) -> tuple[KVGroupSpec, ...]:
    """One group per kind of layer, in the order of `AttentionSpec.kv_group`, without layers that share keys."""
    groups: dict[int, KVGroupSpec] = {}
    for index, layer in enumerate(layers):
        mixer = layer.mixer
        assert isinstance(mixer, AttentionSpec)
        if mixer.kv_source_layer is None:
            before = groups[mixer.kv_group].layers if mixer.kv_group in groups else ()
            group = KVGroupSpec((*before, index), mixer.num_kv_heads, mixer.head_dim, mixer.window)
            groups[mixer.kv_group] = group
    return tuple(groups[group] for group in sorted(groups))


GEMMA4 = replace(
    GEMMA3,
    architecture="Gemma4ForCausalLM",
    title="Gemma 4 (text)",
    other_names=("Gemma4UnifiedForCausalLM",),
    model_type="gemma4_text",
    other_model_types=(_UNIFIED,),
    rules=replace(
        GEMMA3.rules,
        layer_pattern=_gemma4_layer_pattern,
        sizes=Sizes(context=131_072, hidden=2304, layers=30, heads=8, kv_heads=4, head_dim=256),
        full_head_dim=512,
        full_head_dim_key=_WIDTH,
        eos_token_id=(1,),
        sliding_window=512,
        rope_parameters={
            FULL_ATTENTION: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
            SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 10_000.0},
        },
        rewrite=_rewrite_gemma4,
    ),
    norm_offset=0.0,
    query_pre_attn_scalar=None,
    refine=_refine_gemma4,
    extra_keys=_EXPERTS.keys.union(
        (_WIDTH, _KV_HEADS),
        "num_kv_shared_layers hidden_size_per_layer_input vocab_size_per_layer_input use_double_wide_mlp "
        "attention_k_eq_v enable_moe_block".split(),
    ),
)
