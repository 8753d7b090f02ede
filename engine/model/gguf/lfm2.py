"""What a GGUF file says of LFM2, in the names of config.json. It opens no file.

Layers without heads of keys are short convolutions. Feed-forwards are as wide as the file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.lfm2 import CONVOLUTION
from windlass.engine.model.gguf.carried_states import kinds, some_bias
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.model.gguf.tensor_names import PlacedTensor
from windlass.engine.rotary.fields import shown

_WIDTH = "shortconv.l_cache"
_EXPERTS, _USED, _EXPERT_WIDTH = "expert_count", "expert_used_count", "expert_feed_forward_length"
_DENSE, _SCORES = "leading_dense_block_count", "expert_gating_func"
_SIGMOID = 2  # llama.cpp's number

LFM2_KEYS = (_WIDTH,)
LFM2_MOE_KEYS = (_WIDTH, _EXPERTS, _USED, _EXPERT_WIDTH, _DENSE, _SCORES)


def lfm2(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": kinds(keys, config["num_hidden_layers"], CONVOLUTION),
        "conv_L_cache": keys.size(_WIDTH),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file does not say that weights are divided by their sum and not multiplied; so llama.cpp does it."""
    scores = keys.raw(_SCORES)
    if scores not in (None, _SIGMOID):
        raise LoadError(f"{keys.key(_SCORES)} is {shown(scores)}: experts of LFM2 are chosen by sigmoids ({_SIGMOID})")
    found = lfm2(keys, config)
    del found["block_auto_adjust_ff_dim"]
    return {
        **found,
        "num_experts": keys.size(_EXPERTS),
        "num_experts_per_tok": keys.size(_USED),
        "moe_intermediate_size": keys.size(_EXPERT_WIDTH),
        "num_dense_layers": keys.count(_DENSE),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def lfm2_by_tensors(tensors: Mapping[str, PlacedTensor]) -> dict[str, Any]:
    """Whether projections and convolutions have biases."""
    return {"conv_bias": some_bias(tensors, "shortconv.in_proj")}


def lfm2_moe_by_tensors(tensors: Mapping[str, PlacedTensor]) -> dict[str, Any]:
    """And whether experts are chosen by a bias beside their scores."""
    return {**lfm2_by_tensors(tensors), "use_expert_bias": some_bias(tensors, "exp_probs_b")}
