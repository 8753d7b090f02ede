"""CPU backend: dispatches each operation to the compiled kernels, or to plain torch where those are faster or cover more."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from windlass.kernels.attention_call import AttentionCall, LatentExpansion
from windlass.kernels.backend import Backend, BackendOptions, Weight
from windlass.kernels.cpu import attention_bindings, call_recording, elementwise_bindings, library, matmul_bindings
from windlass.kernels.cpu.call_recording import Arena
from windlass.kernels.cpu.matmul_bindings import AmxProducts
from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.layouts.low_rank_weights import AdapterSlots, LowRankTable, LowRankTarget
from windlass.kernels.layouts.weight_layouts import (
    PANEL_DTYPES,
    BlockRows,
    BlockWeight,
    ExpertWeights,
    PanelRows,
    PanelWeight,
    Part,
    StackedWeight,
)
from windlass.kernels.step_recording import BufferFiller, PersistentBuffers, Recorder
from windlass.kernels.token_sampling import TokenSampler, TopLogprobs
from windlass.kernels.torch import batched_attention, reference
from windlass.kernels.torch import linear as torch_linear
from windlass.kernels.torch.torch_backend import RowIndependentBackend, TorchBackend

# Rows of bfloat16 from which torch's native product is faster (measured on Zen 4: equal at 8, 1.3 times at 16, 2.3 at 512).
_MIN_NATIVE_ROWS = 12

_MAX_SCALED_ROWS = 256

_RANGE_ROWS = 32  # tokens of a prompt with key ranges that are decoded at once


class CompiledBackend(Backend):
    """C++ SIMD kernels where they are fastest, else torch; row-independent throughout if `deterministic`."""

    # Operations that the kernels perform for all operands: bindings are functions of a backend.
    repack = matmul_bindings.repack_blocks
    route = matmul_bindings.route
    sum_of_experts = matmul_bindings.sum_of_experts
    rms_norm = elementwise_bindings.rms_norm
    rms_norm_in_place = elementwise_bindings.rms_norm_in_place
    layer_norm = elementwise_bindings.layer_norm
    gated_activation = elementwise_bindings.gated_activation
    activation = elementwise_bindings.activate
    xielu = elementwise_bindings.xielu
    clamped_glu = elementwise_bindings.clamped_glu
    gate_by_sigmoid = elementwise_bindings.gate_by_sigmoid
    soft_cap = elementwise_bindings.soft_cap
    clip = elementwise_bindings.clip
    multiply = elementwise_bindings.multiply
    scale_rows = elementwise_bindings.scale_rows
    scale_columns = elementwise_bindings.scale_columns
    row_maxima = elementwise_bindings.row_maxima
    rotary_angles = attention_bindings.rotary_angles
    rotate_and_append = attention_bindings.rotate_and_append
    rerotate_cached_keys = attention_bindings.rerotate_cached_keys
    rotate_queries = attention_bindings.rotate_queries
    latent_queries = attention_bindings.latent_queries
    latent_values = attention_bindings.latent_values
    short_convolution = attention_bindings.short_convolution
    gated_delta_rule = attention_bindings.gated_delta_rule
    state_space = attention_bindings.state_space
    _decode = attention_bindings.paged_attention_decode

    def __init__(self, options: BackendOptions) -> None:
        """Raises KernelsUnavailableError with the text of `refusal`."""
        super().__init__(options)
        self.library = library.load()
        self._torch = (RowIndependentBackend if options.deterministic else TorchBackend)(replace(options, ranks=None))
        self.has_bf16_dot = self.library.isa in library.BF16_DOT_ISAS
        # Where torch's native bfloat16 products are faster than the kernels, they need the weight in its plain layout.
        self._torch_is_faster_bf16 = (
            options.dtype == torch.bfloat16 and torch_linear.multiplies_bfloat16() and not self.has_bf16_dot
        )
        if options.bf16_prefill and not options.deterministic:
            self.uniform_prefill_min_tokens = attention_bindings.MIN_BF16_QUERIES if self.has_bf16_dot else 2
        self._amx = AmxProducts(self.library, options)
        if options.dtype not in matmul_bindings.ACTIVATION_TYPES:
            self._most_rows = self._most_bfloat16_rows = -1
        elif options.deterministic:
            self._most_rows = self._most_bfloat16_rows = sys.maxsize
        else:
            self._most_rows = matmul_bindings.LINEAR_MAX_ROWS
            self._most_bfloat16_rows = (
                _MIN_NATIVE_ROWS - 1 if self._torch_is_faster_bf16 else matmul_bindings.LINEAR_MAX_ROWS
            )
        self._ranks = None if options.ranks is None else elementwise_bindings.SharedMemoryCollectives(options.ranks)
        self._ones: dict[int, Tensor] = {}  # weights of a norm whose result is ignored, by size
        self._places: dict[int, Tensor] = {}  # torch.arange(n) by n
        self._most_panel_rows = sys.maxsize if options.deterministic else matmul_bindings.PANEL_MAX_ROWS

    @staticmethod
    def refusal(options: BackendOptions) -> str | None:
        """Why these kernels cannot be used with these options, or None."""
        if options.device.type != "cpu":
            return f"the model is on {options.device}"
        return library.unavailable_reason()

    def explain(self) -> str:
        return f"compiled CPU kernels ({self.library.isa})"

    def _plain_matrix(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | PanelWeight:
        native = dtype == torch.bfloat16 and self._torch_is_faster_bf16
        if dtype in PANEL_DTYPES and (self.deterministic or not native):
            return PanelWeight.empty(rows, columns, dtype, self.empty)
        return super()._plain_matrix(rows, columns, dtype)

    def pack(self, target: PanelRows | BlockRows, source: Tensor) -> None:
        if isinstance(target, PanelRows):
            matmul_bindings.pack_panels(self, target, source)
        else:
            matmul_bindings.pack_blocks(self, target, source)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, StackedWeight):
            return self._linear_stacked(x, weight, bias)
        return self._linear_part(x, weight, bias)

    def logits(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        # Rows of bfloat16 are converted instead of their products.
        return self.linear(x if x.dtype == torch.float32 else self.scaled(x, 1.0), weight, bias)

    def _linear_part(self, x: Tensor, weight: Part, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """out: where the result may be written, of its dtype."""
        if isinstance(weight, BlockWeight | PanelWeight) and self._amx.takes(x, weight):
            return self._amx.linear(self, x, weight, bias, out=out)
        if isinstance(weight, BlockWeight):
            out = None if x.dtype != torch.float32 else out
            if self.options.activations == "int8":
                return matmul_bindings.linear_blocks(self, x, weight, bias, out=out)
            most = sys.maxsize if self.deterministic else matmul_bindings.LINEAR_MAX_ROWS
            return matmul_bindings.linear_blocks_widened(self, x, weight, bias, most_rows=most, out=out)
        if isinstance(weight, PanelWeight):
            pairs = self.has_bf16_dot and x.dtype == weight.dtype == torch.bfloat16
            if x.shape[0] > self._most_panel_rows and not pairs:
                return matmul_bindings.linear_panels_widened(self, x, weight, bias)
            out = None if x.dtype == torch.float16 else out
            return matmul_bindings.linear_panels(self, x, weight, bias, out=out)
        if x.shape[0] <= (self._most_bfloat16_rows if weight.dtype == torch.bfloat16 else self._most_rows):
            return matmul_bindings.linear_small(self, x, weight, bias, out=out)
        return self._torch.linear(x, weight, bias)

    def _linear_stacked(self, x: Tensor, weight: StackedWeight, bias: Tensor | None) -> Tensor:
        """Each part writes its columns of the result in place if it can."""
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
        for part, begin, end in weight.spans():
            own = out[:, begin:end]
            found = self._linear_part(x, part, None if bias is None else bias[begin:end], own)
            if found.data_ptr() != own.data_ptr():
                own.copy_(found)
        return out

    def low_rank_table(self, slots: int, matrix: LowRankTarget) -> LowRankTable:
        return matmul_bindings.CompiledLowRankTable(slots, matrix.columns, matrix.inner)

    def add_low_rank(self, out: Tensor, x: Tensor, table: LowRankTable, rows: AdapterSlots) -> None:
        if not isinstance(table, matmul_bindings.CompiledLowRankTable):
            raise TypeError("the table is of another backend")
        matmul_bindings.add_low_rank(self, out, x, table, rows.slots)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise_bindings.rms_norm(self, x, weight, eps, residual)

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        if isinstance(weight, BlockWeight | PanelWeight) and self._amx.takes(x, weight, activation):
            return self._amx.linear(self, x, weight, bias, activation=activation)
        if (
            isinstance(weight, BlockWeight)
            and self.options.activations == "int8"
            and matmul_bindings.fuses_gates(x, weight)
        ):
            return matmul_bindings.linear_blocks(self, x, weight, bias, activation=activation)
        return super().gated_linear(x, weight, bias, activation)

    def add(self, residual: Tensor, x: Tensor) -> None:
        # The norm's kernel adds x to the residual; unlike torch's addition, it can be recorded.
        ones = self._ones.get(x.shape[1])
        if ones is None:
            ones = self._ones[x.shape[1]] = torch.ones(x.shape[1], dtype=torch.float32)
        elementwise_bindings.rms_norm(self, x, ones, 1.0, residual)

    def latent_expansion(self, pages: KVPages) -> LatentExpansion | None:
        return (
            None
            if self.deterministic
            else attention_bindings.latent_expansion_cost(pages, narrow=self._amx.takes_prompts)
        )

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        if x.shape[0] > _MAX_SCALED_ROWS:
            return self._torch.scaled(x.float(), factor)
        # A lookup of all rows scales them; unlike torch's product, it can be recorded.
        places = self._places.get(x.shape[0])
        if places is None:
            places = self._places[x.shape[0]] = torch.arange(x.shape[0])
        return elementwise_bindings.embed_rows(self, x, places, factor)

    def all_reduce(self, x: Tensor) -> None:
        if self._ranks is not None:
            self._ranks.all_reduce(self, x)

    def gather_columns(self, part: Tensor) -> Tensor:
        return part if self._ranks is None else self._ranks.gather_columns(self, part)

    def experts(self, weights: Sequence[Weight], biases: Sequence[Tensor] | None = None) -> ExpertWeights:
        amx = self._amx
        try:
            return matmul_bindings.CompiledExperts(
                weights, biases, self.library, amx_blocks=amx.takes_blocks, amx_panels=amx.takes_panels
            )
        except ValueError:  # one product call per expert
            return ExpertWeights(weights, biases)

    def linear_of_experts(self, x: Tensor, experts: ExpertWeights, chosen: Tensor) -> Tensor:
        if isinstance(experts, matmul_bindings.CompiledExperts) and not self._is_faster_per_expert(experts, chosen):
            return matmul_bindings.linear_of_experts(self, x, experts, chosen)
        return reference.linear_of_experts(x, experts, chosen, self.linear)

    def _is_faster_per_expert(self, experts: matmul_bindings.CompiledExperts, chosen: Tensor) -> bool:
        """Whether one product per expert is faster than all experts at once, or needed for its arithmetic."""
        if experts.has_blocks:
            return self.options.activations != "int8"
        first, most = experts.weights[0], self._most_rows
        if isinstance(first, PanelWeight):
            most = self._most_panel_rows
        elif isinstance(first, Tensor) and first.dtype == torch.bfloat16:
            most = self._most_bfloat16_rows
        return chosen.numel() > most * len(experts) >= 0

    def embed(self, table: Tensor | BlockWeight, ids: Tensor, scale: float = 1.0) -> Tensor:
        if isinstance(table, BlockWeight):
            if self.dtype == torch.float32:
                return matmul_bindings.embed_blocks(self, table, ids, scale)
            rows = matmul_bindings.embed_blocks(self, table, ids).to(self.dtype)
            return rows if scale == 1 else rows * torch.tensor(scale, dtype=self.dtype)
        if scale != 1 and self.dtype != torch.float32:
            if table.dtype != self.dtype:  # rows are rounded before the multiplication
                return self._torch.embed(table, ids, scale)
            scale = reference.rounded(scale, self.dtype)
        return elementwise_bindings.embed_rows(self, table, ids, scale, dtype=self.dtype)

    def log1p(self, counts: Tensor) -> Tensor:
        return self._torch.log1p(counts)

    def buffer_filler(
        self, rows: PersistentBuffers, inv_freq: Tensor, q_scale: Tensor, score_scale: Tensor, block_size: int
    ) -> BufferFiller:
        return elementwise_bindings.CompiledBufferFiller(self.library, rows, inv_freq, q_scale, score_scale, block_size)

    def paged_attention(self, q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
        if attention_bindings.call_refusal(call):
            return self._torch.paged_attention(q, pages, call)
        if call.is_decode:
            return self._decode(q, pages, call)
        # Queries that see later keys are never decoded: their prompt is computed at once, in its own arithmetic.
        if self.deterministic and call.causal:
            return batched_attention.paged_attention(
                q, pages, call, decode=self._decode, prefill=self._prefill_as_decode
            )
        out = attention_bindings.paged_attention_prefill(
            self, q, pages, call, fewest=2, bf16_products=self.uniform_prefill_min_tokens > 0
        )
        singles = call.decode_part()
        if singles is not None:
            rows, own = singles
            out[rows] = self._decode(own.queries(q, rows), pages, own)
        return out

    def _prefill_as_decode(self, q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
        """Compute each query as the last token of a sequence of its own length, with the bits of decode."""
        if not call.has_ranges:
            return self._decode(q, pages, call.as_single_tokens())
        # Partial results of every range take memory; a row's bits do not depend on the other rows.
        parts = [(t, min(t + _RANGE_ROWS, call.num_tokens)) for t in range(0, call.num_tokens, _RANGE_ROWS)]
        return torch.cat([self._decode(q, pages, call.slice_tokens(*part).as_single_tokens()) for part in parts])

    def token_sampler(self, vocab_size: int) -> TokenSampler:
        # Sums over a larger vocabulary are not exact in float64.
        if vocab_size > elementwise_bindings.MAX_VOCAB:
            return self._torch.token_sampler(vocab_size)
        return elementwise_bindings.CompiledSampler(vocab_size, self.library)

    def token_logprobs(self, logits: Tensor, rows: Tensor, targets: Tensor, k: int) -> TopLogprobs:
        if logits.shape[1] > elementwise_bindings.MAX_VOCAB:
            return self._torch.token_logprobs(logits, rows, targets, k)
        return elementwise_bindings.token_logprobs(self, logits, rows, targets, k)

    @property
    def recording_refusal(self) -> str | None:
        return None

    def recorder(self, capacity: int) -> Recorder:
        return functools.partial(self.record, Arena(capacity))

    @contextmanager
    def record(self, arena: Arena) -> Iterator[call_recording.CompiledRecording]:
        """Record the calls of this backend; see `Recorder`."""
        ordinary = self.library
        with call_recording.record(ordinary, arena) as (recorded, self.library):
            try:
                yield recorded
            finally:
                self.library = ordinary
