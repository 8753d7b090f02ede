"""How the threads of an engine wait for each other, and on which cores they and the server run.

Responsible for the environment an engine starts in and for affinities. Both must be settled before torch is imported,
since OpenMP reads them once; so this module knows no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise

from windlass.engine.api.config import ComputeConfig
from windlass.engine.api.machine import processor_quota, processors
from windlass.engine.errors import LoadError

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
