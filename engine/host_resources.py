"""Host resources: memory and processors within cgroup limits, core affinity, thread counts.

Reads control groups of version 1 and 2. A container sees its own group at the root of the mount; elsewhere /proc/self/cgroup
names the group, and all groups above it limit it too. Affinity and OpenMP's wait policy must be set before torch is imported,
because OpenMP reads them once; this module does not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.engine.interface.config import ComputeConfig

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


# Rounds a thread polls at a barrier before it sleeps, a few microseconds.
SPIN_COUNT = 200

# An operator who sets one of these has decided how threads wait.
_OPERATOR_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def thread_wait_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that will import torch; nothing where the operator has set it already.

    libgomp polls for milliseconds by default. Where another program takes a core, the thread that waits polls through
    its own time slice while the one it waits for is not running, and a step of 2 ms takes 50. After a short poll the
    thread sleeps instead, and the core goes to whoever has work.
    """
    if any(name in environment for name in _OPERATOR_SETTINGS):
        return {}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


def apply_thread_settings(cores: Iterable[int] | None = None) -> None:
    """Settle how threads wait, where torch is still to be imported, and pin this process to `cores` if given."""
    if "torch" not in sys.modules:
        os.environ.update(thread_wait_environment(os.environ))
    if cores is not None:
        pin_to_cores(cores)


def split_cores() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cores this process may use, for the engine and for the server: the server takes the last. Raises LoadError."""
    if not hasattr(os, "sched_getaffinity"):
        raise LoadError("`compute.cores`: this system cannot pin processes to cores: leave it out")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise LoadError("`compute.cores` needs two cores or more, there is one: leave it out")
    return tuple(cores[:-1]), tuple(cores[-1:])


def partition_cores(replicas: int, *, leave_one: bool = False) -> tuple[tuple[int, ...], ...]:
    """The cores of this process in as many parts, as equal as can be, each of neighbours. Raises LoadError.

    leave_one: the last of all cores is for the server.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise LoadError("`replicas`: this system cannot pin processes to cores: leave it out")
    cores = sorted(os.sched_getaffinity(0))
    if leave_one:
        cores = list(split_cores()[0])
    if len(cores) < replicas:
        beside = " beside the server's (`compute.cores`)" if leave_one else ""
        raise LoadError(
            f"`replicas` is {replicas}, there are {len(cores)} cores for them{beside}: use {len(cores)} or fewer"
        )
    ends = [number * len(cores) // replicas for number in range(replicas + 1)]
    return tuple(tuple(cores[start:end]) for start, end in pairwise(ends))


def threads_per_rank(compute: ComputeConfig, usual: int | None = None, engines: int = 1) -> int:
    """Threads of each rank: as many as the operator says, else an equal part of the processors there are, at least one.

    usual: what one rank without cores of its own takes where it may, which is torch's choice. engines: that share a quota; cores
    of their own are parts already.
    """
    if compute.threads is not None:
        return compute.threads
    threads = (usual or processors()) if compute.cores is None else len(compute.cores)
    quota = processor_quota()
    if quota is not None:
        threads = min(threads, int(quota) // engines)
    return max(1, threads // compute.tensor_parallel)


def pin_to_cores(cores: Iterable[int]) -> None:
    """Let this process, and the threads it starts from now on, run on these cores only. Raises LoadError."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise LoadError(f"`compute.cores`: cannot use the cores {list(cores)}: {error.strerror}") from error
