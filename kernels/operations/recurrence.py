"""What a backend offers to layers that carry a state from token to token instead of reading all keys before it.

A state is of one size, however long its sequence. It lies in a block of its own, and is changed in place: after a step it is
what the sequence's tokens until then have made of it. S sequences of a step, N blocks, C channels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


class StateRows(NamedTuple):
    """Whose states the tokens of a step change: tokens starts[s] .. starts[s + 1] - 1 that of sequence s, one after the other.

    A sequence that has as many tokens in all as in this step begins with a state of zeros, whatever its block holds. kept: where
    the state after each token is left besides, as it would be left in the sequence's own block if that token were its last; -1:
    nowhere. So whoever is not sure of all of the tokens can go back to any of them. None: of no token. On devices that capture
    steps a block of -1 says that tokens are none, and rows of zeros come of them.
    """

    blocks: Tensor  # [S] int64, distinct where they are not -1
    starts: Tensor  # [S + 1] int64
    lengths: Tensor  # [S] int64, tokens in all once this step is over
    snapshots: Tensor | None = None  # [T] int64, distinct where they are not -1, and none of `blocks`


@dataclass(frozen=True, slots=True)
class StatePages:
    """The states of one layer."""

    window: Tensor  # [N, W - 1, C] float32, the last inputs of a convolution of width W, the oldest first
    memory: Tensor  # [N, Hv, Dk, Dv] float32


class Recurrences(ABC):
    """Operations over the tokens of each sequence in turn. A row's bits depend on its own sequence alone, and not on how that was
    cut into steps."""

    @abstractmethod
    def short_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        window: Tensor,
        rows: StateRows,
        activation: Literal["silu"] | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The causal convolution of each channel with its own weights, and the activation of it, if there is one.

        x: [T, C], any row stride. weight: [C, W] float32, the last of a row for the token itself. window: as in `StatePages`,
        changed in place. bias: [C] float32, what sums begin with. Returns [T, C] in x's dtype, contiguous; sums are float32.
        """

    @abstractmethod
    def gated_delta_rule(
        self,
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
        """What queries read of a memory that each token first lets fade and then corrects (2412.06464), in float32.

        With q and k of length 1 (1e-6 added to the sum of squares), q times Dk^-1/2, and for each of the Hv heads
        g = exp(-rate softplus(decay + bias)) and b = sigmoid(strength): M = g M; M = M + k (b (v - M^T k))^T; out = M^T q.

        qkv: [T, 2 Hk Dk + Hv Dv], of each token the queries, keys and values, any row stride; head h of the Hv meets query and
        key h // (Hv / Hk), or h mod Hk if these serve in turns. decay, strength: [T, Hv] in qkv's dtype, any row stride. rate,
        bias: [Hv] float32. memory: as in `StatePages`, changed in place. Returns [T, Hv Dv] in qkv's dtype, contiguous.
        """

    @abstractmethod
    def state_space(
        self,
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
        """What queries read of a memory that each token lets fade and adds to (Mamba 2, 2405.21060), in float32.

        For each of the Hv heads d = softplus(step + bias), kept within limits; M = exp(-rate d) M; M = M + k (d v)^T;
        out = M^T q + skip v.

        mixed: [T, Hv Dv + 2 Hk Dk], of each token the values, keys (B) and queries (C), any row stride; head h of the Hv meets
        key and query h // (Hv / Hk). step: [T, Hv] in mixed's dtype, any row stride. rate, bias, skip: [Hv] float32. memory: as
        in `StatePages` (here Dk is Mamba's d_state, Dv its head dim), changed in place. Returns [T, Hv Dv] in mixed's dtype,
        contiguous.
        """
