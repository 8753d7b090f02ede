"""How engine threads wait and where they run: the environment of the child process, affinities, refusals."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.configs import engine_config

from windlass.engine import host_resources
from windlass.engine.client.process_client import ProcessClient
from windlass.engine.errors import LoadError
from windlass.server.config.engine_options import EngineOptions

TESTS = Path(__file__).parents[2]
MODEL = TESTS.parent / "models" / "demo"


def test_polling_is_bounded_unless_the_operator_decided() -> None:
    assert 0 <= int(host_resources.thread_wait_environment({})["GOMP_SPINCOUNT"]) <= 10_000  # libgomp's own is 300,000
    assert host_resources.thread_wait_environment({"OMP_WAIT_POLICY": "active"}) == {}
    assert host_resources.thread_wait_environment({"GOMP_SPINCOUNT": "7"}) == {}


@pytest.mark.parametrize(
    ("given", "expected", "core_name"),
    [
        ({}, str(host_resources.SPIN_COUNT), None),
        ({"GOMP_SPINCOUNT": "7"}, "7", "helpers.scripted_core:ScriptedCore"),
    ],
)
def test_an_engine_process_starts_with_it_and_on_its_cores(
    given: dict[str, str], expected: str, core_name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
    core = min(os.sched_getaffinity(0))

    async def inspect() -> tuple[str, set[int]]:
        client = ProcessClient(engine_config(MODEL, cores=(core,), kv_cache_memory=32 << 20), core=core_name)
        try:
            await client.start()
            environment = Path(f"/proc/{client.pid}/environ").read_bytes().split(b"\0")
            assert client.pid is not None
            found = [item for item in environment if item.startswith(b"GOMP_SPINCOUNT=")]
            return found[0].decode().partition("=")[2], os.sched_getaffinity(client.pid)
        finally:
            await client.close()

    assert asyncio.run(inspect()) == (expected, {core})


def test_preparing_a_process_comes_before_torch_or_not_at_all() -> None:
    script = (
        "import os, sys; os.environ.pop('GOMP_SPINCOUNT', None); os.environ.pop('OMP_WAIT_POLICY', None)\n"
        "from windlass.engine import host_resources\n"
        "sys.modules.update({'torch': sys} if sys.argv[1] == 'late' else {})\n"
        "host_resources.apply_thread_settings(); print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    answers = [subprocess.check_output([sys.executable, "-c", script, when], text=True) for when in ("early", "late")]
    assert answers == [f"{host_resources.SPIN_COUNT}\n", "None\n"]


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 2, 9}, raising=False)
    assert host_resources.split_cores() == ((2, 5), (9,))
    assert EngineOptions(pin_cores=True).to_config(Path("m")).compute.cores == (2, 5)
    assert EngineOptions().to_config(Path("m")).compute.cores is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2}, raising=False)
    with pytest.raises(LoadError, match=r"`compute\.cores` needs two cores"):
        EngineOptions(pin_cores=True).to_config(Path("m"))
    with pytest.raises(LoadError, match="cannot use the cores"):
        host_resources.pin_to_cores([4095])
