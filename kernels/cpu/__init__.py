"""C++ SIMD kernels for CPUs behind one C interface, and their bindings for tensors.

`library` finds and binds the compiled library, or reports why it cannot be used. `*_bindings` check operands and call it;
`cpu_backend` combines them. The first operand of every function is a backend or a library, which a recording can replace. The
names imported here are those that tests and benchmarks use without a backend.
"""

from __future__ import annotations

from windlass.kernels.cpu.attention_bindings import (
    attention_refusal,
    paged_attention_decode,
    paged_attention_prefill,
    rerotate_cached_keys,
    rotary_angles,
    rotate_and_append,
    rotate_queries,
)
from windlass.kernels.cpu.call_recording import Arena
from windlass.kernels.cpu.elementwise_bindings import (
    CompiledSamplingRow,
    embed_rows,
    gated_activation,
    rms_norm,
    sample_tokens,
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
