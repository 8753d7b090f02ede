"""What a GGUF file says of LFM2, in the names of config.json. It opens no file.

Layers without heads of keys are short convolutions. Feed-forwards are as wide as the file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.lfm2 import CONVOLUTION
from windlass.engine.model.gguf.carried_states import any_layer_has_bias, layer_types_of
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.model.gguf.tensor_names import GGUFTensorLocation
from windlass.engine.rotary.fields import format_value

_CONV_WIDTH = "shortconv.l_cache"
_LFM2_EXPERTS, _LFM2_USED, _LFM2_EXPERT_WIDTH = "expert_count", "expert_used_count", "expert_feed_forward_length"
_LFM2_DENSE, _LFM2_SCORES = "leading_dense_block_count", "expert_gating_func"
_LFM2_SIGMOID = 2  # llama.cpp's number

LFM2_KEYS = (_CONV_WIDTH,)
LFM2_MOE_KEYS = (_CONV_WIDTH, _LFM2_EXPERTS, _LFM2_USED, _LFM2_EXPERT_WIDTH, _LFM2_DENSE, _LFM2_SCORES)


def lfm2(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": layer_types_of(keys, config["num_hidden_layers"], CONVOLUTION),
        "conv_L_cache": keys.size(_CONV_WIDTH),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file does not say that weights are divided by their sum and not multiplied; so llama.cpp does it."""
    scores = keys.raw(_LFM2_SCORES)
    if scores not in (None, _LFM2_SIGMOID):
        raise LoadError(
            f"{keys.key(_LFM2_SCORES)} is {format_value(scores)}: experts of LFM2 are chosen by sigmoids ({_LFM2_SIGMOID})"
        )
    found = lfm2(keys, config)
    del found["block_auto_adjust_ff_dim"]
    return {
        **found,
        "num_experts": keys.size(_LFM2_EXPERTS),
        "num_experts_per_tok": keys.size(_LFM2_USED),
        "moe_intermediate_size": keys.size(_LFM2_EXPERT_WIDTH),
        "num_dense_layers": keys.count(_LFM2_DENSE),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def lfm2_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    """Whether projections and convolutions have biases."""
    return {"conv_bias": any_layer_has_bias(tensors, "shortconv.in_proj")}


def lfm2_moe_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    """And whether experts are chosen by a bias beside their scores."""
    return {**lfm2_by_tensors(tensors), "use_expert_bias": any_layer_has_bias(tensors, "exp_probs_b")}
