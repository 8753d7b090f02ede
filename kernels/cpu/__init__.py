"""C++ SIMD kernels for CPUs: few-row linear, attention, rotation and re-rotation of keys, norm and gated activations.

`library` finds and binds the compiled library and says why it cannot be used; `attention`, `blocks`, `linear`, `ops`,
`panels`, `rotary` and `sampling` are the operations on tensors. They only ever run here or raise: which of them runs
is the business of `backend`.
"""

from windlass.kernels.cpu.arena import Arena
from windlass.kernels.cpu.attention import attention_refusal, paged_attention_decode, paged_attention_prefill
from windlass.kernels.cpu.blocks import embed_blocks, linear_blocks, linear_blocks_widened
from windlass.kernels.cpu.library import KernelsUnavailableError, Library, load, runnable, unavailable_reason
from windlass.kernels.cpu.linear import linear_refusal, linear_small
from windlass.kernels.cpu.ops import (
    embed_rows,
    gated_activation,
    rms_norm,
    soft_cap,
)
from windlass.kernels.cpu.panels import linear_panels, linear_panels_widened, pack_panels
from windlass.kernels.cpu.recording import CompiledRecording, record
from windlass.kernels.cpu.rotary import (
    rerotate_cached_keys,
    rerotate_refusal,
    rotary_angles,
    rotate_and_append,
    rotate_refusal,
    turn_queries,
)
from windlass.kernels.cpu.sampling import CompiledDraw, draw_tokens, drawing_memory, token_logprobs

__all__ = [
    "Arena",
    "CompiledDraw",
    "CompiledRecording",
    "KernelsUnavailableError",
    "Library",
    "attention_refusal",
    "draw_tokens",
    "drawing_memory",
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
    "record",
    "rerotate_cached_keys",
    "rerotate_refusal",
    "rms_norm",
    "rotary_angles",
    "rotate_and_append",
    "rotate_refusal",
    "runnable",
    "soft_cap",
    "token_logprobs",
    "turn_queries",
    "unavailable_reason",
]
