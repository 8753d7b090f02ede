"""A transformers model whose attention rotates each key again for every query, to its current position.

It has no rotated query copies, key ranges or blocks: a key at position e scores as R(e) k, independent of
earlier positions. All tokens are computed in one pass, in float32 with float64 angles.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers.loaded import loaded
from transformers import AttentionInterface

from windlass.engine.rotary.rope_scaling import RotarySpec

_CURRENT: list[RawKeyOracle] = []


@dataclass
class _Row:
    """A token: its query position, the held tokens including itself, and their positions and visibility."""

    token: int
    position: int
    context_position: int
    held: list[int]
    places: list[float]
    seen: list[bool]
    specs: Sequence[RotarySpec]
    score_scale: float


@dataclass
class _Pairs:
    """Pairs of queries and keys of the rows with the same frequencies."""

    specs: Sequence[RotarySpec]
    queries: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    places: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    seen: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)


class RawKeyOracle:
    """Tokens with arbitrary key positions. specs, names: of the rotary groups. `step` adds a token, `logits` computes all."""

    def __init__(self, directory: Path, specs: Sequence[RotarySpec], names: Sequence[str]) -> None:
        AttentionInterface.register("raw_keys", _attend)
        self.model = loaded(directory, "raw_keys")
        self._names = names
        self.enter(specs)
        self.model.model.rotary_emb.forward = self._no_rotation
        self.held: list[int] = []  # tokens, counted from the first that was added
        self.score_scale = 1.0  # on the scores of the next token
        self._rows: list[_Row] = []
        self.pairs: list[_Pairs] = []
        self.positions: list[int] = []  # of queries

    def enter(self, specs: Sequence[RotarySpec]) -> None:
        """Use these frequencies for all keys and queries of later tokens."""
        self._specs = specs

    def step(
        self,
        token: int,
        position: int,
        key_positions: Sequence[float],
        seen: Sequence[bool],
        context_position: int | None = None,
    ) -> None:
        """Add a token with a query at `position` that attends to the held keys and its own, and is then held itself.

        key_positions, seen: position and visibility of each key, before the windows of layers.
        context_position: the token's position for everything except rotation.
        """
        self.held.append(len(self._rows))
        where = position if context_position is None else context_position
        self._rows.append(
            _Row(
                token, position, where, list(self.held), list(key_positions), list(seen), self._specs, self.score_scale
            )
        )

    def drop(self, first: int, end: int) -> None:
        """Drop the held tokens first .. end - 1."""
        del self.held[first:end]

    @torch.no_grad()
    def logits(self) -> list[torch.Tensor]:
        """Return the logits of each added token, [V]."""
        _CURRENT[:] = [self]
        self.positions = [row.position for row in self._rows]
        self.pairs = self._paired()
        tokens = torch.tensor([[row.token for row in self._rows]])
        where = torch.tensor([[row.context_position for row in self._rows]])
        return list(self.model(tokens, position_ids=where, use_cache=False).logits[0])

    def _paired(self) -> list[_Pairs]:
        found: dict[tuple[RotarySpec, ...], _Pairs] = {}
        for i, row in enumerate(self._rows):
            pairs = found.setdefault(tuple(row.specs), _Pairs(row.specs))
            pairs.queries += [i] * len(row.held)
            pairs.keys += row.held
            pairs.places += row.places
            pairs.distances += [row.position - place for place in row.places]
            pairs.seen += row.seen
            pairs.scales += [row.score_scale] * len(row.held)
        return list(found.values())

    def _no_rotation(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        spec = self._named(self._specs, layer_type or "")
        width = 2 * len(spec.inv_freq)
        return torch.ones(1, position_ids.shape[1], width), torch.zeros(1, position_ids.shape[1], width)

    def rotation(self, positions: Sequence[float], spec: RotarySpec) -> tuple[torch.Tensor, torch.Tensor]:
        places, of = torch.tensor(positions, dtype=torch.float64).unique(return_inverse=True)
        angle = places[:, None] * torch.tensor(spec.inv_freq, dtype=torch.float64)
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = ((part * spec.rotary_scale).float()[of][None] for part in (angle.cos(), angle.sin()))
        return cos, sin

    def spec_of(self, module: Any, specs: Sequence[RotarySpec]) -> RotarySpec:
        return self._named(specs, "sliding_attention" if getattr(module, "is_sliding", False) else "full_attention")

    def _named(self, specs: Sequence[RotarySpec], name: str) -> RotarySpec:
        return dict(zip(self._names, specs, strict=True)).get(name, specs[0])


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with unrotated query [1, Hq, T, D] and key, value [1, Hkv, T, D]."""
    (oracle,) = _CURRENT
    group, count = query.shape[1] // key.shape[1], query.shape[2]
    scores = torch.full((query.shape[1], count, count), float("-inf"))
    for pairs in oracle.pairs:
        q, k = query, key[:, :, pairs.keys]
        if getattr(module, "use_rope", True):
            weights = [getattr(module, name, None) for name in ("query_layernorm", "key_layernorm")]
            qw, kw = (1.0 if norm is None else norm.weight for norm in weights)  # applied after the rotation
            spec = oracle.spec_of(module, pairs.specs)
            q = _rotated(module, query / qw, oracle.rotation(oracle.positions, spec)) * qw
            k = _rotated(module, k / kw, oracle.rotation(pairs.places, spec)) * kw
        found = (q[0, :, pairs.queries] * k[0].repeat_interleave(group, dim=0)).sum(-1)
        hidden = ~torch.tensor(pairs.seen)
        window = rest.get("sliding_window")
        if window is not None:
            hidden |= torch.tensor(pairs.distances) >= window
        found = (found * scaling * torch.tensor(pairs.scales)).masked_fill(hidden, float("-inf"))
        scores[:, pairs.queries, pairs.keys] = found
    v = value.repeat_interleave(group, dim=1)
    return (scores.softmax(-1)[None] @ v).transpose(1, 2), None


def _rotated(module: Any, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
    takes_one = "q" not in inspect.signature(apply).parameters  # that of Gemma 4 rotates queries or keys
    plain = getattr(module, "qk_nope_head_dim", 0)  # dims before the rotated ones
    still, turned = x[..., :plain], x[..., plain:]
    found = apply(turned, *tables) if takes_one else apply(turned, turned, *tables)[0]
    return torch.cat((still, found), dim=-1)
