"""How much memory there is for KV pages. Reads the machine; decides nothing about blocks."""

from __future__ import annotations

from pathlib import Path

import torch

_CPU_SHARE, _CUDA_SHARE = 0.5, 0.9
_FALLBACK_BYTES = 2 << 30


def default_kv_budget(device: torch.device) -> int:
    """Bytes of KV cache to reserve when the operator names none: a share of what is free once the weights are loaded."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE)
    return int(available_memory() * _CPU_SHARE)


def available_memory() -> int:
    """Free bytes of main memory, within the container's limit if there is one."""
    free = _meminfo().get("MemAvailable", _FALLBACK_BYTES)
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _cgroup_number(name: str) -> int | None:
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None
