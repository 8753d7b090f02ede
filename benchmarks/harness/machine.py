"""Properties of this machine, and its use by other processes. The share of foreign work needs Linux's /proc."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections import abc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """The machine in plain data: processor, the instruction sets that matter, cores, memory."""
    info = _key_values(Path("/proc/cpuinfo"))
    flags = set(info.get("flags", "").split())
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8")
    memory = _key_values(Path("/proc/meminfo")).get("MemTotal", "0").split()[0]
    return {
        "cpu": info.get("model name") or platform.processor() or "unknown",
        "instruction_sets": [name for name in wanted if name in flags],
        "cores": os.cpu_count(),
        "memory_gb": round(int(memory) * 1024 / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Processor time so far, in seconds: `busy` of the whole machine (stolen time included), `own` of this process and
    its descendants. `now` is wall time."""

    now: float
    busy: float
    own: float

    def foreign_share(self, earlier: CpuClock, cores: int) -> float:
        """The share of the machine that went to others since `earlier`, 0 to 1."""
        wall = self.now - earlier.now
        if wall <= 0:
            return 0.0
        foreign = (self.busy - earlier.busy) - (self.own - earlier.own)
        return min(1.0, max(0.0, foreign / (wall * cores)))


def cpu_clock() -> CpuClock | None:
    """The clock now, or None on systems without /proc."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    usage = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    own = sum(u.ru_utime + u.ru_stime for u in usage)
    own += sum(_process_seconds(pid) for pid in descendants(os.getpid()))
    return CpuClock(time.perf_counter(), (user + nice + system + irq + softirq + steal) / _TICK, own)


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, children first."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        children: list[int] = []
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children += [int(child) for child in task.read_text().split()]
            except OSError:  # it ended meanwhile
                continue
        found += children
        waiting += children
    return found


def _process_seconds(pid: int) -> float:
    """Processor time of a process and of its children that have ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / _TICK  # utime, stime, cutime, cstime


def proportional_memory(pids: abc.Iterable[int]) -> int:
    """Proportional set size of processes together, in bytes: a page that several processes share counts once."""
    found = (_key_values(Path(f"/proc/{pid}/smaps_rollup")).get("Pss", "0 kB") for pid in pids)
    return sum(int(size.split()[0]) * 1024 for size in found)


def proportional_memory_of_file(pids: abc.Iterable[int], file: Path) -> int:
    """The part of `proportional_memory` that maps this file."""
    total, inside = 0, False
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inside = line.endswith(f" {file}")
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def _key_values(path: Path) -> dict[str, str]:
    """`name : value` lines, the first of each name."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    values: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            values.setdefault(name.strip(), value.strip())
    return values
