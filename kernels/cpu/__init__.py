"""C++ SIMD kernels for CPUs, behind one C interface, and what calls them on tensors.

`library` finds and binds the compiled library and says why it cannot be used; `backend` offers its operations, which the other
modules hold: products, attention, rotation, norms, draws and more. An operation only ever runs or raises, and takes the library
that it calls, so that a recording can stand in for it. Exported is what tests and benchmarks call without a backend.
"""

from windlass.kernels.cpu.arena import Arena
from windlass.kernels.cpu.attention import attention_refusal, paged_attention_decode, paged_attention_prefill
from windlass.kernels.cpu.blocks import embed_blocks, linear_blocks, linear_blocks_widened
from windlass.kernels.cpu.library import load, unavailable_reason
from windlass.kernels.cpu.linear import linear_refusal, linear_small
from windlass.kernels.cpu.ops import embed_rows, gated_activation, rms_norm
from windlass.kernels.cpu.panels import linear_panels, linear_panels_widened, pack_panels
from windlass.kernels.cpu.rotary import (
    rerotate_cached_keys,
    rerotate_refusal,
    rotary_angles,
    rotate_and_append,
    rotate_queries,
    rotate_refusal,
)
from windlass.kernels.cpu.sampling import CompiledSamplingRow, draw_tokens, sampling_workspace, token_logprobs

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
