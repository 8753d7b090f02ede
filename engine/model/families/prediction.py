"""Layers in a model's files that predict a token further (multi-token prediction), as families have them.

Such a layer is given the model's hidden state of a token, behind the final norm, joined with the embedding of the token after
it, and tells the one after that; its embedding and head are the model's. What it makes, behind its own norm, takes the place of
the hidden state for a token further yet. As vLLM 0.33, SGLang 0.5.23 and llama.cpp (2026-10) have it.
"""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.feed_forward.experts_spec import ExpertsSpec
from windlass.engine.model.joined_input_spec import JoinedInputSpec
from windlass.engine.model.spec import LayerSpec, ModelSpec, OuterNames


def prediction(
    spec: ModelSpec, layer: LayerSpec, names: OuterNames, joined: JoinedInputSpec, own: tuple[str, ...]
) -> ModelSpec:
    """The specification of a prediction layer of a model with this one. layer: of the model's attending layers, its like.

    names: of the tensors around it. own: beginnings of the names of its tensors.
    """
    (group,) = spec.kv_groups
    return replace(
        spec,
        layers=(layer,),
        kv_groups=(replace(group, layers=(0,)),),
        state_group=None,
        tied_embeddings=False,
        names=names,
        unused=(),
        notices=(),
        joined=joined,
        own=own,
    )


def its_like(spec: ModelSpec) -> LayerSpec:
    """The last of the layers that attend, with experts where the model has any."""
    attending = [spec.layers[index] for index in spec.attention]
    of_experts = (layer for layer in reversed(spec.layers) if isinstance(layer.feed_forward, ExpertsSpec))
    last = next(of_experts, attending[-1])
    return replace(attending[-1], feed_forward=last.feed_forward)


def qwen_prediction(spec: ModelSpec) -> ModelSpec:
    """Of Qwen 3.5 and Qwen3-Next: a layer that attends, under names of its own beside the model's."""
    own = "mtp."
    joined = JoinedInputSpec(f"{own}pre_fc_norm_embedding", f"{own}pre_fc_norm_hidden", f"{own}fc")
    names = replace(spec.names, layers=f"{own}layers", final_norm=f"{own}norm")
    layer = its_like(spec)
    return prediction(spec, layer, names, joined, (f"{own}layers.0.", f"{own}norm.", f"{own}fc.", f"{own}pre_fc_norm_"))
