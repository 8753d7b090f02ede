"""Resources of an engine process: control groups, threads, cores, and imports without garbage collection."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.configs import engine_config

from windlass.engine import host_resources
from windlass.engine.client.process_client import ProcessClient
from windlass.engine.client.replicated_client import ReplicaPlacement
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.host_resources import available_memory, processor_quota, processors, threads_per_rank
from windlass.engine.model.loading.preflight import DeviceCapabilities, prepare_model
from windlass.engine.process_setup import gc_paused_imports
from windlass.server.config.engine_options import EngineOptions

DEMO = Path(__file__).parents[2] / "models" / "demo"
TESTS = str(Path(__file__).parents[1])
MIB = 1 << 20


class System:
    """Simulated control groups: mounted files, and the groups of this process (none at first)."""

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
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def test_available_memory_of_a_container(system: System) -> None:
    outside = available_memory()
    assert outside is not None and outside > 64 * MIB
    system.write("memory.max", "max")
    system.write("memory.current", 40 * MIB)
    assert available_memory() > 64 * MIB
    system.write("memory.max", 64 * MIB)
    assert available_memory() == 24 * MIB
    # The page cache is reclaimed on demand.
    system.write("memory.stat", f"anon 1\nactive_file {10 * MIB}\ninactive_file {20 * MIB}\nshmem 5")
    assert available_memory() == 54 * MIB
    system.write("memory.current", 80 * MIB)
    system.write("memory.stat", "odd\nactive_file many")
    assert available_memory() == 0


def test_available_memory_of_a_version_1_group(system: System) -> None:
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


def test_parent_groups_limit_too(system: System) -> None:
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


@pytest.mark.usefixtures("eight_processors")
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
def test_processor_quota(system: System, files: dict[str, object], quota: float | None, count: int) -> None:
    system.own.write_text("2:cpu,cpuacct:/pod\nnonsense\n")
    for name, text in files.items():
        system.write(name, text)
    assert (processor_quota(), processors()) == (quota, count)


@pytest.mark.usefixtures("eight_processors")
def test_the_quota_limits_the_threads_of_an_engine(system: System) -> None:
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


@pytest.mark.usefixtures("eight_processors")
@pytest.mark.parametrize(("quota", "threads"), [(None, [4, 4]), ("400000 100000", [2, 2]), ("100000 100000", [1, 1])])
def test_replicas_share_a_quota(system: System, quota: str | None, threads: list[int]) -> None:
    if quota is not None:
        system.write("cpu.max", quota)
    placement = ReplicaPlacement(2)
    try:
        configs = placement.configs(engine_config(DEMO, kv_cache_memory=32 * MIB))
        # Engines that start later get the same sizes, without knowing the number of replicas.
        later = [replace(config, replicas=1) for config in configs]
        assert [[threads_per_rank(each.compute) for each in some] for some in (configs, later)] == [threads, threads]
        named = placement.configs(engine_config(DEMO, kv_cache_memory=32 * MIB, threads=3))
        assert [threads_per_rank(each.compute) for each in named] == [3, 3]
    finally:
        placement.close()


@pytest.mark.usefixtures("eight_processors")
@pytest.mark.parametrize(
    ("quota", "replicas", "notice"),
    [
        (None, 1, None),
        ("100000 100000", 1, "2 ranks share one core"),
        ("200000 100000", 1, None),
        ("200000 100000", 2, "2 ranks share one core"),
        ("100000 100000", 2, "2 ranks share one core"),
    ],
)
def test_a_quota_shared_by_ranks_is_announced(
    system: System, quota: str | None, replicas: int, notice: str | None
) -> None:
    """Each engine has four cores and a share of the quota."""
    if quota is not None:
        system.write("cpu.max", quota)
    config = engine_config(DEMO, kv_cache_memory=32 * MIB, tensor_parallel=2, cores=tuple(range(4)), replicas=replicas)
    notices = prepare_model(config, DeviceCapabilities("cpu", True)).notices
    assert [text.partition(",")[0] for text in notices if "ranks share" in text] == ([notice] if notice else [])


def test_spinning_is_bounded_unless_configured() -> None:
    assert 0 <= int(host_resources.thread_wait_environment({})["GOMP_SPINCOUNT"]) <= 10_000  # libgomp's own is 300,000
    assert host_resources.thread_wait_environment({"OMP_WAIT_POLICY": "active"}) == {}
    assert host_resources.thread_wait_environment({"GOMP_SPINCOUNT": "7"}) == {}


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("given", "expected", "core_name"),
    [({}, str(host_resources.SPIN_COUNT), None), ({"GOMP_SPINCOUNT": "7"}, "7", "helpers.scripted_core:ScriptedCore")],
)
def test_an_engine_process_gets_its_spin_count_and_cores(
    given: dict[str, str], expected: str, core_name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH")))))
    core = min(os.sched_getaffinity(0))

    async def inspect() -> tuple[str, set[int]]:
        client = ProcessClient(engine_config(DEMO, cores=(core,), kv_cache_memory=32 << 20), core=core_name)
        try:
            await client.start()
            environment = Path(f"/proc/{client.pid}/environ").read_bytes().split(b"\0")
            found = [item for item in environment if item.startswith(b"GOMP_SPINCOUNT=")]
            return found[0].decode().partition("=")[2], os.sched_getaffinity(client.pid)
        finally:
            await client.close()

    assert asyncio.run(inspect()) == (expected, {core})


def test_thread_settings_are_applied_only_before_torch() -> None:
    script = (
        "import os, sys; os.environ.pop('GOMP_SPINCOUNT', None); os.environ.pop('OMP_WAIT_POLICY', None)\n"
        "from windlass.engine import host_resources\n"
        "sys.modules.update({'torch': sys} if sys.argv[1] == 'late' else {})\n"
        "host_resources.apply_thread_settings(); print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    answers = [subprocess.check_output([sys.executable, "-c", script, when], text=True) for when in ("early", "late")]
    assert answers == [f"{host_resources.SPIN_COUNT}\n", "None\n"]


def test_cores_are_split_between_engine_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 2, 9}, raising=False)
    assert host_resources.split_cores() == ((2, 5), (9,))
    assert EngineOptions(pin_cores=True).to_config(Path("m")).compute.cores == (2, 5)
    assert EngineOptions().to_config(Path("m")).compute.cores is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2}, raising=False)
    with pytest.raises(LoadError, match=r"`compute\.cores` needs two cores"):
        EngineOptions(pin_cores=True).to_config(Path("m"))
    with pytest.raises(LoadError, match="cannot use the cores"):
        host_resources.pin_to_cores([4095])


STARTS = """
import gc, sys
rounds = []
gc.callbacks.append(lambda phase, info: rounds.append(phase))
from windlass.engine.process_setup import gc_paused_imports
rounds.clear()
with gc_paused_imports():
    import windlass.server.application
    seen = len(rounds)
print(seen, gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


@pytest.mark.slow
def test_garbage_collection_is_paused_during_imports() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", STARTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "True"]


def test_garbage_collection_resumes_after_a_failed_import() -> None:
    with pytest.raises(ModuleNotFoundError), gc_paused_imports():
        assert not gc.isenabled()
        importlib.import_module("nothing_of_this_name")
    assert gc.isenabled()
