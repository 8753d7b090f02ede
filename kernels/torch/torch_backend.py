"""Torch backends, on any device: batched operations, and row-independent ones for determinism."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.attention_call import AttentionCall, LatentExpansion
from windlass.kernels.backend import Backend, BackendOptions, Weight
from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.layouts.low_rank_weights import AdapterSlots, LowRankTable, LowRankUpdate
from windlass.kernels.layouts.weight_layouts import (
    BlockRows,
    BlockWeight,
    ExpertWeights,
    PanelRows,
    PanelWeight,
    StackedWeight,
)
from windlass.kernels.step_recording import BufferFiller, PersistentBuffers, Recorder
from windlass.kernels.token_sampling import TokenSampler, TopLogprobs
from windlass.kernels.torch import (
    batched_attention,
    block_quantization,
    linear,
    reference,
    row_independent,
    torch_sampler,
)
from windlass.kernels.torch.collectives import TorchCollectives
from windlass.kernels.torch.row_independent import by_row
from windlass.kernels.torch.torch_sampler import TorchSampler

Angles = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def buffer_filler(
    rows: PersistentBuffers, q_scale: Tensor, score_scale: Tensor, block_size: int, angles: Angles
) -> BufferFiller:
    """See `Backend.buffer_filler`. angles: cosines and sines for rotary rows [B] at positions [B]."""
    place = np.arange(rows.metadata.shape[1])
    positions = torch.from_numpy(rows.positions)

    def fill(tables: NDArray[np.int32], blocks: int) -> None:
        _, index, first, rotary, table = rows.metadata
        np.add(index, first, out=rows.positions)
        np.add(index, 1, out=rows.lengths)
        rows.tables[:, :, :blocks] = tables[:, table, :blocks]
        block, offset = np.divmod(index, block_size)
        np.multiply(rows.tables[:, place, block], np.int64(block_size), out=rows.slots)
        if rows.slots.min() < 0:
            raise IndexError("a scheduled token has no block to go to")
        rows.slots[...] += offset
        ids = torch.from_numpy(rotary)
        for target, found in zip((rows.cos, rows.sin), angles(ids, positions), strict=True):
            target.numpy()[...] = found.numpy()
        rows.q_scale.numpy()[...] = q_scale.index_select(1, ids).numpy()
        rows.score_scale.numpy()[...] = score_scale.index_select(0, ids).numpy()

    return fill


class TorchBackend(Backend):
    """Batched torch calls. refusal: why the faster backend of this kind of device cannot be used; None if there is none."""

    repack = staticmethod(block_quantization.repack_gguf_blocks)
    rms_norm = staticmethod(reference.rms_norm)
    rms_norm_in_place = staticmethod(reference.rms_norm_in_place)
    layer_norm = staticmethod(reference.layer_norm)
    activation = staticmethod(reference.activated)
    gated_activation = staticmethod(reference.gated_activation)
    clamped_glu = staticmethod(reference.clamped_glu)
    xielu = staticmethod(reference.xielu)
    soft_cap = staticmethod(reference.soft_cap)
    route = staticmethod(reference.route)
    sum_of_experts = staticmethod(reference.weighted_sum)
    rotate_and_append = staticmethod(reference.rotate_and_append)
    rotate_queries = staticmethod(reference.rotate_queries)
    latent_queries = staticmethod(reference.latent_queries)
    latent_values = staticmethod(reference.latent_values)
    short_convolution = staticmethod(reference.short_convolution)
    gated_delta_rule = staticmethod(reference.gated_delta_rule)
    state_space = staticmethod(reference.state_space)

    def __init__(self, options: BackendOptions, refusal: str | None = None) -> None:
        super().__init__(options)
        self._refusal = refusal
        self._ranks = None
        if options.ranks is not None:
            self._ranks = TorchCollectives(options.ranks, options.device, in_order=options.deterministic)

    def explain(self) -> str:
        return f"plain torch kernels: {self._refusal or f'there are no others for {self.device.type}'}"

    @property
    def is_fallback(self) -> bool:
        return self._refusal is not None

    def pack(self, target: PanelRows | BlockRows, source: Tensor) -> None:
        if isinstance(target, PanelRows):
            raise TypeError("panel weights are for the compiled kernels only")
        block_quantization.quantize_into_blocks(target, source)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, StackedWeight):
            spans = weight.spans()
            found = [self.linear(x, part, None if bias is None else bias[a:b]) for part, a, b in spans]
            return torch.cat(found, dim=1)
        if isinstance(weight, BlockWeight):
            return self._blocks_product(x, weight, bias)
        if isinstance(weight, PanelWeight):
            raise TypeError("panel weights are for the compiled kernels only")
        return self._product(x, weight, bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        widens = linear.widens(self.device, x.dtype, weight.dtype)
        return (linear.linear_widened if widens else linear.linear)(x, weight, bias)

    def _blocks_product(self, x: Tensor, weight: BlockWeight, bias: Tensor | None) -> Tensor:
        product = linear.linear_blocks if self.options.activations == "int8" else linear.linear_blocks_widened
        return product(x, weight, bias)

    def add_low_rank(self, out: Tensor, x: Tensor, table: LowRankTable, rows: AdapterSlots) -> None:
        for slot, own in rows.segments(self.device):
            change = table.changes[slot]
            if change is not None:
                self._add_change(out, x, change, own)

    def _add_change(self, out: Tensor, x: Tensor, change: LowRankUpdate, rows: Tensor | None) -> None:
        low = self.linear(x if rows is None else x[rows], change.plain())  # [n, R]
        for part in change.parts:
            own = low[:, part.rank_first : part.rank_first + part.rank].contiguous()
            view = out[:, part.first : part.first + part.columns]
            added = self.linear(own, part.plain()) * part.scale
            if rows is None:
                view += added
            else:
                view.index_add_(0, rows, added)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def latent_expansion(self, pages: KVPages) -> LatentExpansion | None:
        # On other devices the host does not know the lengths of sequences.
        return None if self.deterministic or self.device.type != "cpu" else LatentExpansion(1.0, 1.0)

    def add(self, residual: Tensor, x: Tensor) -> None:
        residual += x

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def clip(self, x: Tensor, limit: float) -> None:
        x.clamp_(-limit, limit)

    def scale_rows(self, x: Tensor, factors: Tensor) -> None:
        x.copy_(x.float() * factors[:, None])

    def scale_columns(self, x: Tensor, first: Tensor, second: Tensor) -> None:
        x.copy_(x.float() * (first * second))

    def multiply(self, x: Tensor, by: Tensor) -> None:
        x.mul_(by)  # computed in float32 for narrow types too, rounded once

    def gate_by_sigmoid(self, x: Tensor, gate: Tensor) -> None:
        x.mul_(gate.float().sigmoid())

    def all_reduce(self, x: Tensor) -> None:
        if self._ranks is not None:
            self._ranks.all_reduce(x)

    def gather_columns(self, part: Tensor) -> Tensor:
        return part if self._ranks is None else self._ranks.gather_columns(part)

    def linear_of_experts(self, x: Tensor, experts: ExpertWeights, chosen: Tensor) -> Tensor:
        return reference.linear_of_experts(x, experts, chosen, self.linear)

    def embed(self, table: Tensor | BlockWeight, ids: Tensor, scale: float = 1.0) -> Tensor:
        rows = table.index_select(0, ids) if isinstance(table, Tensor) else table.dequantize(ids)
        rows = rows.to(self.dtype)
        # The scale is rounded to the compute dtype first, as the reference implementation does.
        return rows if scale == 1 else rows * reference.rounded(scale, self.dtype)

    def log1p(self, counts: Tensor) -> Tensor:
        return counts.float().log1p()

    def rotary_angles(self, inv_freq: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        plain = row_independent.rotary_angles if self.device.type == "cpu" else reference.rotary_angles
        return plain(inv_freq, rows, positions)

    def buffer_filler(
        self, rows: PersistentBuffers, inv_freq: Tensor, q_scale: Tensor, score_scale: Tensor, block_size: int
    ) -> BufferFiller:
        return buffer_filler(rows, q_scale, score_scale, block_size, functools.partial(self.rotary_angles, inv_freq))

    def rerotate_cached_keys(
        self, pages: KVPages, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor, *, values: bool = True
    ) -> None:
        slots = torch.stack((sources, targets))
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < pages.num_slots:
            raise IndexError("rerotate_cached_keys: a slot is outside the pages")
        reference.rerotate_cached_keys(pages, sources, targets, cos, sin, values=values)

    def paged_attention(self, q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
        if call.has_ranges:
            return reference.paged_attention(q, pages, call)
        return batched_attention.paged_attention(q, pages, call)

    def row_maxima(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids, values = torch_sampler.row_maxima(logits)
        return torch.tensor(ids), torch.tensor(values, dtype=torch.float32)

    def token_sampler(self, vocab_size: int) -> TokenSampler:
        return TorchSampler()

    def token_logprobs(self, logits: Tensor, rows: Tensor, targets: Tensor, k: int) -> TopLogprobs:
        return torch_sampler.token_logprobs(logits, rows, targets, k)

    @property
    def recording_refusal(self) -> str | None:
        return self._refusal or f"the model is on {self.device}"

    def recorder(self, capacity: int) -> Recorder:
        raise ValueError(f"nothing is recorded: {self.recording_refusal}")


class RowIndependentBackend(TorchBackend):
    """Torch calls with independent rows (see `row_independent`): deterministic and slow."""

    rms_norm = staticmethod(row_independent.rms_norm)
    rms_norm_in_place = staticmethod(row_independent.rms_norm_in_place)
    layer_norm = staticmethod(by_row(reference.layer_norm))
    activation = staticmethod(by_row(reference.activated))
    gated_activation = staticmethod(by_row(reference.gated_activation))
    clamped_glu = staticmethod(by_row(reference.clamped_glu))
    xielu = staticmethod(by_row(reference.xielu))
    soft_cap = staticmethod(by_row(reference.soft_cap))
    route = staticmethod(row_independent.route)
    latent_queries = staticmethod(row_independent.latent_queries)
    latent_values = staticmethod(row_independent.latent_values)
    paged_attention = staticmethod(row_independent.paged_attention)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return row_independent.linear(x, weight, bias)

    def _blocks_product(self, x: Tensor, weight: BlockWeight, bias: Tensor | None) -> Tensor:
        if self.options.activations == "int8":
            return linear.linear_blocks(x, weight, bias)
        return linear.linear_blocks_widened(x, weight, bias, row_independent.linear)

    def gate_by_sigmoid(self, x: Tensor, gate: Tensor) -> None:
        for row, own in zip(x, gate, strict=True):
            super().gate_by_sigmoid(row, own.clone())

    def log1p(self, counts: Tensor) -> Tensor:
        # Torch's log1p differs between a vector's body and its tail.
        return torch.tensor([math.log1p(n) for n in counts.tolist()], dtype=torch.float32, device=counts.device)
