"""Limits of control groups, in both versions, as files of a played system; and the threads of an engine under them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.configs import engine_config

from windlass.engine import host_resources
from windlass.engine.client.replicated_client import ReplicaPlacement
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.host_resources import available_memory, processor_quota, processors, threads_per_rank
from windlass.engine.model.loading.preflight import DeviceCapabilities, prepare_model

DEMO = Path(__file__).parents[2] / "models" / "demo"
MIB = 1 << 20


class System:
    """What is mounted and which groups are ours; no group at first."""

    def __init__(self, folder: Path) -> None:
        self.mounted, self.own = folder / "mounted", folder / "own"
        self.mounted.mkdir()

    def write(self, name: str, text: object) -> None:
        path = self.mounted / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    made = System(tmp_path)
    monkeypatch.setattr(host_resources, "_MOUNTED", made.mounted)
    monkeypatch.setattr(host_resources, "_OWN", made.own)
    return made


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def test_memory_of_a_container(system: System) -> None:
    outside = available_memory()
    assert outside is not None and outside > 64 * MIB
    system.write("memory.max", "max")
    system.write("memory.current", 40 * MIB)
    assert available_memory() > 64 * MIB
    system.write("memory.max", 64 * MIB)
    assert available_memory() == 24 * MIB
    # What files have left in memory is given back on demand.
    system.write("memory.stat", f"anon 1\nactive_file {10 * MIB}\ninactive_file {20 * MIB}\nshmem 5")
    assert available_memory() == 54 * MIB
    system.write("memory.current", 80 * MIB)
    system.write("memory.stat", "odd\nactive_file many")
    assert available_memory() == 0


def test_memory_of_a_group_in_version_1(system: System) -> None:
    system.write("memory/memory.limit_in_bytes", 9223372036854771712)  # none
    system.write("memory/memory.usage_in_bytes", 500 * MIB)
    assert available_memory() > 64 * MIB
    system.own.write_text("4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n")
    system.write("memory/docker/abc/memory.limit_in_bytes", 64 * MIB)
    system.write("memory/docker/abc/memory.usage_in_bytes", 40 * MIB)
    system.write(
        "memory/docker/abc/memory.stat",
        f"active_file 0\ninactive_file 0\ntotal_active_file {MIB}\ntotal_inactive_file {2 * MIB}",
    )
    assert available_memory() == 27 * MIB


def test_a_group_above_ours_limits_too(system: System) -> None:
    system.own.write_text("0::/system.slice/windlass.service\n")
    system.write("system.slice/windlass.service/memory.max", 64 * MIB)
    system.write("system.slice/windlass.service/memory.current", 0)
    assert available_memory() == 64 * MIB
    system.write("system.slice/memory.max", 48 * MIB)
    system.write("system.slice/memory.current", 0)
    assert available_memory() == 48 * MIB
    system.write("system.slice/windlass.service/cpu.max", "max 100000")
    assert processor_quota() is None
    system.write("system.slice/cpu.max", "150000 100000")
    assert processor_quota() == 1.5


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("files", "quota", "count"),
    [
        ({}, None, 8),
        ({"cpu.max": "max 100000"}, None, 8),
        ({"cpu.max": "400000 100000"}, 4.0, 4),
        ({"cpu.max": "250000 100000"}, 2.5, 2),
        ({"cpu.max": "5000 10000"}, 0.5, 1),
        ({"cpu.max": "6400000 100000"}, 64.0, 8),
        ({"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, None, 8),
        ({"cpu/cpu.cfs_quota_us": 300000, "cpu/cpu.cfs_period_us": 100000}, 3.0, 3),
        ({"cpu,cpuacct/pod/cpu.cfs_quota_us": 200000, "cpu,cpuacct/pod/cpu.cfs_period_us": 100000}, 2.0, 2),
        ({"cpu.max": "nonsense 0"}, None, 8),
    ],
)
def test_a_quota_of_processors(system: System, files: dict[str, object], quota: float | None, count: int) -> None:
    system.own.write_text("2:cpu,cpuacct:/pod\nnonsense\n")
    for name, text in files.items():
        system.write(name, text)
    assert (processor_quota(), processors()) == (quota, count)


@pytest.mark.usefixtures("eight")
def test_an_engine_has_no_more_threads_than_its_quota_lets_run(system: System) -> None:
    config = engine_config(DEMO, kv_cache_memory=32 * MIB)
    several = engine_config(DEMO, kv_cache_memory=32 * MIB, tensor_parallel=2)
    own_cores = engine_config(DEMO, kv_cache_memory=32 * MIB, cores=tuple(range(4)))
    named = engine_config(DEMO, kv_cache_memory=32 * MIB, threads=6)
    assert [threads_per_rank(each.compute, 5) for each in (config, several, own_cores, named)] == [5, 2, 4, 6]
    assert threads_per_rank(several.compute) == 4
    system.write("cpu.max", "300000 100000")
    assert [threads_per_rank(each.compute, 5) for each in (config, own_cores, named)] == [3, 3, 6]
    assert threads_per_rank(several.compute) == 1
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        core = EngineCore(config)
        assert torch.get_num_threads() == 3
        core.close()
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(("quota", "threads"), [(None, [4, 4]), ("400000 100000", [2, 2]), ("100000 100000", [1, 1])])
def test_engines_share_a_quota_whenever_they_start(system: System, quota: str | None, threads: list[int]) -> None:
    if quota is not None:
        system.write("cpu.max", quota)
    placement = ReplicaPlacement(2)
    try:
        configs = placement.configs(engine_config(DEMO, kv_cache_memory=32 * MIB))
        # Engines that start later, or again, get the first one's sizes, and nothing about the others.
        later = [replace(config, replicas=1) for config in configs]
        assert [[threads_per_rank(each.compute) for each in some] for some in (configs, later)] == [threads, threads]
        named = placement.configs(engine_config(DEMO, kv_cache_memory=32 * MIB, threads=3))
        assert [threads_per_rank(each.compute) for each in named] == [3, 3]
    finally:
        placement.close()


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("quota", "replicas", "told"),
    [
        (None, 1, None),
        ("100000 100000", 1, "2 ranks share one core"),
        ("200000 100000", 1, None),
        ("200000 100000", 2, "2 ranks share one core"),
        ("100000 100000", 2, "2 ranks share one core"),
    ],
)
def test_ranks_on_cores_of_their_own_are_told_of_the_quota(
    system: System, quota: str | None, replicas: int, told: str | None
) -> None:
    """Each engine has four cores, and its part of the shared quota."""
    if quota is not None:
        system.write("cpu.max", quota)
    config = engine_config(DEMO, kv_cache_memory=32 * MIB, tensor_parallel=2, cores=tuple(range(4)), replicas=replicas)
    notices = prepare_model(config, DeviceCapabilities("cpu", True)).notices
    assert [notice.partition(",")[0] for notice in notices if "ranks share" in notice] == ([told] if told else [])
