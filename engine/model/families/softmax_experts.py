"""Families of experts whose routers are a softmax: Mixtral, Qwen 2 and 3 MoE, OLMoE, Granite MoE, Phi-MoE, HunYuan MoE, gpt-oss.

A softmax over the chosen alone (Granite, gpt-oss) is the one over all, divided by the sum of the chosen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.patterns import LayerFacts, every_nth_full, sliding_window_layers
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.config_json.values import Config, read_flag, read_size
from windlass.engine.model.families.experts_rules import MoERules, SharedExpert, every_nth_layer
from windlass.engine.model.families.family import ATTENTION_BIAS, ConfigFlag, Family, Multipliers
from windlass.engine.model.families.hunyuan import HUNYUAN
from windlass.engine.model.families.llama_like import GRANITE
from windlass.engine.model.families.qwen import QWEN2, QWEN3
from windlass.engine.model.feed_forward.experts_spec import ExpertStacks, MoENames, RouterSpec
from windlass.engine.model.feed_forward.gated_spec import GatedMLPNames
from windlass.engine.model.norm_spec import NormSpec
from windlass.engine.model.spec import LayerNorms
from windlass.engine.rotary.fields import format_value
from windlass.engine.rotary.scaling import FULL_ATTENTION, SLIDING_ATTENTION

UNNORMALIZED_ROUTER = RouterSpec(normalized=False)
MIXTRAL_NAMES = MoENames(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts", expert=GatedMLPNames("w1", "w3", down="w2")
)

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    rules=ConfigRules(
        layer_pattern=sliding_window_layers,
        max_position_embeddings=131_072,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    ),
    experts=MoERules(experts=8, top_k=2, width_keys=("intermediate_size",), names=MIXTRAL_NAMES),
)


def _alternate_windows(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """With `use_sliding_window`, every other layer below `max_window_layers` sees a window; or as `layer_types` says."""
    first = 0 if config.get("max_window_layers") == 0 else read_size(config, "max_window_layers", 28)
    windows = read_flag(config, "use_sliding_window")
    own = [SLIDING_ATTENTION if i % 2 == 0 and i < first else FULL_ATTENTION for i in range(facts.count)]
    full = [FULL_ATTENTION] * facts.count
    return (facts.given or own) if windows else full, full


def _windows_everywhere(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """With `use_sliding_window`, every layer sees a window."""
    full = [FULL_ATTENTION] * facts.count
    return ([SLIDING_ATTENTION] * facts.count if read_flag(config, "use_sliding_window") else full), full


QWEN2_MOE = replace(
    QWEN2,
    architecture="Qwen2MoeForCausalLM",
    title="Qwen 1.5 and 2 MoE",
    model_type="qwen2_moe",
    rules=ConfigRules(
        layer_pattern=_alternate_windows,
        max_position_embeddings=32_768,
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        sliding_window=4096,
    ),
    qkv_bias=ConfigFlag("qkv_bias", default=True),
    extra_keys=frozenset({"qkv_bias"}),
    experts=MoERules(
        experts=60,
        top_k=4,
        width=1408,
        router=UNNORMALIZED_ROUTER,
        normalized_key="norm_topk_prob",
        shared=SharedExpert(width_key="shared_expert_intermediate_size", default=5632),
        dense=every_nth_layer,
        names=MoENames(
            shared=GatedMLPNames(
                "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", down="mlp.shared_expert.down_proj"
            ),
            shared_gate="mlp.shared_expert_gate",
        ),
        more_keys=frozenset({"decoder_sparse_step", "mlp_only_layers"}),
    ),
)


def _as_in_qwen3_vl(family: Family, config: Config) -> Family:
    """Text parts of Qwen 3 VL have all experts of a layer in one tensor, and their weights always add up to 1."""
    if config.get("model_type") != "qwen3_vl_moe_text" or family.experts is None:
        return family
    stacks = ExpertStacks("mlp.experts.gate_up_proj", "mlp.experts.down_proj", transposed=True)
    experts = replace(
        family.experts,
        experts=60,
        top_k=4,
        width=1408,
        router=RouterSpec(),
        normalized_key=None,
        names=MoENames(stacks=stacks),
        more_keys=family.experts.more_keys | {"norm_topk_prob"},
    )
    return replace(family, experts=experts)


QWEN3_MOE = replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    title="Qwen 3 MoE",
    model_type="qwen3_moe",
    other_model_types=("qwen3_vl_moe_text",),
    variant=_as_in_qwen3_vl,
    rules=ConfigRules(
        layer_pattern=_windows_everywhere,
        max_position_embeddings=32_768,
        hidden_size=2048,
        num_hidden_layers=24,
        num_key_value_heads=4,
        sliding_window=4096,
    ),
    experts=MoERules(
        experts=128,
        top_k=8,
        width=768,
        router=UNNORMALIZED_ROUTER,
        normalized_key="norm_topk_prob",
        dense=every_nth_layer,
        more_keys=frozenset({"decoder_sparse_step", "mlp_only_layers"}),
    ),
)

OLMOE = Family(
    architecture="OlmoeForCausalLM",
    title="OLMoE",
    model_type="olmoe",
    rules=ConfigRules(
        max_position_embeddings=4096,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        rms_norm_eps=1e-5,
        eos_token_id=(50_279,),
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    qk_norm="all heads",
    experts=MoERules(
        experts=64,
        top_k=8,
        width_keys=("intermediate_size",),
        router=UNNORMALIZED_ROUTER,
        normalized_key="norm_topk_prob",
    ),
)

_GRANITE_NAMES = MoENames(
    router="block_sparse_moe.router.layer",
    stacks=ExpertStacks("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)
GRANITE_MOE = replace(
    GRANITE,
    architecture="GraniteMoeForCausalLM",
    title="Granite MoE",
    model_type="granitemoe",
    rules=ConfigRules(max_position_embeddings=2048),
    feed_forward_bias=False,
    multipliers=Multipliers(
        embedding="embedding_multiplier",
        residual="residual_multiplier",
        attention="attention_multiplier",
        logits_divided_by="logits_scaling",
    ),
    experts=MoERules(experts=8, top_k=2, width_keys=("intermediate_size",), names=_GRANITE_NAMES),
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    architecture="GraniteMoeSharedForCausalLM",
    title="Granite MoE with a shared expert",
    model_type="granitemoeshared",
    experts=MoERules(
        experts=8,
        top_k=2,
        width_keys=("intermediate_size",),
        shared=SharedExpert(width_key="shared_intermediate_size", default=0),
        names=replace(
            _GRANITE_NAMES,
            shared=GatedMLPNames(gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear"),
        ),
    ),
)

PHI_MOE = Family(
    architecture="PhimoeForCausalLM",
    other_names=("PhiMoEForCausalLM",),
    title="Phi 3.5 MoE",
    model_type="phimoe",
    rules=ConfigRules(
        layer_pattern=sliding_window_layers,
        max_position_embeddings=131_072,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    head_bias=ConfigFlag("lm_head_bias"),
    norms=LayerNorms(form=NormSpec(centered=True, bias=True)),
    extra_keys=frozenset({"lm_head_bias"}),
    experts=MoERules(
        experts=16,
        top_k=2,
        width_keys=("intermediate_size",),
        router=RouterSpec(2, "sparsemixer", normalized=False, jitter=0.01),
        jitter_key="router_jitter_noise",
        names=MIXTRAL_NAMES,
    ),
)


def _uniform_values(config: Config) -> dict[str, Any]:
    """Numbers of experts and their widths are lists with an entry for each layer; all layers have to be alike."""
    result = dict(config)
    for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        found = config.get(key)
        if not isinstance(found, list):
            continue
        if not found or any(one != found[0] for one in found):
            raise LoadError(
                f"config.json: {key} {format_value(found)} differs from layer to layer, which is not supported"
            )
        result[key] = found[0]
    return result


HUNYUAN_MOE = replace(
    HUNYUAN,
    architecture="HunYuanMoEV1ForCausalLM",
    title="HunYuan V1 MoE",
    model_type="hunyuan_v1_moe",
    rules=replace(HUNYUAN.rules, rewrite=_uniform_values),
    experts=MoERules(
        experts=1,
        top_k=1,
        counts=("num_experts",),
        top_k_keys=("moe_topk", "num_experts_per_tok"),
        width_keys=("moe_intermediate_size", "intermediate_size"),
        shared=SharedExpert(count_key="num_shared_expert"),
        names=MoENames(
            router="mlp.gate.wg",
            shared=GatedMLPNames("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj", down="mlp.shared_mlp.down_proj"),
        ),
        more_keys=frozenset({"use_mixed_mlp_moe"}),
    ),
)

_EXPERTS = "mlp.experts"
GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    title="gpt-oss",
    model_type="gpt_oss",
    rules=ConfigRules(
        layer_pattern=every_nth_full(2),
        max_position_embeddings=131_072,
        hidden_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        sliding_window=128,
        rope_theta=150_000.0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    qkv_bias=ConfigFlag("attention_bias", default=True),
    out_bias=ConfigFlag("attention_bias", default=True),
    sinks=True,
    experts=MoERules(
        experts=128,
        top_k=4,
        width_keys=("intermediate_size",),
        top_k_keys=("num_experts_per_tok", "experts_per_token"),
        bias=True,
        clamp_keys=("swiglu_alpha", "swiglu_limit"),
        more_keys=frozenset({"initial_context_length"}),  # YaRN's original length once more
        names=MoENames(
            router="mlp.router",
            router_bias=True,
            stacks=ExpertStacks(
                f"{_EXPERTS}.gate_up_proj",
                f"{_EXPERTS}.down_proj",
                f"{_EXPERTS}.gate_up_proj_bias",
                f"{_EXPERTS}.down_proj_bias",
                transposed=True,
                alternating=True,
            ),
        ),
    ),
)
