"""Host resources: memory and processors within cgroup limits, core affinity, thread counts.

Reads control groups of version 1 and 2. A container sees its own group at the root of the mount; elsewhere /proc/self/cgroup
names the group, which all its parent groups limit too. Affinity and OpenMP's wait policy must be set before torch is imported,
because OpenMP reads them once; this module does not import torch.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.engine.interface.config import ComputeConfig

_MOUNTED = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")

SPIN_COUNT = 200  # rounds that a thread polls at a barrier before it sleeps, a few microseconds
_OPERATOR_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # if the operator set one, it is not overridden

# -- processors and memory ---------------------------------------------------------------------------------------------


def processors() -> int:
    """Threads that may compute at once: the cores of the process's affinity, or its quota if that is less.

    A quota of 2.5 gives 2: with a third thread, all of them would pause for part of each period.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = processor_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def processor_name() -> str:
    """The processor's name and the threads that may compute at once: "AMD EPYC 9B14, 2 threads"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, "") or platform.processor() or platform.machine()
    return f"{name}, {processors()} {'thread' if processors() == 1 else 'threads'}"


def processor_quota() -> float | None:
    """Processor time that the process may use, in processors; None if unlimited."""
    quotas = []
    for folder in _folders("cpu"):
        limit, period = _text(folder / "cpu.max").split(), 0
        if len(limit) == 2:
            quota, period = _whole(limit[0]), _whole(limit[1]) or 0
        else:
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us") or 0
        if quota is not None and quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def available_memory() -> int | None:
    """Bytes of main memory that the process may still use; None if the system does not report it."""
    free = read_table(Path("/proc/meminfo")).get("MemAvailable")
    left = [] if free is None else [free * 1024]
    for folder in _folders("memory"):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is None or used is None:
            limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        # Cached file pages count as used here, but the kernel frees them on demand.
        files = read_table(folder / "memory.stat")
        cached = [files.get(f"total_{name}", files.get(name, 0)) for name in ("active_file", "inactive_file")]
        left.append(max(0, limit - used + sum(cached)))
    return min(left, default=None)


def _folders(controller: str) -> Iterator[Path]:
    """Folders that may hold limits of this controller, in either version: the mount, and each group down to our own."""
    folders = {_MOUNTED, _MOUNTED / controller}
    for line in _text(_OWN).splitlines():
        _, names, group = [*line.split(":", 2), "", ""][:3]
        if names == "":
            mounts = [_MOUNTED, _MOUNTED / "unified"]
        elif controller in names.split(","):
            mounts = [_MOUNTED / names, _MOUNTED / controller]
        else:
            continue
        path = Path(group.lstrip("/"))
        folders.update(mount / above for mount in mounts for above in (path, *path.parents) if ".." not in above.parts)
    yield from sorted(folders)


def read_table(path: Path) -> dict[str, int]:
    """Lines of a name and a number, by name; empty if there is no such file."""
    lines = [line.split() for line in _text(path).splitlines()]
    return {
        words[0].rstrip(":"): number for words in lines if len(words) > 1 and (number := _whole(words[1])) is not None
    }


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


# -- threads and cores -------------------------------------------------------------------------------------------------
def thread_wait_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to the environment of a process that will import torch; none if the operator has set one already.

    By default libgomp polls for milliseconds. If another program uses a core, a waiting thread then polls through its own time
    slice while the thread it waits for is not running, and a step of 2 ms takes 50. With a short poll it sleeps instead.
    """
    if any(name in environment for name in _OPERATOR_SETTINGS):
        return {}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


def apply_thread_settings(cores: Iterable[int] | None = None) -> None:
    """Set the wait policy of threads, unless torch is imported already, and pin this process to `cores` if given."""
    if "torch" not in sys.modules:
        os.environ.update(thread_wait_environment(os.environ))
    if cores is not None:
        pin_to_cores(cores)


def split_cores() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cores of this process, for the engine and for the server, which gets the last one. Raises LoadError."""
    if not hasattr(os, "sched_getaffinity"):
        raise LoadError("`compute.cores`: this system cannot pin processes to cores: leave it out")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise LoadError("`compute.cores` needs two cores or more, there is one: leave it out")
    return tuple(cores[:-1]), tuple(cores[-1:])


def partition_cores(replicas: int, *, leave_one: bool = False) -> tuple[tuple[int, ...], ...]:
    """The cores of this process in `replicas` contiguous parts of nearly equal size. Raises LoadError.

    leave_one: the last core is left to the server.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise LoadError("`replicas`: this system cannot pin processes to cores: leave it out")
    cores = sorted(os.sched_getaffinity(0))
    if leave_one:
        cores = list(split_cores()[0])
    if len(cores) < replicas:
        server = " next to the server's (`compute.cores`)" if leave_one else ""
        raise LoadError(
            f"`replicas` is {replicas}, there are {len(cores)} cores for them{server}: use {len(cores)} or fewer"
        )
    ends = [number * len(cores) // replicas for number in range(replicas + 1)]
    return tuple(tuple(cores[start:end]) for start, end in pairwise(ends))


def threads_per_rank(compute: ComputeConfig, usual: int | None = None, engines: int = 1) -> int:
    """Threads of each rank: the operator's number, else an equal part of the processors, at least one.

    usual: threads of a single rank without cores of its own, which is torch's choice. engines: number of engines that share the
    quota; their own cores are partitioned already.
    """
    if compute.threads is not None:
        return compute.threads
    threads = (usual or processors()) if compute.cores is None else len(compute.cores)
    quota = processor_quota()
    if quota is not None:
        threads = min(threads, int(quota) // engines)
    return max(1, threads // compute.tensor_parallel)


def pin_to_cores(cores: Iterable[int]) -> None:
    """Restrict this process, and the threads it starts from now on, to these cores. Raises LoadError."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise LoadError(f"`compute.cores`: cannot use the cores {list(cores)}: {error.strerror}") from error
