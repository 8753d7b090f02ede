"""The commands of the Makefile: what they would run, and that kernels are compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e_helpers.builds import ROOT, copy_clone

from windlass.kernels.cpu.sources import fingerprint


def commands(venv: Path, *words: str) -> list[str]:
    """What make would run, one command a line."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "CXX"))}
    command = ["make", "--dry-run", f"VENV={venv}", *words]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=True)
    return run.stdout.splitlines()


def installs(lines: list[str]) -> list[str]:
    return [line.split("-c constraints.txt ")[1] for line in lines if " pip install " in line]


def install(venv: Path, *stamps: str) -> Path:
    """An environment in which these sets are installed, as far as make can tell."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    now = time.time() + 60  # newer than any source
    for stamp in stamps:
        (venv / stamp).touch()
        os.utime(venv / stamp, (now, now))
    return venv


def test_the_first_command_installs_once_and_says_so(tmp_path: Path) -> None:
    served, tested = commands(tmp_path / "a", "serve"), commands(tmp_path / "b", "test")
    assert installs(served) == ["-e ."] and installs(tested) == ["-e '.[dev]'"]
    assert "--quiet" not in "".join(served + tested)
    for lines in (served, tested):
        assert sum(line.startswith('echo "== ') and "compiled" in line for line in lines) == 1


def test_what_is_installed_is_not_installed_again(tmp_path: Path) -> None:
    venv = install(tmp_path / "venv", ".installed")
    assert installs(commands(venv, "serve")) == []
    assert installs(commands(venv, "test")) == ["-e '.[dev]'"]
    assert installs(commands(venv, "serve", "EXTRAS=hub,plots")) == ["-e '.[hub,plots]'"]
    # The development tools come on top of the server, so a server needs nothing after them.
    assert any(f"touch {venv}/.installed-dev {venv}/.installed" in line for line in commands(venv, "test"))
    for goal in ("test", "test-slow", "soak", "check"):
        assert installs(commands(install(tmp_path / goal, ".installed", ".installed-dev"), goal)) == []


def test_kernels_are_compiled_once_a_compiler_has_come(tmp_path: Path) -> None:
    venv = install(tmp_path / "venv", ".installed", ".installed-dev")
    missing, here, gone = "KERNELS=", f"CXX={sys.executable}", "CXX=no-such-compiler"
    assert installs(commands(venv, "serve", missing, here)) == ["-e ."]
    assert installs(commands(venv, "test", missing, here)) == ["-e '.[dev]'"]
    (venv / ".compiler").write_text("/usr/bin/older-11.3.0\n")
    assert installs(commands(venv, "serve", missing, here)) == ["-e ."]
    # One that could not compile them is not asked again at each start.
    (tried,) = (line for line in commands(venv, "serve", missing, here) if ".compiler" in line)
    subprocess.run(["sh", "-c", tried], check=True, cwd=tmp_path)
    assert installs(commands(venv, "serve", missing, here)) == []
    # Where it could, and they are gone again, they are compiled again.
    made = tmp_path / "kernels" / "cpu" / "_windlass_cpu.so"
    made.parent.mkdir(parents=True)
    made.touch()
    subprocess.run(["sh", "-c", tried], check=True, cwd=tmp_path)
    assert not (venv / ".compiler").exists()
    assert installs(commands(venv, "serve", missing, here)) == ["-e ."]
    for words in ((missing, gone), ("KERNELS=a.so", here), ("KERNELS=a.so", gone)):
        assert installs(commands(venv, "serve", *words)) == []


def test_engines_kernels_and_servers_are_tested_on_the_gpu_that_is_named(tmp_path: Path) -> None:
    venv = install(tmp_path / "venv", ".installed-dev")
    for words, device in ((), "cuda"), (("DEVICE=cuda:1",), "cuda:1"):
        printed = commands(venv, "test-gpu", "TESTERS=14", *words)
        lines = [line for line in printed if "pytest" in line]
        assert lines[0].endswith("; engines=$?; \\") and lines[1].endswith(" && exit $engines"), "both, whatever fails"
        assert all(f" WINDLASS_TEST_DEVICE={device} " in line and "-n 14" in line for line in lines)
        first, second = ([w for w in line.replace(";", "").split() if w.startswith("tests/")] for line in lines)
        assert first == ["tests/kernels/triton", "tests/engine"]
        assert "tests/api/startup" in second and len(second) > 8
        assert all((Path(__file__).parents[3] / word).exists() for word in first + second)


@pytest.mark.parametrize(("goal", "extra"), [("test-ray", "ray"), ("test-triton", "gpu")])
def test_what_takes_an_extra_takes_it_beside_the_tools(goal: str, extra: str, tmp_path: Path) -> None:
    venv = install(tmp_path / "venv", ".installed-dev")
    lines = commands(venv, goal)
    assert installs(lines) == [f"-e '.[{extra}]'"]
    assert all("-c constraints.txt" in line for line in lines if "pip install" in line)


@pytest.mark.parametrize(
    ("goal", "options"),
    [
        ("test", '-n 2 --dist loadfile -m "not slow and not soak"'),
        ("test-slow", '-n 2 --dist loadfile --no-loadscope-reorder -m "slow" --ignore tests/e2e/test_ray.py'),
        ("test-ray", "tests/e2e/test_ray.py tests/unit/ray tests/e2e/deploy/test_kubernetes.py"),
        ("test-triton", '-n 2 -m "not slow and not soak" tests/kernels/triton'),
        ("soak", '-m "soak"'),
    ],
)
def test_each_goal_runs_its_tests(tmp_path: Path, goal: str, options: str) -> None:
    venv = install(tmp_path / "venv", ".installed-dev")
    assert commands(venv, goal)[-1].removeprefix("OMP_NUM_THREADS=1 ") == f"{venv}/bin/pytest {options}"


def test_a_build_takes_compiled_kernels_and_compiles_changed_ones(tmp_path: Path) -> None:
    clone = copy_clone(tmp_path / "clone")
    code = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    suffix = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    compiled = clone / "kernels" / "cpu" / f"_windlass_cpu{suffix}"
    sources = clone / "kernels" / "cpu" / "src"
    before = b"compiled before of " + fingerprint(sources).encode()
    compiled.write_bytes(before)
    header = clone / "kernels" / "cpu" / "src" / "simd.h"

    def build() -> str:
        code = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
        # A compiler that is no compiler: the build goes on without kernels, and says that it tried.
        environment = {**os.environ, "CC": "false", "CXX": "false"}
        command = [sys.executable, "-c", code, str(tmp_path)]
        run = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        return run.stdout + run.stderr

    later = compiled.stat().st_mtime + 10
    os.utime(header, (later, later))  # a copy of a clone may have any times
    assert "failed" not in build() and compiled.read_bytes() == before
    header.write_text(header.read_text() + "\n")
    earlier = compiled.stat().st_mtime - 10
    os.utime(header, (earlier, earlier))
    assert 'building extension "windlass.kernels.cpu._windlass_cpu" failed' in build()
    assert not compiled.exists(), "what came from other sources is not taken for compiled once there is a compiler"
