"""How much memory there is, and what share of it KV pages get. Reads the machine; decides nothing about blocks, and imports
no torch: what a GPU has left is for the caller to say."""

from __future__ import annotations

from pathlib import Path

DEVICE_SHARE = 0.9  # of a GPU's memory, where the operator names none
_CPU_SHARE = 0.5
_FALLBACK_BYTES = 2 << 30
_CGROUP = Path("/sys/fs/cgroup")


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


def available_memory() -> int | None:
    """Free bytes of main memory, within the container's limit if there is one; None where the system does not tell."""
    free = _numbers(Path("/proc/meminfo")).get("MemAvailable")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return None if free is None else free * 1024
    # What files have left in memory counts as used there, and goes when memory is asked for: a model read twice, say.
    files = _numbers(_CGROUP / "memory.stat")
    inside = limit - used + files.get("active_file", 0) + files.get("inactive_file", 0)
    return max(0, inside if free is None else min(free * 1024, inside))


def gib(num_bytes: float) -> str:
    """A size for people: "7.6 GiB", small ones in MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number, by name; nothing where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in map(str.split, lines) if len(words) > 1}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None
