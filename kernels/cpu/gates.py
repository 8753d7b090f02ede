"""Products that end with activation(gate) * up: which weights they take, and how wide their results are."""

from __future__ import annotations

from windlass.kernels.cpu.checks import check
from windlass.kernels.cpu.ops import ACTIVATIONS
from windlass.kernels.layouts.blocks import PANEL

_NO_ACTIVATION = -1  # leaves a product as it is


def fills_panels(rows: int) -> bool:
    """Whether a weight of so many rows, gates before ups, has a whole number of panels of each."""
    return rows % (2 * PANEL) == 0


def activation_code_and_width(rows: int, activation: str | None) -> tuple[int, int]:
    """How the library numbers an activation, or the lack of one, and the width of the result of a weight of so many rows.
    Raises ValueError."""
    if activation is None:
        return _NO_ACTIVATION, rows
    check(activation in ACTIVATIONS, f"unknown activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
    check(fills_panels(rows), f"{rows} rows of gates and ups do not fill panels of {PANEL}")
    return ACTIVATIONS[activation], rows // 2
