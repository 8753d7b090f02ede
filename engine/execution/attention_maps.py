"""Attention maps: softmax weights and scores of one layer for one text.

For introspection only; serving never computes such a matrix. `SingleSequenceRunner` runs the forward pass, and a recording
backend copies the layer's rotated queries and keys on their way to the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from windlass.engine.errors import RequestError
from windlass.engine.execution.single_sequence import SingleSequenceRunner
from windlass.engine.interface.introspection import MAX_ATTENTION_TOKENS, AttentionQuery, AttentionSnapshot
from windlass.engine.model.decoder import RecurrentMixer
from windlass.engine.model.mixers.attention import Attention
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_policy import RotaryPlan, RotaryStage, joint_fingerprint
from windlass.kernels import Backend


class _RecordingBackend:
    """A backend that copies rotated queries and keys, and delegates everything else."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.queries: list[Tensor] = []  # [t, Hq, D] of each chunk
        self.keys: list[Tensor] = []  # [t, Hkv, D]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def rotate_and_append(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> None:
        self._backend.rotate_and_append(q, k, v, cos, sin, *others)
        count = k.shape[0]
        if cos.shape[-1] and k.shape[1]:
            k = self._backend.rotate_queries(k.contiguous(), torch.arange(count, device=k.device), cos, sin)[count:]
        self.queries.append(q.to(torch.float32, copy=True))
        self.keys.append(k.to(torch.float32, copy=True))


def attention_weights(
    runner: SingleSequenceRunner, token_ids: Sequence[int], layer: int, scaling: RopeScaling | None = None
) -> Tensor:
    """Softmax weights of a layer for one text, float32 [Hq, T, T] on the CPU: row i holds the weights of token i.

    scaling: None is the model's own; frequencies are those of the entire text. Raises RequestError for a layer that does not
    exist, or that has no plain softmax attention.
    """
    return _attention_matrices(runner, token_ids, layer, runner.plan(len(token_ids), scaling, "frozen"), slice(None))[0]


def snapshot_attention(runner: SingleSequenceRunner, question: AttentionQuery, plan: RotaryPlan) -> AttentionSnapshot:
    """Weights of one head, and its scores before the softmax, under a rotary plan. Raises RequestError."""
    tokens, head = len(question.token_ids), question.head
    if not 2 <= tokens <= MAX_ATTENTION_TOKENS:
        raise RequestError(
            f"attention maps are available for texts of 2 to {MAX_ATTENTION_TOKENS} tokens, got {tokens}",
            "prompt",
            "prompt_too_long",
        )
    mixer = _plain_mixer(runner, question.layer, plan.stage(tokens))
    heads = mixer.spec.num_heads
    if not 0 <= head < heads:
        raise RequestError(f"head {head}: layer {question.layer} has heads 0 to {heads - 1}", "head")
    weights, scores = _attention_matrices(runner, question.token_ids, question.layer, plan, slice(head, head + 1))
    return AttentionSnapshot(
        num_tokens=tokens,
        num_layers=len(runner.decoder.layers),
        num_heads=heads,
        weights=weights[0].contiguous().numpy().tobytes(),
        scores=scores[0].contiguous().numpy().tobytes(),
        fingerprint=joint_fingerprint(plan.stage(tokens).specs),
    )


def _plain_mixer(runner: SingleSequenceRunner, layer: int, stage: RotaryStage) -> Attention:
    """The attention of a layer. Raises RequestError if its scores are not products of rotated queries and keys."""
    layers = runner.decoder.layers
    if not 0 <= layer < len(layers):
        raise RequestError(f"layer {layer}: this model has layers 0 to {len(layers) - 1}", "layer")
    mixer = layers[layer].mixer
    changes_distances = any(not spec.distances.is_plain for spec in stage.specs)
    if mixer is None or isinstance(mixer, RecurrentMixer):
        attending = ", ".join(str(i) for i, other in enumerate(layers) if isinstance(other.mixer, Attention))
        why = "is a feed-forward alone" if mixer is None else "carries a state"
        raise RequestError(f"layer {layer} attends to nothing, as it {why}: ask for one of {attending}", "layer")
    if not isinstance(mixer, Attention) or mixer.spec.qk_norm == "after" or changes_distances:
        raise RequestError(f"the queries and keys of layer {layer} are not those of plain attention", "layer")
    return mixer


def _attention_matrices(
    runner: SingleSequenceRunner, token_ids: Sequence[int], layer: int, plan: RotaryPlan, heads: slice
) -> tuple[Tensor, Tensor]:
    """Weights and scores of the heads of a layer, [H, T, T] each."""
    stage, layers = plan.stage(len(token_ids)), runner.decoder.layers
    mixers = {layer: _plain_mixer(runner, layer, stage)}
    owner = layers[layer].kv_layer
    mixers[owner] = _plain_mixer(runner, owner, stage)
    recorders = {each: _RecordingBackend(runner.decoder.backend) for each in mixers}
    for each, mixer in mixers.items():
        layers[each].mixer = mixer.with_backend(cast(Backend, recorders[each]))
    try:
        runner.hidden(token_ids, plan)
    finally:
        for each, mixer in mixers.items():
            layers[each].mixer = mixer
    return _softmax(torch.cat(recorders[layer].queries), torch.cat(recorders[owner].keys), mixers[layer], heads)


def _softmax(q: Tensor, k: Tensor, mixer: Attention, heads: slice) -> tuple[Tensor, Tensor]:
    """Weights and scores [H, T, T], as `AttentionCall` defines them: scale, soft cap, mask. q: [T, Hq, D], k: [T, Hkv, D]."""
    spec = mixer.spec
    k = k.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)[:, heads]
    scores = torch.einsum("ihd,jhd->hij", q[:, heads], k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    index = torch.arange(q.shape[0], device=q.device)
    distance = index[:, None] - index[None]  # [T, T]
    hidden = distance < 0
    if spec.window is not None:
        hidden |= distance >= spec.window
    scores = scores.masked_fill(hidden, -torch.inf)
    with_sinks = scores
    if mixer.weights.sinks is not None:
        sinks = mixer.weights.sinks[heads, None, None].expand(-1, q.shape[0], 1)
        with_sinks = torch.cat((scores, sinks), dim=-1)
    return with_sinks.softmax(-1)[..., : q.shape[0]].cpu(), scores.cpu()
