"""Layers that carry a state: the arguments of their programs."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from windlass.kernels.operations.recurrence import StateRows
from windlass.kernels.triton.launch import launch, power_of_two, strided
from windlass.kernels.triton.programs import recurrence as programs

_CHANNELS = 512
_TOKENS, _MOST_PARTS = (
    4,
    64,
)  # of a sequence: the tokens of a program, if they are spread evenly, and how many walk them
_COLUMNS = 16  # of a memory


def short_convolution(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    rows: StateRows,
    activation: Literal["silu"] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """See `Recurrences.short_convolution`; rows of a block that the window lacks become NaN."""
    x = strided(x)
    (tokens, channels), width, sequences = x.shape, weight.shape[1], rows.blocks.shape[0]
    out = x.new_empty(tokens, channels)
    block = min(_CHANNELS, power_of_two(channels))
    grid = sequences, -(-channels // block)
    parts = min(_MOST_PARTS, max(1, tokens // max(1, sequences * _TOKENS)))
    whose = rows.blocks, rows.starts, rows.lengths, window.shape[0]
    snapshots = rows.blocks if rows.snapshots is None else rows.snapshots  # which nobody reads then
    launch(
        programs.short_convolution_kernel,
        (*grid, parts),
        x,
        *(x, x.stride(0), weight, weight if bias is None else bias, window, *whose, snapshots, out, channels),
        HAS_BIAS=bias is not None,
        SILU=activation is not None,
        WIDTH=width,
        BLOCK=block,
        KEEPS=rows.snapshots is not None,
    )
    launch(
        programs.store_conv_window_kernel, grid, x, x, x.stride(0), window, *whose, channels, WIDTH=width, BLOCK=block
    )
    return out


def gated_delta_rule(
    qkv: Tensor,
    decay: Tensor,
    strength: Tensor,
    rate: Tensor,
    bias: Tensor,
    memory: Tensor,
    rows: StateRows,
    *,
    tiled_heads: bool = False,
) -> Tensor:
    """See `Recurrences.gated_delta_rule`; rows of a block that the memory lacks become NaN."""
    qkv, decay, strength = strided(qkv), strided(decay), strided(strength)
    blocks, heads, key_dim, value_dim = memory.shape
    out = qkv.new_empty(qkv.shape[0], heads * value_dim)
    snapshots = rows.blocks if rows.snapshots is None else rows.snapshots  # which nobody reads then
    block = min(_COLUMNS, power_of_two(value_dim))
    launch(
        programs.gated_delta_rule_kernel,
        (rows.blocks.shape[0], heads, -(-value_dim // block)),
        qkv,
        *(qkv, qkv.stride(0), decay, decay.stride(0), strength, strength.stride(0), rate, bias),
        *(memory, rows.blocks, rows.starts, rows.lengths, blocks, snapshots, out, key_dim**-0.5),
        KEY_HEADS=(qkv.shape[1] - heads * value_dim) // (2 * key_dim),
        HEADS=heads,
        IN_TURNS=tiled_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEYS=power_of_two(key_dim),
        BLOCK=block,
        KEEPS=rows.snapshots is not None,
    )
    return out


def state_space(
    mixed: Tensor,
    step: Tensor,
    rate: Tensor,
    bias: Tensor,
    skip: Tensor,
    memory: Tensor,
    rows: StateRows,
    *,
    limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """See `Recurrences.state_space`; rows of a block that the memory lacks become NaN."""
    mixed, step = strided(mixed), strided(step)
    blocks, heads, key_dim, value_dim = memory.shape
    out = mixed.new_empty(mixed.shape[0], heads * value_dim)
    snapshots = rows.blocks if rows.snapshots is None else rows.snapshots  # which nobody reads then
    block = min(_COLUMNS, power_of_two(value_dim))
    launch(
        programs.state_space_kernel,
        (rows.blocks.shape[0], heads, -(-value_dim // block)),
        mixed,
        *(mixed, mixed.stride(0), step, step.stride(0), rate, bias, skip),
        *(memory, rows.blocks, rows.starts, rows.lengths, blocks, snapshots, out, *map(float, limits)),
        KEY_HEADS=(mixed.shape[1] - heads * value_dim) // (2 * key_dim),
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEYS=power_of_two(key_dim),
        BLOCK=block,
        KEEPS=rows.snapshots is not None,
    )
    return out
