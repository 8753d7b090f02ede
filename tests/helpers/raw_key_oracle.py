"""A transformers model that caches keys unrotated and rotates them anew for every token, each to where it stands.

So nothing of it knows of turned queries, runs or blocks: a key that stands at position e scores as R(e) k, whatever has
happened since it was computed. Tokens are computed one at a time, in float32 with float64 angles.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.loaded import loaded
from transformers import AttentionInterface, DynamicCache

from windlass.engine.rotary.scaling import RotarySpec

_CURRENT: list[RawKeyOracle] = []


class RawKeyOracle:
    """specs, names: of the model's rotary groups. `step` computes one token over the tokens that are held."""

    def __init__(self, directory: Path, specs: Sequence[RotarySpec], names: Sequence[str]) -> None:
        AttentionInterface.register("raw_keys", _attend)
        self.model = loaded(directory, "raw_keys")
        self._names = names
        self.enter(specs)
        self.model.model.rotary_emb.forward = self._no_rotation
        self.keys: dict[int, list[torch.Tensor]] = {}  # per layer, of every token that is held
        self.values: dict[int, list[torch.Tensor]] = {}
        self.query_position = 0
        self.key_positions: list[float] = []
        self.seen: list[bool] = []
        self.score_scale = 1.0  # on the scores of the next token
        # Layers that carry a state have it here, whatever becomes of keys.
        config = self.model.config
        kinds = getattr(config, "layer_types", None) or ()
        has_states = not {"linear_attention", "conv", "hybrid"}.isdisjoint(kinds)
        self.cached = (
            {"past_key_values": DynamicCache(config=config), "use_cache": True} if has_states else {"use_cache": False}
        )

    def enter(self, specs: Sequence[RotarySpec]) -> None:
        """All keys and queries stand under these frequencies from now on."""
        self._specs, self._fallback = dict(zip(self._names, specs, strict=True)), specs[0]

    def _no_rotation(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        spec = self._specs.get(layer_type or "", self._fallback)
        width = 2 * len(spec.inv_freq)
        return torch.ones(1, position_ids.shape[1], width), torch.zeros(1, position_ids.shape[1], width)

    def rotation(self, positions: Sequence[float], spec: RotarySpec) -> tuple[torch.Tensor, torch.Tensor]:
        angle = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(spec.inv_freq, dtype=torch.float64)
        angle = torch.cat((angle, angle), dim=-1)[None]
        return (angle.cos() * spec.rotary_scale).float(), (angle.sin() * spec.rotary_scale).float()

    def spec_of(self, module: Any) -> RotarySpec:
        kind = "sliding_attention" if getattr(module, "is_sliding", False) else "full_attention"
        return self._specs.get(kind, self._fallback)

    @torch.no_grad()
    def step(
        self,
        token: int,
        position: int,
        key_positions: Sequence[float],
        seen: Sequence[bool],
        context_position: int | None = None,
    ) -> torch.Tensor:
        """Logits [V] of a token whose query stands at `position`, over the held keys and its own, the last.

        key_positions, seen: where each of them stands, and whether it is looked at at all, before the layers' own windows.
        context_position: what the model takes as the token's position for anything but rotation.
        """
        _CURRENT[:] = [self]
        self.query_position, self.key_positions, self.seen = position, list(key_positions), list(seen)
        where = position if context_position is None else context_position
        out = self.model(torch.tensor([[token]]), position_ids=torch.tensor([[where]]), **self.cached)
        logits: torch.Tensor = out.logits[0, 0]
        return logits

    def drop(self, first: int, end: int) -> None:
        """Hold tokens first .. end - 1 of those held no more."""
        for held in (*self.keys.values(), *self.values.values()):
            del held[first:end]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, 1, D]; key, value [1, Hkv, S, D], neither rotated, of which the last counts."""
    (oracle,) = _CURRENT
    keys = oracle.keys.setdefault(module.layer_idx, [])
    values = oracle.values.setdefault(module.layer_idx, [])
    keys.append(key[0, :, -1])  # a cache brings all before it too
    values.append(value[0, :, -1])
    k = torch.stack(keys, dim=1)[None]  # [1, Hkv, S, D]
    if getattr(module, "use_rope", True):
        apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
        spec = oracle.spec_of(module)
        weights = [getattr(module, name, None) for name in ("query_layernorm", "key_layernorm")]
        qw, kw = (1.0 if norm is None else norm.weight for norm in weights)  # they follow the rotation
        takes_one = "q" not in inspect.signature(apply).parameters  # Gemma 4's turns queries or keys
        plain = getattr(module, "qk_nope_head_dim", 0)  # dims before those that rotate

        def rotated(x: torch.Tensor, positions: list[int]) -> torch.Tensor:
            still, turned = x[..., :plain], x[..., plain:]
            tables = oracle.rotation(positions, spec)
            found = apply(turned, *tables) if takes_one else apply(turned, turned, *tables)[0]
            return torch.cat((still, found), dim=-1)

        query = rotated(query / qw, [oracle.query_position]) * qw
        k = rotated(k / kw, oracle.key_positions) * kw
    k = k.repeat_interleave(query.shape[1] // k.shape[1], dim=1)
    v = torch.stack(values, dim=1)[None].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query @ k.transpose(-1, -2)) * scaling * oracle.score_scale
    distance = oracle.query_position - torch.tensor(oracle.key_positions)
    window = rest.get("sliding_window")
    hidden = ~torch.tensor(oracle.seen)
    if window is not None:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), None
