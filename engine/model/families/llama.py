"""Llama 1 to 3.3, the many models that declare themselves one, and the text part of Llama 4.

In Llama 4, layers that rotate attend within chunks of the context and norm queries and keys after the rotation. Every
fourth layer does neither, attends to everything, and scales its queries by their position (2501.19399).
"""

from __future__ import annotations

from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import (
    Config,
    ConfigRules,
    LayerFacts,
    Sizes,
    read_number,
    read_size,
)
from windlass.engine.model.families.family import ATTENTION_BIASES, LLAMA_BIASES, ConfigFlag, Family
from windlass.engine.model.families.moe_rules import MoERules, SharedExpert
from windlass.engine.model.feed_forward.mlp import GatedMLPNames
from windlass.engine.model.feed_forward.moe import ExpertStacks, MoENames, RouterSpec
from windlass.engine.model.norm import NormSpec
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION

LLAMA = Family(
    architecture="LlamaForCausalLM",
    title="Llama 1 to 3.3",
    model_type="llama",
    rules=ConfigRules(Sizes(context=2048)),
    biases=LLAMA_BIASES,
)

_PART = "feed_forward"


def _rewrite(config: Config) -> dict[str, Any]:
    """Use the key names of other families: a chunk is a window, `intermediate_size` is the width of layers without experts."""
    result = {
        key: value for key, value in config.items() if key not in ("attention_chunk_size", "intermediate_size_mlp")
    }
    if "attention_chunk_size" in config:
        result["sliding_window"] = config["attention_chunk_size"]
    if config.get("no_rope_layers") == []:
        del result["no_rope_layers"]
    if isinstance(kinds := config.get("layer_types"), list):
        result["layer_types"] = [SLIDING_ATTENTION if kind == "chunked_attention" else kind for kind in kinds]
    result["moe_intermediate_size"] = config.get("intermediate_size", 8192)
    result["intermediate_size"] = config.get("intermediate_size_mlp", 16_384)
    return result


def _chunks_rotate(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """Layers that rotate attend within a chunk, the others to everything, or as `layer_types` lists them."""
    full = [FULL_ATTENTION] * facts.count
    own = [SLIDING_ATTENTION if rotates else FULL_ATTENTION for rotates in facts.rotates]
    return (facts.given or own) if facts.windowed else full, full


def _is_dense(config: Config, index: int) -> bool:
    """Every `interleave_moe_layer_step`-th layer has experts, or those that `moe_layers` lists."""
    named = config.get("moe_layers")
    if named is None:
        return (index + 1) % read_size(config, "interleave_moe_layer_step", 1) != 0
    if not isinstance(named, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in named):
        raise LoadError("config.json: moe_layers must be a list of the numbers of layers")
    return index not in named


def _temperature(config: Config) -> tuple[float, int] | None:
    if "attn_temperature_tuning" in config and not config["attn_temperature_tuning"]:  # older files have a number there
        return None
    return read_number(config, "attn_scale") or 0.1, read_size(config, "floor_scale", 8192)


LLAMA4 = Family(
    architecture="Llama4ForCausalLM",
    title="Llama 4 (text)",
    model_type="llama4_text",
    rules=ConfigRules(
        layer_pattern=_chunks_rotate,
        sizes=Sizes(context=131_072, hidden=5120, layers=48, heads=40, kv_heads=8, head_dim=128),
        rms_norm_eps=1e-5,
        sliding_window=8192,
        rope_theta=500_000.0,
        no_rope_layer_interval=4,
        rewrite=_rewrite,
    ),
    biases=ATTENTION_BIASES,
    qk_norm="after",
    qk_norm_form=NormSpec(weight=False),
    qk_norm_flag=ConfigFlag("use_qk_norm", default=True),
    norms_rotated=True,
    interleaved=True,
    chunked=True,
    unrotated_temperature=_temperature,
    feed_forward_names=GatedMLPNames.under(_PART),
    extra_keys=frozenset({"attn_temperature_tuning", "attn_scale", "floor_scale", "for_llm_compressor"}),
    experts=MoERules(
        experts=16,
        top_k=1,
        counts=("num_local_experts",),
        router=RouterSpec(scores="sigmoid", normalized=False),
        scaled_inputs=True,
        shared=SharedExpert(),
        dense=_is_dense,
        names=MoENames(
            router=f"{_PART}.router",
            shared=GatedMLPNames.under(f"{_PART}.shared_expert"),
            stacks=ExpertStacks(f"{_PART}.experts.gate_up_proj", f"{_PART}.experts.down_proj", transposed=True),
        ),
        more_keys=frozenset({"moe_layers", "interleave_moe_layer_step"}),
    ),
)
