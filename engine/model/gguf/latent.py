"""What a GGUF file says of latent attention and the experts beside it (`deepseek2`), in the names of config.json.

Its attention is told twice: as it is computed, with one compressed key for all heads, and under keys that end in `_mla` as the
model has it. Older files have the latter alone, under the plain keys. It opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.latent_attention import DEEPSEEK_V2, DEEPSEEK_V3, YOUTU
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.rotary.fields import format_value

GATING = "expert_gating_func"
_SOFTMAX, SIGMOID = 1, 2
_PER_FACTOR = 0.1  # of YaRN's attention factor, by which the file's number is multiplied

GROUPED_EXPERTS_KEYS = (
    "leading_dense_block_count expert_count expert_used_count expert_feed_forward_length expert_shared_count "
    "expert_weights_scale expert_weights_norm expert_gating_func expert_group_count expert_group_used_count"
).split()
MLA_KEYS = (
    "attention.q_lora_rank attention.kv_lora_rank attention.key_length_mla attention.value_length_mla "
    "rope.scaling.yarn_log_multiplier"
).split() + GROUPED_EXPERTS_KEYS


def mla_family(keys: ArchitectureKeys) -> Family:
    """Files name one architecture for all of them: without experts it is Youtu's, and how experts are chosen tells the others."""
    if not keys.count("expert_count"):
        return YOUTU
    gating = keys.count(GATING) or _SOFTMAX
    if gating not in (_SOFTMAX, SIGMOID):
        raise LoadError(f"{keys.key(GATING)} is {format_value(gating)}: 1 (softmax) and 2 (sigmoid) are known")
    return DEEPSEEK_V3 if gating == SIGMOID else DEEPSEEK_V2


def mla_sizes(keys: ArchitectureKeys) -> dict[str, int | None]:
    """The widths of the parts of queries, keys and values."""
    compressed = keys.count("attention.key_length_mla") > 0
    head = keys.size("attention.key_length_mla" if compressed else "attention.key_length")
    rotated = keys.size("rope.dimension_count")
    if rotated >= head:
        raise LoadError(f"{keys.key('rope.dimension_count')} is {rotated}, not less than the {head} of a head's key")
    return {
        "q_lora_rank": keys.count("attention.q_lora_rank") or None,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": keys.size("attention.value_length_mla" if compressed else "attention.value_length"),
    }


def mla_experts(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of its experts; none where it has none."""
    if not keys.count("expert_count"):
        return {}
    found = grouped_experts(keys)
    if keys.count(GATING) != SIGMOID:
        found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return found


def grouped_experts(keys: ArchitectureKeys) -> dict[str, Any]:
    """The keys of experts in groups, of which the best are looked at, behind layers that have none."""
    return {
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(keys.raw("expert_weights_norm")),
        "first_k_dense_replace": keys.count("leading_dense_block_count"),
        "n_group": keys.count("expert_group_count") or 1,
        "topk_group": keys.count("expert_group_used_count") or 1,
    }


def mla_rope(rope: Mapping[str, Any], keys: ArchitectureKeys) -> dict[str, Any]:
    """Of YaRN: cosines are not scaled, scores are, by what the file's number makes of the factor."""
    multiplier = keys.number("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] != "yarn" or multiplier is None:
        return dict(rope)
    share = float(f"{multiplier / _PER_FACTOR:.7g}")
    return {**rope, "mscale": share, "mscale_all_dim": share}
