"""Granite 4 without recurrent layers (Micro, 1B, 350M): attention in every layer, a feed-forward named as a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.config_json.values import Config, read_size
from windlass.engine.model.families.experts_rules import read_count
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.softmax_experts import GRANITE_MOE_SHARED
from windlass.engine.model.feed_forward.gated_spec import GatedNames
from windlass.engine.rotary.fields import shown

_ATTENTION = ("attention", "full_attention")
_SHARED = GatedNames(gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear")


def _rewritten(config: Config) -> dict[str, Any]:
    """In the names of Granite's other models. Raises LoadError for one with recurrent layers."""
    result = dict(config)
    older, kinds = result.pop("layers_block_type", None), result.pop("layer_types", None)
    kinds = older if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != read_size(config, "num_hidden_layers"):
        raise LoadError("config.json: layer_types must be a list with one name per layer")
    if others := [kind for kind in kinds if kind not in _ATTENTION]:
        raise LoadError(
            f"config.json: layer_types has {shown(others[0])}: a hybrid of attention and recurrent layers, whose state is no "
            "cache of keys and values, is not supported: take a Granite 4 of attention alone (its size has no H in front)"
        )
    if config.get("position_embedding_type") != "rope":
        raise LoadError(
            f"config.json: position_embedding_type {shown(config.get('position_embedding_type'))} is not supported: this model "
            'needs "rope", as nothing else would tell positions apart'
        )
    if not _experts(config):
        result["intermediate_size"] = read_size(config, "shared_intermediate_size", 1024)
    return result


def _experts(config: Config) -> int:
    return read_count(config, "num_local_experts", 8)


def _dense_where_told(family: Family, config: Config) -> Family:
    if _experts(config):
        return family
    return replace(family, experts=None, feed_forward_names=_SHARED, reads=family.reads | family.own_keys)


GRANITE4 = replace(
    GRANITE_MOE_SHARED,
    architecture="GraniteMoeHybridForCausalLM",
    title="Granite 4 (Micro, 1B, 350M)",
    model_type="granitemoehybrid",
    rules=ConfigRules(max_position_embeddings=2048, rewrite=_rewritten),
    variant=_dense_where_told,
    reads=frozenset(
        "position_embedding_type mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand "
        "mamba_n_groups mamba_n_heads mamba_proj_bias time_step_limit normalization_function init_method".split()
    ),
)
