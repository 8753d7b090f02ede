"""Picks a backend for each operation by the operands alone: compiled CPU kernels where they take them, else plain torch.

A backend answers with the reason it refuses (`cpu.linear_refusal`, …), so `explain` can tell a person what runs here.
Under `deterministic` the bits of a row depend on that row's own sequence only: never on the rows beside it, on how its
sequence was cut into chunks, or on where its blocks lie. Operations without that argument always have the property.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels import cpu
from windlass.kernels.attention_call import AttentionCall
from windlass.kernels.layouts.packed import PackedRows, PackedWeight
from windlass.kernels.layouts.pages import KVPages
from windlass.kernels.layouts.panels import DTYPES, PanelRows, PanelWeight
from windlass.kernels.torch import batched, reference, rowwise
from windlass.kernels.torch import quantized as quantized_reference

# Rows of bfloat16 from which torch's product leads where the processor multiplies them natively (measured on Zen 4: as
# quick at 8 rows, 1.3 times at 16, 2.3 times at 512).
_FEWEST_NATIVE_ROWS = 12


def explain() -> str:
    """One line on which kernels this process uses on a CPU, and why."""
    reason = cpu.unavailable_reason()
    return f"compiled CPU kernels ({cpu.load().isa})" if reason is None else f"plain torch kernels: {reason}"


def reads_narrow_weights() -> bool:
    """Whether `linear` multiplies float32 rows by bfloat16 or float16 weights at the cost of reading them narrow."""
    return cpu.unavailable_reason() is None


def lays_out_panels(
    dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device, *, deterministic: bool = False
) -> bool:
    """Whether `linear` is quickest with matrices of weight_dtype as `PanelWeight` where rows are of `dtype`.

    Products of bfloat16 rows by torch, where the processor has them, want the weight as it is.
    """
    native = dtype == weight_dtype == torch.bfloat16 and _multiplies_bfloat16() and not deterministic
    return device.type == "cpu" and weight_dtype in DTYPES and not native and cpu.unavailable_reason() is None


def linear(
    x: Tensor, weight: Tensor | PackedWeight | PanelWeight, bias: Tensor | None = None, *, deterministic: bool = False
) -> Tensor:
    """x @ weight.T + bias. x: [T, K], weight: [N, K] in x's dtype or a narrower one, bias: [N]. Returns [T, N] in x's dtype.

    Sums are float32 on a CPU whatever the storage. A packed weight meets x rounded to 8 bits; its sums are integers, so a
    row's bits depend on that row alone, deterministic or not. A weight in panels needs the compiled kernels.
    """
    if isinstance(weight, PanelWeight):
        few = deterministic or cpu.few_enough(x)
        return (cpu.linear_panels if few else cpu.linear_panels_widened)(x, weight, bias)
    if isinstance(weight, PackedWeight):
        compiled = cpu.unavailable_reason() is None
        return (cpu.linear_packed if compiled else quantized_reference.linear)(x, weight, bias)
    if deterministic:
        return rowwise.linear(x, weight, bias) if cpu.linear_refusal(x, weight) else cpu.linear_small(x, weight, bias)
    if x.is_cpu:
        native = x.dtype == weight.dtype == torch.bfloat16 and _multiplies_bfloat16()
        if (x.shape[0] < _FEWEST_NATIVE_ROWS or not native) and cpu.prefers(x, weight, bias):
            return cpu.linear_small(x, weight, bias, library=cpu.load())  # the operands are checked already
        if weight.dtype != torch.float32 and not native:
            return cpu.linear_widened(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), bias)


def pack(target: PackedRows | PanelRows, source: Tensor) -> None:
    """Put source [rows, columns], float32 or narrower on the CPU, into rows of a packed weight or of one in panels.

    Quantizing gives the same bytes everywhere; panels need the compiled kernels.
    """
    if isinstance(target, PanelRows):
        cpu.pack_panels(target, source)
    elif cpu.unavailable_reason() is None:
        cpu.pack_rows(target, source)
    else:
        quantized_reference.pack(target, source)


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 natively; elsewhere library products emulate it, several times slower."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, deterministic: bool = False) -> Tensor:
    """See `reference.rms_norm`."""
    if x.is_cpu and cpu.unavailable_reason() is None:
        if x.dim() in (2, 3):
            return cpu.rms_norm(x, weight, eps)
        return cpu.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
    return rowwise.rms_norm(x, weight, eps) if deterministic else reference.rms_norm(x, weight, eps)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, deterministic: bool = False) -> Tensor:
    """Add x to `residual` in place, rounded to its dtype, and return the sum's `rms_norm`. Both [T, D], of one dtype."""
    if x.is_cpu and cpu.unavailable_reason() is None:
        return cpu.rms_norm(x, weight, eps, residual)
    residual += x
    return rms_norm(residual, weight, eps, deterministic=deterministic)


def gated_activation(gate_up: Tensor, activation: str, *, deterministic: bool = False) -> Tensor:
    """See `reference.gated_activation`."""
    if gate_up.is_cpu and cpu.unavailable_reason() is None:
        return cpu.gated_activation(gate_up, activation)
    plain = rowwise.gated_activation if deterministic else reference.gated_activation
    return plain(gate_up, activation)


def soft_cap(x: Tensor, cap: float, *, deterministic: bool = False) -> Tensor:
    """See `reference.soft_cap`."""
    if x.is_cpu and cpu.unavailable_reason() is None:
        return cpu.soft_cap(x, cap)
    return rowwise.soft_cap(x, cap) if deterministic else reference.soft_cap(x, cap)


def embed_rows(table: Tensor, ids: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """table[ids] in `dtype` times the scale rounded to it. table: [N, D], ids: [T] int64. Returns [T, D], memory of its own."""
    if dtype == torch.float32 and table.is_cpu and cpu.unavailable_reason() is None:
        return cpu.embed_rows(table, ids, scale)
    rows = table.index_select(0, ids).to(dtype)
    return rows if scale == 1 else rows * torch.tensor(scale, dtype=dtype, device=rows.device)


def rotary_angles(
    inv_freq: Tensor, rows: Tensor, positions: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.rotary_angles`; an element's bits depend on its frequency and position only.

    out: two contiguous float32 [G, T, d/2] on the CPU to write into and return.
    """
    if inv_freq.is_cpu and cpu.unavailable_reason() is None:
        return cpu.rotary_angles(inv_freq, rows, positions, out=out)
    plain = rowwise.rotary_angles if inv_freq.is_cpu else reference.rotary_angles
    found = plain(inv_freq, rows, positions)
    if out is None:
        return found
    for target, source in zip(out, found, strict=True):
        target.numpy()[...] = source.numpy()
    return out


def rotate_and_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_scale: Tensor, pages: KVPages, slots: Tensor
) -> None:
    """See `reference.rotate_and_append`."""
    if q.is_cpu and cpu.rotate_refusal(q, k, v, pages.key, pages.value, **pages.scales) is None:
        cpu.rotate_and_append(
            q,
            k,
            v,
            cos,
            sin,
            q_scale,
            pages.key,
            pages.value,
            slots,
            key_scales=pages.key_scale,
            value_scales=pages.value_scale,
        )
    else:
        reference.rotate_and_append(q, k, v, cos, sin, q_scale, pages, slots)


def move_cached_keys(
    pages: KVPages, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor, *, values: bool = True
) -> None:
    """See `reference.move_cached_keys`."""
    if cpu.move_refusal(pages.key, pages.value, **pages.scales) is None:
        cpu.move_cached_keys(
            pages.key,
            pages.value,
            sources,
            targets,
            cos,
            sin,
            key_scales=pages.key_scale,
            value_scales=pages.value_scale,
            values=values,
        )
    else:
        slots = torch.stack((sources, targets))
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < pages.num_slots:
            raise IndexError("move_cached_keys: a slot lies outside the pages")
        reference.move_cached_keys(pages, sources, targets, cos, sin, values=values)


def paged_attention(q: Tensor, pages: KVPages, call: AttentionCall, *, deterministic: bool = False) -> Tensor:
    """See `reference.paged_attention`. Raises ValueError for what no deterministic form does."""
    compiled = q.is_cpu and cpu.attention_refusal(q, pages, call) is None
    if compiled and not deterministic:
        return _compiled_attention(q, pages, call)
    if compiled:
        return batched.paged_attention(q, pages, call, decode=cpu.paged_attention_decode, prefill=_compiled_prefill)
    if deterministic:
        return rowwise.paged_attention(q, pages, call)
    if batched.attention_refusal(call):
        return reference.paged_attention(q, pages, call)
    return batched.paged_attention(q, pages, call)


def _compiled_attention(q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
    """Single-token rows by the decode kernel, longer rows by the blocked one."""
    if call.only_single_tokens:
        return cpu.paged_attention_decode(q, pages, call)
    out = cpu.paged_attention_prefill(q, pages, call, fewest=2)
    singles = call.single_tokens()
    if singles is not None:
        rows, own = singles
        out[rows] = cpu.paged_attention_decode(q[rows], pages, own)
    return out


def _compiled_prefill(q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
    """Each query as the last token of a sequence of its own length: the bits that decoding gives."""
    return cpu.paged_attention_decode(q, pages, call.token_by_token())
