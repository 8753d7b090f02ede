"""C++ SIMD kernels for CPUs, behind one C interface, and what calls them on tensors.

`library` finds and binds the compiled library and says why it cannot be used; `backend` offers its operations, which the other
modules hold: products, attention, rotation, norms, draws and more. An operation only ever runs or raises, and takes the library
that it calls, so that a recording can stand in for it. Exported is what tests and benchmarks call without a backend.
"""

from __future__ import annotations

from windlass.kernels.cpu.attention_bindings import (
    attention_refusal,
    paged_attention_decode,
    paged_attention_prefill,
    rerotate_cached_keys,
    rerotate_refusal,
    rotary_angles,
    rotate_and_append,
    rotate_queries,
    rotate_refusal,
)
from windlass.kernels.cpu.call_recording import Arena
from windlass.kernels.cpu.elementwise_bindings import (
    CompiledSamplingRow,
    draw_tokens,
    embed_rows,
    gated_activation,
    rms_norm,
    sampling_workspace,
    token_logprobs,
)
from windlass.kernels.cpu.library import load, unavailable_reason
from windlass.kernels.cpu.matmul_bindings import (
    embed_blocks,
    linear_blocks,
    linear_blocks_widened,
    linear_panels,
    linear_panels_widened,
    linear_refusal,
    linear_small,
    pack_panels,
)

__all__ = [
    "Arena",
    "CompiledSamplingRow",
    "attention_refusal",
    "draw_tokens",
    "embed_blocks",
    "embed_rows",
    "gated_activation",
    "linear_blocks",
    "linear_blocks_widened",
    "linear_panels",
    "linear_panels_widened",
    "linear_refusal",
    "linear_small",
    "load",
    "pack_panels",
    "paged_attention_decode",
    "paged_attention_prefill",
    "rerotate_cached_keys",
    "rerotate_refusal",
    "rms_norm",
    "rotary_angles",
    "rotate_and_append",
    "rotate_queries",
    "rotate_refusal",
    "sampling_workspace",
    "token_logprobs",
    "unavailable_reason",
]
