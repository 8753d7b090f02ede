"""What one layer of a model attends to, as a matrix. For looking at; serving never makes such a matrix.

The model runs as it does for scores, and one layer's queries and keys are seen on their way to the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from windlass.engine.errors import RequestError
from windlass.engine.evaluation.scoring import Scorer
from windlass.engine.model.mixers.attention import Attention
from windlass.engine.rotary.scaling import RopeScaling
from windlass.kernels import Backend


class _Witness:
    """A backend that keeps copies of the rotated queries and keys that pass through it; all else is done by the one behind it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.queries: list[Tensor] = []  # [t, Hq, D] of each chunk
        self.keys: list[Tensor] = []  # [t, Hkv, D]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def rotate_and_append(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> None:
        self._backend.rotate_and_append(q, k, v, cos, sin, *others)
        count = k.shape[0]
        if cos.shape[-1]:
            k = self._backend.turn_queries(k.contiguous(), torch.arange(count), cos, sin)[count:]
        self.queries.append(q.to(torch.float32, copy=True))
        self.keys.append(k.to(torch.float32, copy=True))


def attention_weights(
    scorer: Scorer, token_ids: Sequence[int], layer: int, scaling: RopeScaling | None = None
) -> Tensor:
    """Softmax weights of a layer for one text, float32 [Hq, T, T] on the CPU: row i is what token i attends to.

    scaling: None is the model's own; frequencies are those of the whole text. Raises RequestError for a layer that there is not,
    or that does not attend with queries and keys of plain softmax.
    """
    layers = scorer.decoder.layers
    if not 0 <= layer < len(layers):
        raise RequestError(f"layer {layer}: this model has layers 0 to {len(layers) - 1}", "layer")
    mixer = layers[layer].mixer
    plan = scorer.plan(len(token_ids), scaling, "frozen")
    moved = any(not spec.distances.is_plain for spec in plan.stage(len(token_ids)).specs)
    if not isinstance(mixer, Attention) or mixer.spec.qk_norm == "after" or moved:
        raise RequestError(f"the queries and keys of layer {layer} are not those of plain attention", "layer")
    watch = _Witness(scorer.decoder.backend)
    layers[layer].mixer = mixer.with_backend(cast(Backend, watch))
    try:
        scorer.hidden(token_ids, plan)
    finally:
        layers[layer].mixer = mixer
    return _softmax(torch.cat(watch.queries), torch.cat(watch.keys), mixer)


def _softmax(q: Tensor, k: Tensor, mixer: Attention) -> Tensor:
    """As `AttentionCall` says it: scale, soft cap, then what is hidden. q: [T, Hq, D], k: [T, Hkv, D]."""
    spec = mixer.spec
    k = k.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    index = torch.arange(q.shape[0])
    distance = index[:, None] - index[None]  # [T, T]
    hidden = distance < 0
    if spec.window is not None:
        hidden |= distance >= spec.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if mixer.weights.sinks is not None:
        sinks = mixer.weights.sinks[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return scores.softmax(-1)[..., : q.shape[0]].cpu()
