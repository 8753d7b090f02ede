"""What of this machine the process may use: memory and processors, within the limits of its control groups (Linux).

Reads files of the system, of control groups in version 1 and 2. A container sees its own group at the
root of what is mounted; elsewhere /proc/self/cgroup says where the group lies, and the groups above it limit it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MOUNTED = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def processors() -> int:
    """How many threads may compute at once: those of the process's affinity, or what its quota comes to if that is less.

    A quota of 2.5 gives 2: a third thread would make all of them stand still for part of each period.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = processor_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def processor_quota() -> float | None:
    """Processors' worth of time that the process may take; None where nothing limits it."""
    quotas = []
    for folder in _folders("cpu"):
        limit, period = _words(folder / "cpu.max"), 0
        if len(limit) == 2:
            quota, period = _whole(limit[0]), _whole(limit[1]) or 0
        else:
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us") or 0
        if quota is not None and quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def available_memory() -> int | None:
    """Bytes of main memory that the process may still take; None where the system does not tell."""
    free = _table(Path("/proc/meminfo")).get("MemAvailable")
    left = [] if free is None else [free * 1024]
    for folder in _folders("memory"):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is None or used is None:
            limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        # What files have left in memory counts as used there, and goes when memory is asked for: a model read twice, say.
        files = _table(folder / "memory.stat")
        kept = [files.get(f"total_{name}", files.get(name, 0)) for name in ("active_file", "inactive_file")]
        left.append(max(0, limit - used + sum(kept)))
    return min(left, default=None)


def _folders(controller: str) -> Iterator[Path]:
    """Where limits of this controller may stand, in either version: what is mounted, and each group down to our own."""
    places = {_MOUNTED, _MOUNTED / controller}
    for line in _text(_OWN).splitlines():
        _, names, group = [*line.split(":", 2), "", ""][:3]
        if names == "":
            mounts = [_MOUNTED, _MOUNTED / "unified"]
        elif controller in names.split(","):
            mounts = [_MOUNTED / names, _MOUNTED / controller]
        else:
            continue
        path = Path(group.lstrip("/"))
        places.update(mount / above for mount in mounts for above in (path, *path.parents) if ".." not in above.parts)
    yield from sorted(places)


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number, by name; nothing where there is no such file."""
    lines = [line.split() for line in _text(path).splitlines()]
    return {
        words[0].rstrip(":"): number for words in lines if len(words) > 1 and (number := _whole(words[1])) is not None
    }


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _number(path: Path) -> int | None:
    return _whole(_text(path))


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:  # no such file, or "max"
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
