"""gpt-oss: experts, attention sinks, and a window in every other layer."""

from __future__ import annotations

from windlass.engine.model.config_json.config_rules import ConfigRules, Sizes, every_nth_full
from windlass.engine.model.families.family import Biases, ConfigFlag, Family
from windlass.engine.model.families.moe_rules import MoERules
from windlass.engine.model.feed_forward.moe import ExpertStacks, MoENames

_BIAS = ConfigFlag("attention_bias", default=True)
_EXPERTS = "mlp.experts"

GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    title="gpt-oss",
    model_type="gpt_oss",
    rules=ConfigRules(
        layer_pattern=every_nth_full(2),
        sizes=Sizes(context=131_072, hidden=2880, layers=36, heads=64, kv_heads=8, head_dim=64),
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
    biases=Biases(_BIAS, _BIAS),
    sinks=True,
    experts=MoERules(
        experts=128,
        top_k=4,
        width_keys=("intermediate_size",),
        top_k_keys=("num_experts_per_tok", "experts_per_token"),
        bias=True,
        clamp_keys=("swiglu_alpha", "swiglu_limit"),
        more_keys=frozenset({"initial_context_length"}),  # the same as YaRN's original length
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
