"""Qwen 2 (biases of q, k and v), Qwen 3 (a norm per head before the rotation), their MoE models, Qwen3-Next and Qwen 3.5.

Most layers of Qwen3-Next and Qwen 3.5 are Gated DeltaNet; the others attend, by gated queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config, ConfigRules, LayerFacts, Sizes, read_flag, read_size
from windlass.engine.model.families.family import ATTENTION_BIASES, Biases, ConfigFlag, Family
from windlass.engine.model.families.moe_rules import UNNORMALIZED_ROUTER, MoERules, SharedExpert, every_nth_layer
from windlass.engine.model.families.mtp import qwen_mtp
from windlass.engine.model.families.recurrent_layers import (
    check_convolution_width,
    check_layer_types,
    with_recurrent_layers,
)
from windlass.engine.model.feed_forward.mlp import GatedMLPNames
from windlass.engine.model.feed_forward.moe import ExpertStacks, MoENames, RouterSpec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.gated_delta_net import GatedDeltaNetNames, GatedDeltaNetSpec
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION


def _windows_above(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """With `use_sliding_window`, layers from `max_window_layers` on have a window, or those that `layer_types` lists."""
    first = 0 if config.get("max_window_layers") == 0 else read_size(config, "max_window_layers", 28)
    windows = read_flag(config, "use_sliding_window")
    kinds = facts.given or [SLIDING_ATTENTION if windows and i >= first else FULL_ATTENTION for i in range(facts.count)]
    return (kinds if windows else [FULL_ATTENTION] * facts.count), kinds


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    title="Qwen 2 and 2.5",
    model_type="qwen2",
    other_model_types=("qwen2_vl_text", "qwen2_5_vl_text"),  # positions have three parts, equal for text
    rules=ConfigRules(
        layer_pattern=_windows_above,
        sizes=Sizes(context=32_768, kv_heads=32),
        sliding_window=4096,
    ),
    biases=Biases(qkv=True),
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    title="Qwen 3",
    model_type="qwen3",
    other_model_types=("qwen3_vl_text",),
    rules=replace(QWEN2.rules, sizes=Sizes(context=32_768, kv_heads=32, head_dim=128)),
    biases=ATTENTION_BIASES,
    qk_norm="before",
)


def _alternate_windows(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """With `use_sliding_window`, every other layer below `max_window_layers` has a window, or those that `layer_types`
    lists."""
    first = 0 if config.get("max_window_layers") == 0 else read_size(config, "max_window_layers", 28)
    windows = read_flag(config, "use_sliding_window")
    own = [SLIDING_ATTENTION if i % 2 == 0 and i < first else FULL_ATTENTION for i in range(facts.count)]
    full = [FULL_ATTENTION] * facts.count
    return (facts.given or own) if windows else full, full


def _windows_everywhere(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """With `use_sliding_window`, every layer has a window."""
    full = [FULL_ATTENTION] * facts.count
    return ([SLIDING_ATTENTION] * facts.count if read_flag(config, "use_sliding_window") else full), full


_SHARED_EXPERT_NAMES = MoENames(shared=GatedMLPNames.under("mlp.shared_expert"), shared_gate="mlp.shared_expert_gate")

_EXPERTS = MoERules(
    experts=60,
    top_k=4,
    width=1408,
    router=UNNORMALIZED_ROUTER,
    normalized_key="norm_topk_prob",
    dense=every_nth_layer,
    more_keys=frozenset({"decoder_sparse_step", "mlp_only_layers"}),
)

QWEN2_MOE = replace(
    QWEN2,
    architecture="Qwen2MoeForCausalLM",
    title="Qwen 1.5 and 2 MoE",
    model_type="qwen2_moe",
    rules=replace(
        QWEN2.rules,
        layer_pattern=_alternate_windows,
        sizes=Sizes(context=32_768, hidden=2048, layers=24, heads=16, kv_heads=16),
    ),
    biases=Biases(qkv=ConfigFlag("qkv_bias", default=True)),
    extra_keys=frozenset({"qkv_bias"}),
    experts=replace(
        _EXPERTS,
        shared=SharedExpert(width_key="shared_expert_intermediate_size", default=5632),
        names=_SHARED_EXPERT_NAMES,
    ),
)


def _qwen3_vl_variant(family: Family, config: Config) -> Family:
    """Text parts of Qwen 3 VL have all experts of a layer in one tensor, and the experts' weights always add up to 1."""
    if config.get("model_type") != "qwen3_vl_moe_text":
        return family
    stacks = ExpertStacks("mlp.experts.gate_up_proj", "mlp.experts.down_proj", transposed=True)
    experts = replace(
        _EXPERTS,
        router=RouterSpec(),
        normalized_key=None,
        names=MoENames(stacks=stacks),
        more_keys=_EXPERTS.more_keys | {"norm_topk_prob"},
    )
    return replace(family, experts=experts)


QWEN3_MOE = replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    title="Qwen 3 MoE",
    model_type="qwen3_moe",
    other_model_types=("qwen3_vl_moe_text",),
    variant=_qwen3_vl_variant,
    rules=replace(
        QWEN2.rules,
        layer_pattern=_windows_everywhere,
        sizes=Sizes(context=32_768, hidden=2048, layers=24, kv_heads=4),
    ),
    experts=replace(_EXPERTS, experts=128, top_k=8, width=768),
)

LINEAR_ATTENTION = "linear_attention"

_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

# Fixed values, and keys of parts that are not loaded.
_FIXED_VALUES: dict[str, tuple[object, ...] | None] = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "hidden_act": ("silu", "swish"),
    "mamba_ssm_dtype": None,  # states are float32
    "mtp_num_hidden_layers": None,
    "mtp_use_dedicated_embeddings": None,
}


def _kinds(config: Config, count: int, given: list[str] | None) -> list[str]:
    """Attention in every `full_attention_interval`-th layer, by default the fourth, or as `layer_types` lists them."""
    interval = read_size(config, "full_attention_interval", 4)
    return given or [FULL_ATTENTION if (i + 1) % interval == 0 else LINEAR_ATTENTION for i in range(count)]


def _layer_pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """Attention layers attend to everything and rotate alike."""
    kinds = _kinds(config, facts.count, facts.given)
    return check_layer_types(kinds, LINEAR_ATTENTION), [FULL_ATTENTION] * facts.count


def _refine(names: GatedDeltaNetNames) -> Callable[[ModelSpec, Config], ModelSpec]:
    """Put the Gated DeltaNet layers in place, gate the queries of the others, and add the MTP layer."""

    def refine(spec: ModelSpec, config: Config) -> ModelSpec:
        layers = []
        for layer in spec.layers:
            assert isinstance(layer.mixer, AttentionSpec)
            layers.append(replace(layer, mixer=replace(layer.mixer, gated_queries=True)))
        kinds = _kinds(config, len(layers), config.get("layer_types"))
        spec = with_recurrent_layers(replace(spec, layers=tuple(layers)), kinds, _delta(config, names))
        return replace(spec, mtp=_mtp(spec, config))

    return refine


def _mtp(spec: ModelSpec, config: Config) -> ModelSpec | None:
    """The MTP layer; None if config.json declares none, or one with its own embedding."""
    if config.get("mtp_num_hidden_layers") == 0 or config.get("mtp_use_dedicated_embeddings"):
        return None
    return qwen_mtp(spec)


def _delta(config: Config, names: GatedDeltaNetNames) -> GatedDeltaNetSpec:
    key_heads, heads, key_dim, value_dim, width = (read_size(config, key, value) for key, value in _SIZES.items())
    if heads % key_heads:
        raise LoadError(
            f"config.json: linear_num_value_heads {heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    check_convolution_width("linear_conv_kernel_dim", width)
    return GatedDeltaNetSpec(key_heads, heads, key_dim, value_dim, width, names)


QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    title="Qwen 3.5",
    model_type="qwen3_5_text",
    text_part="Text",
    rules=ConfigRules(
        layer_pattern=_layer_pattern,
        sizes=Sizes(context=32_768, heads=16, kv_heads=4, head_dim=256),
        partial_rotary_factor=0.25,
        other_layers=(LINEAR_ATTENTION,),
    ),
    biases=ATTENTION_BIASES,
    qk_norm="before",
    norm_offset=1.0,
    fixed_values=_FIXED_VALUES,
    refine=_refine(GatedDeltaNetNames()),
    extra_keys=frozenset((*_SIZES, "full_attention_interval", "mlp_only_layers")),  # the last is an empty list
    unused_tensors=("mtp.",),
)

_GATED_DELTA_EXPERTS = MoERules(
    experts=256,
    top_k=8,
    width=512,
    shared=SharedExpert(width_key="shared_expert_intermediate_size", default=512),
    names=replace(_SHARED_EXPERT_NAMES, stacks=ExpertStacks("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    title="Qwen 3.5 MoE",
    model_type="qwen3_5_moe_text",
    rules=replace(
        QWEN3_5.rules, sizes=Sizes(context=32_768, hidden=2048, layers=40, heads=16, kv_heads=2, head_dim=256)
    ),
    experts=replace(_GATED_DELTA_EXPERTS, more_keys=frozenset({"mlp_only_layers", "norm_topk_prob"})),
)

QWEN3_NEXT = replace(
    QWEN3_5,
    architecture="Qwen3NextForCausalLM",
    title="Qwen3-Next",
    model_type="qwen3_next",
    text_part="",
    rules=replace(
        QWEN3_5.rules, sizes=Sizes(context=32_768, hidden=2048, layers=48, heads=16, kv_heads=2, head_dim=256)
    ),
    refine=_refine(GatedDeltaNetNames(qkvz="linear_attn.in_proj_qkvz", ba="linear_attn.in_proj_ba")),
    experts=replace(
        _GATED_DELTA_EXPERTS,
        experts=512,
        top_k=10,
        normalized_key="norm_topk_prob",
        dense=every_nth_layer,
        more_keys=_EXPERTS.more_keys,
    ),
)
