"""Rotary tables: reference-counted rows of inverse frequencies, and the cosines and sines of a step.

Angles are exact at any position. Takes resolved specs; nothing grows with the context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.engine.rotary.attention_distances import PLAIN_DISTANCES, Distances
from windlass.engine.rotary.rope_scaling import RotaryBase, RotarySpec
from windlass.kernels import Backend


class TokenRotations(NamedTuple):
    """Rotation of the T tokens of one step, float32; D is the widest rotary_dim."""

    cos: Tensor  # [G, T, D/2], at unit scale
    sin: Tensor  # [G, T, D/2]
    q_scale: Tensor  # [G, T], the square of the attention factor, for the rotated slice of the query only
    score_scale: Tensor  # [T], for whole scores


class RotaryTables:
    """Reference-counted rows, one per distinct set of specs; a row holds the frequencies of every rotary group.

    num_rows: at least twice the number of sequences, so that rows cannot run out. Groups with a smaller rotary_dim than
    the widest are padded with frequency 0 (cosine 1, sine 0: no rotation). inv_freq, q_scale and score_scale are modified
    in place and never reallocated. distances: of the first group, per row.
    """

    def __init__(self, num_rows: int, bases: Sequence[RotaryBase], backend: Backend) -> None:
        if num_rows < 1 or not bases:
            raise ValueError("a rotary table needs at least one row and one group")
        self.num_rows = num_rows
        self._half_dims = [base.rotary_dim // 2 for base in bases]
        groups, half = len(bases), max(self._half_dims)
        self._backend, self._device = backend, backend.device
        self.inv_freq = torch.zeros(groups, num_rows, half, dtype=torch.float64, device=self._device)  # [G, R, D/2]
        self.q_scale = torch.ones(groups, num_rows, dtype=torch.float32, device=self._device)  # [G, R]
        self.score_scale = torch.ones(num_rows, dtype=torch.float32, device=self._device)  # [R]
        self.distances: list[Distances] = [PLAIN_DISTANCES] * num_rows
        self._row_of: dict[tuple[str, ...], int] = {}
        self._key_of: dict[int, tuple[str, ...]] = {}
        self._content: dict[int, tuple[str, ...]] = {}  # fingerprints last written to each row
        self._users = [0] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_live(self) -> int:
        """Rows held by at least one user."""
        return len(self._row_of)

    def acquire(self, specs: Sequence[RotarySpec]) -> int:
        """The row of these specs, one per group; every acquire needs a release. Equal fingerprints share a row.

        Raises ValueError for specs that do not fit the groups, RuntimeError if every row is in use.
        """
        if len(specs) != len(self._half_dims):
            raise ValueError(f"{len(self._half_dims)} rotary groups need as many specs, got {len(specs)}")
        key = tuple(spec.fingerprint for spec in specs)
        row = self._row_of.get(key)
        if row is None:
            if not self._free:
                raise RuntimeError(f"all {self.num_rows} rotary rows are in use")
            self.write(self._free[-1], specs)
            row = self._free.pop()
            self._row_of[key] = row
            self._key_of[row] = key
        self._users[row] += 1
        return row

    def release(self, row: int) -> None:
        """Undo one `acquire`. Raises ValueError if the row is not in use."""
        if row not in self._key_of:
            raise ValueError(f"rotary row {row} is not in use")
        self._users[row] -= 1
        if self._users[row] == 0:
            del self._row_of[self._key_of.pop(row)]
            self._free.append(row)

    def write(self, row: int, specs: Sequence[RotarySpec]) -> None:
        """Write these specs, one per group, to a row, unless it holds them already. Reference counts are not affected.

        Allocates no device memory. Raises ValueError for specs that do not fit the groups.
        """
        key = tuple(spec.fingerprint for spec in specs)
        if self._content.get(row) == key:
            return
        for spec, half in zip(specs, self._half_dims, strict=True):
            if len(spec.inv_freq) != half:
                raise ValueError(f"a group rotates {half} pairs, its spec has {len(spec.inv_freq)} frequencies")
        for group, spec in enumerate(specs):
            frequencies = torch.tensor(spec.inv_freq, dtype=torch.float64)
            self.inv_freq[group, row, : len(spec.inv_freq)].copy_(frequencies)
            self.q_scale[group, row].fill_(spec.rotary_scale**2)
        self.score_scale[row].fill_(specs[0].score_scale)
        self.distances[row] = specs[0].distances
        self._content[row] = key

    def cos_sin(self, rotary_ids: Tensor, positions: Tensor) -> TokenRotations:
        """Cosines, sines and query scales of T tokens.

        rotary_ids: [T] int64 rows. positions: [T] int64 absolute positions, exact to 2^53. The angle is computed and
        reduced in float64, so the float32 results are right to rounding at any position. Row-independent.
        """
        cos, sin = self.angles(rotary_ids, positions)
        return TokenRotations(
            cos, sin, self.q_scale.index_select(1, rotary_ids), self.score_scale.index_select(0, rotary_ids)
        )

    def angles(self, rotary_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [G, T, D/2] of T tokens or query rotations: see `cos_sin`."""
        return self._backend.rotary_angles(self.inv_freq, rotary_ids, positions)

    def slowed_cos_sin(self, rotary_ids: Tensor, positions: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [G, T, D/2] of the frequencies of each token times its slope.

        slopes: [T] float64; the rest as in `cos_sin`.
        """
        slowed = self.inv_freq.index_select(1, rotary_ids) * slopes[:, None]  # [G, T, D/2]
        return self._backend.rotary_angles(slowed, torch.arange(len(slopes), device=self._device), positions)


def rerotation_angles(
    backend: Backend, old: Sequence[float], new: Sequence[float], positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [T, d/2], of the rotations that take keys from frequencies `old` to `new`.

    old, new: d/2 radians per token. positions: [T] int64. The angle is computed and reduced in float64.
    """
    step = torch.tensor(new, dtype=torch.float64) - torch.tensor(old, dtype=torch.float64)
    cos, sin = backend.rotary_angles(step.to(positions.device).view(1, 1, -1), torch.zeros_like(positions), positions)
    return cos[0], sin[0]
