"""Triton backend for NVIDIA GPUs: Triton kernels, torch products for plain weights, and CUDA graphs.

No operation of a layer waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.kernels.attention_call import AttentionCall, LatentExpansion
from windlass.kernels.backend import Backend, BackendOptions, Routed, Routing, Weight
from windlass.kernels.device_memory import CudaEvent, DeviceEvent
from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.layouts.low_rank_weights import AdapterSlots, LowRankTable, LowRankTarget
from windlass.kernels.layouts.weight_layouts import BlockRows, BlockWeight, ExpertWeights, PanelRows, copy_rows
from windlass.kernels.step_recording import Graphs
from windlass.kernels.token_sampling import SamplingTensors, TokenSampler, TopLogprobs
from windlass.kernels.torch import torch_sampler
from windlass.kernels.torch.torch_backend import TorchBackend
from windlass.kernels.triton import (
    elementwise,
    gemv,
    grouped_gemm,
    low_rank,
    matmul,
    norms,
    prefill_attention,
    recurrent_layers,
    rotary_embedding,
    triton_sampler,
)
from windlass.kernels.triton import moe_routing as routes
from windlass.kernels.triton import paged_attention as attention
from windlass.kernels.triton.launch import Device


class CudaGraphs(Graphs):
    """CUDA graphs of one device. All share one memory pool, which is freed with the last of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # compiles kernels and lets libraries allocate their memory at first use
            torch.cuda.current_stream().wait_stream(stream)
            graph: Any = torch.cuda.CUDAGraph()
            # Other threads are not blocked: none of them uses the device.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        again: Callable[[], None] = graph.replay
        return again

    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self._device):
            work()

    def sample_rows(
        self, logits: Tensor, maxima: tuple[Tensor, Tensor], draws: SamplingTensors
    ) -> tuple[Tensor, Tensor]:
        return triton_sampler.sample_rows(logits, maxima, draws)

    def join(self) -> None:
        pass

    def record_event(self) -> DeviceEvent:
        with torch.cuda.device(self._device):
            return CudaEvent()

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)


class TritonBackend(TorchBackend):
    """For a device that `triton_refusal` accepts, or in Triton's interpreter on a CPU. host: the backend that quantizes
    blocks in host memory, with the same bytes as plain torch but faster; None: plain torch.

    Where the contract has an IndexError for contents of device memory, results are NaN: raising would mean to wait for the
    device.
    """

    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    rms_norm_in_place = staticmethod(norms.rms_norm_in_place)
    layer_norm = staticmethod(norms.layer_norm)
    clamped_glu = staticmethod(elementwise.clamped_glu)
    gate_by_sigmoid = staticmethod(elementwise.gate_by_sigmoid)
    soft_cap = staticmethod(elementwise.soft_cap)
    sum_of_experts = staticmethod(elementwise.sum_of_experts)
    short_convolution = staticmethod(recurrent_layers.short_convolution)
    gated_delta_rule = staticmethod(recurrent_layers.gated_delta_rule)
    state_space = staticmethod(recurrent_layers.state_space)
    rotate_and_append = staticmethod(rotary_embedding.rotate_and_append)
    rerotate_cached_keys = staticmethod(rotary_embedding.rerotate_cached_keys)
    rotate_queries = staticmethod(rotary_embedding.rotate_queries)
    row_maxima = staticmethod(triton_sampler.row_maxima)

    def __init__(self, options: BackendOptions, host: Backend | None = None) -> None:
        super().__init__(options)
        self._host = host
        self._device = Device.of(self.device)
        if (
            self._device.capability == prefill_attention.CAPABILITY
            and self.dtype.itemsize == 2
            and not self.deterministic
        ):
            self.workspace_bytes = prefill_attention.MOST_BYTES

    def explain(self) -> str:
        return "Triton kernels"

    # Block weights are made in host memory, where their source is

    def pack(self, target: PanelRows | BlockRows, source: Tensor) -> None:
        if self._host is None or isinstance(target, PanelRows):
            super().pack(target, source)
        else:
            self._fill_from_host(target, self._host.pack, source)

    def repack(self, target: BlockRows, source: Tensor) -> None:
        if self._host is None:
            super().repack(target, source)
        else:
            self._fill_from_host(target, self._host.repack, source)

    def _fill_from_host(self, target: BlockRows, fill: Callable[[BlockRows, Tensor], None], source: Tensor) -> None:
        staged = BlockWeight.empty(target.count, target.weight.columns, target.weight.form)
        fill(staged.narrow(0, target.count), source)
        copy_rows(target, staged)

    # -- products, norms, activations --

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.deterministic:
            return matmul.linear(x, weight, bias, fixed=True)
        if gemv.takes_single_row(x, weight):
            return gemv.linear_single_row(x, weight, bias)
        return super()._product(x, weight, bias)

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        if isinstance(weight, Tensor) and not self.deterministic and gemv.takes_single_row(x, weight):
            return gemv.linear_single_row(x, weight, bias, activation)
        return super().gated_linear(x, weight, bias, activation)

    def _blocks_product(self, x: Tensor, weight: BlockWeight, bias: Tensor | None) -> Tensor:
        return matmul.linear(x, weight, bias, fixed=self.deterministic)

    def low_rank_table(self, slots: int, matrix: LowRankTarget) -> LowRankTable:
        return low_rank.DeviceLowRankTable(slots, matrix, self.device)

    def add_low_rank(self, out: Tensor, x: Tensor, table: LowRankTable, rows: AdapterSlots) -> None:
        if not isinstance(table, low_rank.DeviceLowRankTable):
            raise TypeError("the table is another backend's")
        slots = rows.on(self.device)
        low_rank.add_low_rank(out, x, table, slots, fixed=self.deterministic, device=self._device)

    def activation(self, x: Tensor, activation: str) -> Tensor:
        return elementwise.activation(x, activation)

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        return elementwise.activation(gate_up, activation, gated=True)

    def embed(self, table: Tensor | BlockWeight, ids: Tensor, scale: float = 1.0) -> Tensor:
        if isinstance(table, BlockWeight):
            return matmul.embed(table, ids, self.dtype, scale)
        return super().embed(table, ids, scale)

    # -- experts --

    def experts(self, weights: Sequence[Weight], biases: Sequence[Tensor] | None = None) -> ExpertWeights:
        return matmul.PointerTableExperts(weights, biases)

    def route(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
    ) -> Routed:
        if routes.takes_routing(logits, routing):
            return routes.route(logits, routing, bias, scales)
        return super().route(logits, routing, bias, scales)

    def linear_of_experts(self, x: Tensor, experts: ExpertWeights, chosen: Tensor) -> Tensor:
        if not isinstance(experts, matmul.PointerTableExperts) or not experts.parts:
            return super().linear_of_experts(x, experts, chosen)
        if not self.deterministic and grouped_gemm.takes_grouped(x, chosen.numel(), experts):
            return grouped_gemm.linear_of_experts(x, experts, chosen, self._device)
        return matmul.linear_of_experts(x, experts, chosen, fixed=self.deterministic)

    def feed_forward_of_experts(
        self, x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, routed: Routed, activation: str
    ) -> Tensor:
        if (
            not self.deterministic
            and isinstance(gate_up, matmul.PointerTableExperts)
            and isinstance(down, matmul.PointerTableExperts)
            and grouped_gemm.takes_grouped(x, routed.chosen.numel(), gate_up, down)
        ):
            return grouped_gemm.feed_forward_of_experts(x, gate_up, down, routed, activation, self._device)
        return super().feed_forward_of_experts(x, gate_up, down, routed, activation)

    # -- rotation and attention --

    def paged_attention(self, q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
        return attention.paged_attention(q, pages, call, deterministic=self.deterministic, device=self._device)

    def latent_expansion(self, pages: KVPages) -> LatentExpansion | None:
        return None  # the host does not know the lengths of sequences

    def latent_queries(self, q: Tensor, up: Tensor, rotary_dim: int) -> Tensor:
        plain = q.shape[2] - rotary_dim
        found = matmul.by_head(q[..., rotary_dim:], up[:, :plain], fixed=self.deterministic)
        return torch.cat((q[..., :rotary_dim], found), dim=-1)

    def latent_values(self, attended: Tensor, up: Tensor, value_dim: int) -> Tensor:
        matrices = up[:, up.shape[1] - value_dim :].transpose(1, 2)
        return matmul.by_head(attended, matrices, fixed=self.deterministic).flatten(1)

    # -- sampling --

    def token_logprobs(self, logits: Tensor, rows: Tensor, targets: Tensor, k: int) -> TopLogprobs:
        return torch_sampler.token_logprobs(logits, rows, targets, k, triton_sampler.log_sums)

    def token_sampler(self, vocab_size: int) -> TokenSampler:
        return triton_sampler.TritonSampler()

    def make_graph_runner(self) -> Graphs | None:
        # With splits of one size, their number follows from the lengths.
        return None if self.deterministic or self.device.type != "cuda" else CudaGraphs(self.device)

    @property
    def recording_refusal(self) -> str | None:
        return "calls of Triton's programs are captured as graphs"
