"""The backend of Triton's programs, for NVIDIA GPUs.

Responsible for which function takes an operation, decided when it is bound: programs of its own, and torch's products for plain
weights, unless rows are to be independent. What torch does well by element stays with it. No operation of a layer waits for the
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from windlass.kernels.attention_call import AttentionCall, LatentExpansion
from windlass.kernels.backend import Backend, BackendOptions, Weight
from windlass.kernels.draws import TokenSampler, TopLogprobs
from windlass.kernels.layouts.blocks import BlockRows, BlockWeight, copy_rows
from windlass.kernels.layouts.experts import ExpertWeights
from windlass.kernels.layouts.low_rank import AdapterSlots, LowRankTable, LowRankTarget
from windlass.kernels.layouts.pages import KVPages
from windlass.kernels.layouts.panels import PanelRows
from windlass.kernels.operations.recurrence import StateRows
from windlass.kernels.operations.routing import Routed, Routing
from windlass.kernels.recorder import Graphs
from windlass.kernels.torch import logprobs
from windlass.kernels.torch.backend import TorchBackend
from windlass.kernels.triton import (
    attention,
    drawing,
    grouped,
    in_order,
    low_rank,
    norms,
    pointwise,
    products,
    recurrence,
    rotary,
    thin,
)
from windlass.kernels.triton import routing as routes
from windlass.kernels.triton.graphs import CudaGraphs
from windlass.kernels.triton.launch import Device


class TritonBackend(TorchBackend):
    """Bound for a device that `support.refusal` accepts, or in Triton's interpreter for a CPU. host: what fills blocks before
    they go to the device, with the bytes that plain torch makes, and sooner; None: plain torch.

    Where an operation's contract has an IndexError for what lies in the device's memory, this one gives NaN: to raise, it would
    have to wait.
    """

    def __init__(self, options: BackendOptions, host: Backend | None = None) -> None:
        super().__init__(options)
        self._host = host
        self._device = Device.of(self.device)
        if self._device.capability == in_order.CAPABILITY and self.dtype.itemsize == 2 and not self.deterministic:
            self.workspace_bytes = in_order.MOST_BYTES

    def explain(self) -> str:
        return "Triton kernels"

    # Weights in blocks are made in main memory, where their numbers come from

    def pack(self, target: PanelRows | BlockRows, source: Tensor) -> None:
        if self._host is None or isinstance(target, PanelRows):
            super().pack(target, source)
            return
        staged = BlockWeight.empty(target.count, target.weight.columns, target.weight.form)
        self._host.pack(staged.narrow(0, target.count), source)
        copy_rows(target, staged)

    def repack(self, target: BlockRows, source: Tensor) -> None:
        if self._host is None:
            super().repack(target, source)
            return
        staged = BlockWeight.empty(target.count, target.weight.columns, target.weight.form)
        self._host.repack(staged.narrow(0, target.count), source)
        copy_rows(target, staged)

    # Products, norms, activations

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.deterministic:
            return products.linear(x, weight, bias, fixed=True)
        if thin.takes_single_row(x, weight):
            return thin.linear_single_row(x, weight, bias)
        return super()._product(x, weight, bias)

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        if isinstance(weight, Tensor) and not self.deterministic and thin.takes_single_row(x, weight):
            return thin.linear_single_row(x, weight, bias, activation)
        return super().gated_linear(x, weight, bias, activation)

    def _blocks_product(self, x: Tensor, weight: BlockWeight, bias: Tensor | None) -> Tensor:
        return products.linear(x, weight, bias, fixed=self.deterministic)

    def low_rank_table(self, slots: int, matrix: LowRankTarget) -> LowRankTable:
        return low_rank.DeviceLowRankTable(slots, matrix, self.device)

    def add_low_rank(self, out: Tensor, x: Tensor, table: LowRankTable, rows: AdapterSlots) -> None:
        if not isinstance(table, low_rank.DeviceLowRankTable):
            raise TypeError("the table is another backend's")
        slots = rows.on(self.device)
        low_rank.add_low_rank(out, x, table, slots, fixed=self.deterministic, device=self._device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.add_rms_norm(residual, x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return norms.layer_norm(x, weight, bias, eps)

    def rms_norm_in_place(self, x: Tensor, weight: Tensor, eps: float) -> None:
        norms.rms_norm_in_place(x, weight, eps)

    def activation(self, x: Tensor, activation: str) -> Tensor:
        return pointwise.activation(x, activation)

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        return pointwise.activation(gate_up, activation, gated=True)

    def clamped_glu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        return pointwise.clamped_glu(gate_up, alpha, limit)

    def gate_by_sigmoid(self, x: Tensor, gate: Tensor) -> None:
        pointwise.gate_by_sigmoid(x, gate)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return pointwise.soft_cap(x, cap)

    def short_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        window: Tensor,
        rows: StateRows,
        activation: Literal["silu"] | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        return recurrence.short_convolution(x, weight, window, rows, activation, bias)

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
        return recurrence.gated_delta_rule(qkv, decay, strength, rate, bias, memory, rows, tiled_heads=tiled_heads)

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
        return recurrence.state_space(mixed, step, rate, bias, skip, memory, rows, limits=limits)

    def embed(self, table: Tensor | BlockWeight, ids: Tensor, scale: float = 1.0) -> Tensor:
        if isinstance(table, BlockWeight):
            return products.embed(table, ids, self.dtype, scale)
        return super().embed(table, ids, scale)

    # Experts

    def experts(self, weights: Sequence[Weight], biases: Sequence[Tensor] | None = None) -> ExpertWeights:
        return products.PointerTableExperts(weights, biases)

    def route(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
    ) -> Routed:
        if routes.takes_routing(logits, routing):
            return routes.route(logits, routing, bias, scales)
        return super().route(logits, routing, bias, scales)

    def linear_of_experts(self, x: Tensor, experts: ExpertWeights, chosen: Tensor) -> Tensor:
        if not isinstance(experts, products.PointerTableExperts) or not experts.parts:
            return super().linear_of_experts(x, experts, chosen)
        if not self.deterministic and grouped.takes_grouped(x, chosen.numel(), experts):
            return grouped.linear_of_experts(x, experts, chosen, self._device)
        return products.linear_of_experts(x, experts, chosen, fixed=self.deterministic)

    def feed_forward_of_experts(
        self, x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, routed: Routed, activation: str
    ) -> Tensor:
        if (
            not self.deterministic
            and isinstance(gate_up, products.PointerTableExperts)
            and isinstance(down, products.PointerTableExperts)
            and grouped.takes_grouped(x, routed.chosen.numel(), gate_up, down)
        ):
            return grouped.feed_forward_of_experts(x, gate_up, down, routed, activation, self._device)
        return super().feed_forward_of_experts(x, gate_up, down, routed, activation)

    def sum_of_experts(self, x: Tensor, weights: Tensor) -> Tensor:
        return pointwise.sum_of_experts(x, weights)

    # Rotation and attention

    def rotate_and_append(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_scale: Tensor, pages: KVPages, slots: Tensor
    ) -> None:
        rotary.rotate_and_append(q, k, v, cos, sin, q_scale, pages, slots)

    def rerotate_cached_keys(
        self, pages: KVPages, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor, *, values: bool = True
    ) -> None:
        rotary.rerotate_cached_keys(pages, sources, targets, cos, sin, values=values)

    def rotate_queries(self, q: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotary.rotate_queries(q, rows, cos, sin)

    def paged_attention(self, q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
        return attention.paged_attention(q, pages, call, deterministic=self.deterministic, device=self._device)

    def latent_expansion(self, pages: KVPages) -> LatentExpansion | None:
        return None  # the host does not know how long sequences are

    def latent_queries(self, q: Tensor, up: Tensor, rotary_dim: int) -> Tensor:
        plain = q.shape[2] - rotary_dim
        found = products.by_head(q[..., rotary_dim:], up[:, :plain], fixed=self.deterministic)
        return torch.cat((q[..., :rotary_dim], found), dim=-1)

    def latent_values(self, attended: Tensor, up: Tensor, value_dim: int) -> Tensor:
        matrices = up[:, up.shape[1] - value_dim :].transpose(1, 2)
        return products.by_head(attended, matrices, fixed=self.deterministic).flatten(1)

    # Drawing

    def row_maxima(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return drawing.row_maxima(logits)

    def token_logprobs(self, logits: Tensor, rows: Tensor, targets: Tensor, k: int) -> TopLogprobs:
        return logprobs.token_logprobs(logits, rows, targets, k, drawing.log_sums)

    def token_sampler(self, vocab_size: int) -> TokenSampler:
        return drawing.TritonSampler()

    def make_graph_runner(self) -> Graphs | None:
        # With splits of one size, how many there are follows from the lengths.
        return None if self.deterministic or self.device.type != "cuda" else CudaGraphs(self.device)

    @property
    def recording_refusal(self) -> str | None:
        return "calls of Triton's programs are captured as graphs"
