"""Subject of a picture: the rotation of a model or of given parameters, and the scalings that it compares.

All frequencies come from the engine's functions. Loads no weights and imports neither torch nor matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from windlass.engine.errors import LoadError
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, main_group, resolve
from windlass.lab.encoding_formulas import Numbers
from windlass.lab.scaling_inspection import read_groups

_MAX_DIM = 4096  # of a head; larger pictures would need gigabytes

_MAX_LENGTH = 10_000_000  # tokens

LLAMA_2 = RotaryBase(rope_theta=10000.0, head_dim=128, rotary_dim=128, trained_len=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """base: the unscaled rotation. scaling: that of pictures of a single scaling. length: the longest distance shown, in tokens.

    compared: (label, scaling) of pictures that compare; the first is without scaling.
    """

    name: str
    base: RotaryBase
    scaling: RopeScaling
    length: int
    compared: tuple[tuple[str, RopeScaling], ...]

    @property
    def pairs(self) -> int:
        return self.base.rotary_dim // 2

    @property
    def stretch(self) -> float:
        """`length` divided by the trained length, at least 1."""
        return max(self.length / self.base.trained_len, 1.0)

    def frequencies(self, scaling: RopeScaling | None = None) -> Numbers:
        """Radians per token of each pair, [pairs], under a scaling (None: the subject's) for `length` tokens."""
        return np.array(resolve(scaling or self.scaling, self.base, self.length).inv_freq)


def base_from_parameters(theta: float, dim: int, trained_len: int) -> RotaryBase:
    """Rotation of the given parameters. Raises LoadError for values that no model has."""
    if not 1 < theta < math.inf:
        raise LoadError(f"--theta must be a number above 1, got {theta:g}")
    if not 4 <= dim <= _MAX_DIM or dim % 2:
        raise LoadError(f"--dim must be even and between 4 and {_MAX_DIM:,}, got {dim}")
    if trained_len < 2:
        raise LoadError(f"--trained-len must be at least 2, got {trained_len}")
    return RotaryBase(rope_theta=theta, head_dim=dim, rotary_dim=dim, trained_len=trained_len)


def make_subject(
    directory: Path | None, base: RotaryBase | None, scalings: Sequence[RopeScaling], length: int | None, name: str
) -> Subject:
    """Subject of a model in `directory`, else of `base`, else of Llama 2.

    length None: 24 times the trained length (4k to 100k), at most _MAX_LENGTH. scalings: all are compared, and pictures of a
    single scaling use the first. Raises LoadError and RequestError.
    """
    own = RopeScaling()
    if directory is not None:
        group = main_group(read_groups(directory))
        base, own = group.base, group.scaling
    base = base or LLAMA_2
    if length is None:
        length = 100_000 if base == LLAMA_2 else min(24 * base.trained_len, _MAX_LENGTH)
    elif not 2 <= length <= _MAX_LENGTH:
        raise LoadError(f"--length must be between 2 and {_MAX_LENGTH:,}, got {length}")
    chosen = scalings[0] if scalings else own
    compared = [(_label(scaling), scaling) for scaling in scalings] or usual_scalings(base, length)
    subject = Subject(
        name=name, base=base, scaling=chosen, length=length, compared=(("no scaling", RopeScaling()), *compared)
    )
    for scaling in (chosen, *(scaling for _, scaling in subject.compared)):
        if scaling.groups:
            raise LoadError("a picture shows one scaling: give a flat object, not one by groups")
        resolve(scaling, base, length)  # raises RequestError for one that does not fit
    return subject


def usual_scalings(base: RotaryBase, length: int) -> list[tuple[str, RopeScaling]]:
    """The published scalings, each with the factor for `length` tokens.

    LongRoPE's divisors are searched for each model; evenly rising ones from 1 to the factor replace them here.
    """
    factor = max(length / base.trained_len, 1.0)
    pairs = base.rotary_dim // 2
    rising = [1 + (factor - 1) * j / max(pairs - 1, 1) for j in range(pairs)]
    trained = {"original_max_position_embeddings": base.trained_len}
    bands = {"low_freq_factor": 1, "high_freq_factor": 4}
    given: list[tuple[str, dict[str, object]]] = [
        ("PI (linear)", {"rope_type": "linear", "factor": factor}),
        ("NTK-aware", {"rope_type": "ntk", "factor": factor}),
        ("YaRN", {"rope_type": "yarn", "factor": factor}),
        ("Llama 3", {"rope_type": "llama3", "factor": factor, **bands, **trained}),
        (
            "LongRoPE (even divisors)",
            {"rope_type": "longrope", "short_factor": rising, "long_factor": rising, **trained},
        ),
    ]
    return [(label, RopeScaling.from_dict(fields)) for label, fields in given]


def _label(scaling: RopeScaling) -> str:
    factor = scaling.get("factor")
    return scaling.rope_type if factor is None else f"{scaling.rope_type} {factor:g}"
