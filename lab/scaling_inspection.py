"""Inspection of a scaling on a model: frequencies, wavelengths and factors from config.json alone, as tables or JSON.

Loads no weights and imports neither torch nor matplotlib.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.spec_reader import read_rotary_groups
from windlass.engine.rotary.frequencies import wavelength
from windlass.engine.rotary.rope_scaling import (
    RopeScaling,
    RotaryGroup,
    RotarySpec,
    apply_scaling,
    effective_length,
    last_length,
    resolve,
)
from windlass.engine.rotary.scaling_fields import format_value


def display_name(directory: Path, given: str | None) -> str:
    """A hub id as given, or the name of a directory or file."""
    if given is None or Path(given).expanduser().is_dir():
        return directory.name
    return Path(given).name if Path(given).expanduser().is_file() else given


_MAX_LENGTH = 2**31 - 1  # that of `POST /v1/rotary/inspect`


@dataclass(frozen=True, slots=True)
class GroupInspection:
    """One rotary group under a scaling and under the model's own.

    own, scaled: resolved specs, frequencies in float64 radians per token. effective_length, last_length: see `rope_scaling`.
    """

    name: str
    rope_type: str
    parameters: dict[str, Any]
    rotary_dim: int
    trained_len: int
    own_type: str
    own: RotarySpec
    scaled: RotarySpec
    effective_length: float | None
    last_length: int | None

    @property
    def changed(self) -> int:
        """Pairs whose frequency differs from the model's own by more than rounding."""
        pairs = zip(self.own.inv_freq, self.scaled.inv_freq, strict=True)
        return sum(not math.isclose(a, b, rel_tol=1e-9) for a, b in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "rope_type": self.rope_type,
            "parameters": self.parameters,
            "rotary_dim": self.rotary_dim,
            "trained_length": self.trained_len,
            "effective_length": self.effective_length,
            "last_length": self.last_length,
            "inv_freq": list(self.scaled.inv_freq),
            "wavelengths": [wavelength(w) for w in self.scaled.inv_freq],
            "attention_factor": self.scaled.rotary_scale,
            "softmax_scale": self.scaled.distances.score_factor,
            "distances": self.scaled.distances.described() or None,
            "fingerprint": self.scaled.fingerprint,
            "model": {
                "rope_type": self.own_type,
                "inv_freq": list(self.own.inv_freq),
                "wavelengths": [wavelength(w) for w in self.own.inv_freq],
                "attention_factor": self.own.rotary_scale,
                "fingerprint": self.own.fingerprint,
            },
            "changed_pairs": self.changed,
        }


@dataclass(frozen=True, slots=True)
class Inspection:
    """A scaling on every rotary group of a model, for a request of `length` tokens."""

    model: str
    length: int
    groups: tuple[GroupInspection, ...]

    def to_json(self) -> dict[str, Any]:
        groups = {group.name: group.to_json() for group in self.groups}
        main = next(iter(groups.values()))
        return {"length": self.length, **main, **({"groups": groups} if len(groups) > 1 else {})}


def read_groups(directory: Path) -> tuple[RotaryGroup, ...]:
    """Rotary groups of a model directory. Raises LoadError."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(config, dict):
        raise LoadError(f"{path} does not contain a JSON object: download it again")
    return read_rotary_groups(config)


def inspect_scaling(
    directory: Path, scaling: RopeScaling | None, length: int | None, name: str | None = None
) -> Inspection:
    """Resolve `scaling` (None: the model's own) on a model for a request of `length` tokens (None: the trained length).

    name: the name by which the model was requested; None: its directory. Raises LoadError and RequestError.
    """
    own = read_groups(directory)
    if length is None:
        length = own[0].base.trained_len
    if not 1 <= length <= _MAX_LENGTH:
        raise LoadError(f"--length must be between 1 and {_MAX_LENGTH}, got {format_value(length)}")
    scaled = apply_scaling(own, scaling)
    shown_name = display_name(directory, name)
    return Inspection(shown_name, length, tuple(_inspect(a, b, length) for a, b in zip(own, scaled, strict=True)))


def _inspect(own: RotaryGroup, scaled: RotaryGroup, length: int) -> GroupInspection:
    return GroupInspection(
        name=scaled.name,
        rope_type=scaled.scaling.rope_type,
        parameters=scaled.parameters(),
        rotary_dim=scaled.base.rotary_dim,
        trained_len=scaled.base.trained_len,
        own_type=own.scaling.rope_type,
        own=resolve(own.scaling, own.base, length),
        scaled=resolve(scaled.scaling, scaled.base, length),
        effective_length=effective_length(scaled.scaling, scaled.base, length),
        last_length=last_length(scaled.scaling, scaled.base, length),
    )


def print_tables(result: Inspection) -> None:
    """Print a summary and a table of pairs for each group."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for group in result.groups:
        for line in _summary(result, group):
            console.print(line, markup=False, soft_wrap=True)
        table = Table("pair", "own wavelength", "wavelength", "slower by", f"turns in {result.length:,} tokens")
        for column in table.columns:
            column.justify = "right"
        for j, (before, after) in enumerate(zip(group.own.inv_freq, group.scaled.inv_freq, strict=True)):
            table.add_row(
                str(j),
                _number(wavelength(before)),
                _number(wavelength(after)),
                "never turns" if wavelength(after) is None else f"{before / after:.4g} x",
                f"{result.length * after / (2 * math.pi):.4g}",
            )
        console.print(table)


def _summary(result: Inspection, group: GroupInspection) -> list[str]:
    given = ", ".join(f"{key} {_short(value)}" for key, value in group.parameters.items())
    lines = [
        f"{result.model}, {group.name}: {group.rope_type} ({given}) at {result.length:,} tokens",
        f"  the model's own: {group.own_type}, trained for {group.trained_len:,} tokens, "
        f"{group.rotary_dim // 2} pairs; {group.changed} of them change",
        f"  attention factor {group.scaled.rotary_scale:.6g} (own {group.own.rotary_scale:.6g}): scores of the "
        f"rotated dimensions are multiplied by {group.scaled.rotary_scale**2:.6g}",
    ]
    if group.effective_length is not None:
        lines.append(f"  frequencies formed for {group.effective_length:,.6g} tokens, {_reach(group)}")
    lines.append(f"  fingerprint {group.scaled.fingerprint}")
    if group.rope_type == "dynamic" and group.effective_length is not None and result.length <= group.trained_len:
        lines.append("  note: dynamic changes nothing up to the trained length: give a longer --length")
    return lines


def _reach(group: GroupInspection) -> str:
    if group.last_length is None:
        return "the same for every longer request"
    return f"the same for requests of up to {group.last_length:,}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{value[0]:g} … {value[-1]:g}]" if len(value) > 3 else str(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    return "never turns" if value is None else f"{value:,.1f}" if value < 1e7 else f"{value:.4g}"
