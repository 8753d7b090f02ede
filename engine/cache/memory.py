"""What share of memory KV pages get. Imports no torch, and asks nobody: what is free is for the caller to say."""

from __future__ import annotations

DEVICE_SHARE = 0.9  # of a GPU's memory, where the operator names none
_CPU_SHARE = 0.5
_FALLBACK_BYTES = 2 << 30


def default_kv_budget(free: int | None, engines: int = 1) -> int:
    """Bytes of KV cache to reserve in main memory when the operator names none: a share of what is free beside the weights.

    engines: that have equal parts of it.
    """
    if free is None:
        return _FALLBACK_BYTES // 2 // engines
    return int(free * _CPU_SHARE) // engines


def device_kv_budget(total: int, taken: int, free: int, share: float | None, step: int = 0) -> int:
    """Bytes of KV cache in a GPU's memory, less than 1 where there are none.

    total, free: of the GPU, whoever uses it. taken: by this engine already. share: of the GPU that is this engine's, None:
    `DEVICE_SHARE`. step: what the largest step needs beside weights and cache.
    """
    return min(int(total * (share or DEVICE_SHARE)) - taken, free) - step


def gib(num_bytes: float) -> str:
    """A size for people: "7.6 GiB", small ones in MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
