"""C++ SIMD kernels for CPUs: few-row linear, decode attention, rotation with append, norm and gated activations.

`library` finds and binds the compiled library and says why it cannot be used; `ops` are the operations on tensors. The
operations only ever run here or raise: choosing between backends is `windlass.kernels.dispatch`'s business.
"""

from windlass.kernels.cpu.library import Library, load, runnable, unavailable_reason
from windlass.kernels.cpu.linear import linear_refusal, linear_small, linear_widened, prefers
from windlass.kernels.cpu.ops import (
    attention_refusal,
    gated_activation,
    paged_attention_decode,
    rms_norm,
    rotate_and_append,
    rotate_refusal,
    silu_and_mul,
)

__all__ = [
    "Library",
    "attention_refusal",
    "gated_activation",
    "linear_refusal",
    "linear_small",
    "linear_widened",
    "load",
    "paged_attention_decode",
    "prefers",
    "rms_norm",
    "rotate_and_append",
    "rotate_refusal",
    "runnable",
    "silu_and_mul",
    "unavailable_reason",
]
