"""The Makefile: the commands it would run, and incremental builds of the kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e_helpers.builds import ROOT, copy_clone

from windlass.kernels.cpu.sources import fingerprint


def commands(venv: Path, *words: str, folder: Path = ROOT) -> list[str]:
    """The commands that make would run, one per line."""
    others = ("MAKE", "MFLAGS", "CXX", "MARKS", "TESTERS")  # of a make that runs these tests
    environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    command = ["make", "--dry-run", f"VENV={venv}", *words]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=True)
    return run.stdout.splitlines()


def installs(lines: list[str]) -> list[str]:
    return [line.split("-c constraints.txt ")[1] for line in lines if "pip install" in line and line.endswith("'")]


def environment(venv: Path, *extras: str) -> Path:
    """A virtual environment with these sets of extras, as far as make can see."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    later = time.time() + 60  # newer than any source
    for extra in extras:
        marker = venv / f".installed-{extra}"
        marker.touch()
        os.utime(marker, (later, later))
    return venv


def test_at_most_eleven_targets_each_with_a_line_of_help() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (declared,) = re.findall(r"^\.PHONY: (help .+)$", makefile, re.MULTILINE)
    printed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ["help", *re.findall(r"^make ([\w-]+)  ", printed, re.MULTILINE)] == declared.split()
    assert len(declared.split()) <= 12  # help itself is the default


def test_first_command_installs(tmp_path: Path) -> None:
    for goal, extras in (("serve", ""), ("test", "[dev]"), ("check", "[dev]"), ("test-all", "[dev,e2e]")):
        printed = commands(tmp_path / goal, goal)
        assert installs(printed)[0] == f"-e '.{extras}'"
        assert sum(line.startswith('echo "== installing') for line in printed) == 1


def test_unchanged_environment_is_not_installed_again(tmp_path: Path) -> None:
    venv = environment(tmp_path / "venv", "server")
    assert installs(commands(venv, "serve", "UNBUILT=")) == []
    assert installs(commands(venv, "test", "UNBUILT=")) == ["-e '.[dev]'"]
    assert installs(commands(venv, "serve", "EXTRAS=hub,plots", "UNBUILT=")) == ["-e '.[hub,plots]'"]
    # The extras include the server, which needs no installation afterwards.
    assert any(
        line.endswith(f"{venv}/.installed-server") for line in commands(venv, "test") if line.startswith("touch")
    )
    for goal in ("test", "check", "format"):
        assert installs(commands(environment(tmp_path / goal, "dev"), goal, "UNBUILT=")) == []


@pytest.mark.parametrize(
    ("compiled", "compiler", "expected"),
    [(False, sys.executable, ["-e '.'"]), (False, "no-such-compiler", []), (True, sys.executable, [])],
)
def test_missing_kernels_are_compiled_once_a_compiler_is_installed(
    compiled: bool, compiler: str, expected: list[str], tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    (clone / "clients").mkdir(parents=True)
    (clone / "kernels" / "cpu").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", "clients/pyproject.toml"):
        (clone / name).write_bytes((ROOT / name).read_bytes())
    if compiled:
        (clone / "kernels" / "cpu" / "_windlass_cpu.so").touch()
    venv = environment(tmp_path / "venv", "server")
    assert installs(commands(venv, "serve", f"CXX={compiler}", folder=clone)) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["test"], ["-n 2 --dist loadfile -m quick tests/unit tests/kernels tests/engine tests/api"]),
        (
            ["test-all"],
            [
                '-n 2 --dist loadfile --no-loadscope-reorder -m "not soak" --ignore tests/e2e/test_ray.py',
                '-m "not soak" tests/e2e/test_ray.py || [ $? = 5 ]',
            ],
        ),
        (
            ["test-all", "MARKS=not quick and not soak", "TESTERS=4"],
            [
                '-n 4 --dist loadfile --no-loadscope-reorder -m "not quick and not soak" --ignore tests/e2e/test_ray.py',
                '-m "not quick and not soak" tests/e2e/test_ray.py || [ $? = 5 ]',
            ],
        ),
    ],
)
def test_each_target_runs_its_tests(words: list[str], expected: list[str], tmp_path: Path) -> None:
    venv = environment(tmp_path / "venv", "dev", "dev,e2e")
    run = [line for line in commands(venv, *words) if line.startswith(f"{venv}/bin/pytest ")]
    assert [line.removeprefix(f"{venv}/bin/pytest ") for line in run] == expected


def test_gpu_target_tests_engines_kernels_and_servers(tmp_path: Path) -> None:
    venv = environment(tmp_path / "venv", "dev,e2e")
    lines = [line for line in commands(venv, "test-gpu", "TESTERS=14", "MARKS=slow") if "/pytest " in line]
    assert lines[0].endswith("; engines=$?; \\") and lines[1].endswith(" && exit $engines")  # both run, and both count
    assert all('-n 14 --dist loadfile -m "slow"' in line for line in lines) and "--dist load " in lines[0]
    paths = [word for line in lines for word in line.replace(";", "").split() if word.startswith("tests/")]
    assert {"tests/kernels/triton_programs", "tests/engine", "tests/api/startup"} <= set(paths)
    assert all(list(ROOT.glob(path)) for path in paths)


def test_ci_scripts_run_the_targets_of_the_makefile() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"^make ([\w-]+)", script, re.MULTILINE) == ["check", "test", "test-all"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "      - run: .ci/run\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")


def test_build_reuses_compiled_kernels_and_compiles_changed_ones(tmp_path: Path) -> None:
    clone = copy_clone(tmp_path / "clone")
    code = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    suffix = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    compiled = clone / "kernels" / "cpu" / f"_windlass_cpu{suffix}"
    sources = clone / "kernels" / "cpu" / "src"
    before = b"compiled from " + fingerprint(sources).encode()
    compiled.write_bytes(before)
    header = clone / "kernels" / "cpu" / "src" / "simd.h"

    def build() -> str:
        code = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
        # `false` as the compiler: the build continues without kernels and reports the failure.
        variables = {**os.environ, "CC": "false", "CXX": "false"}
        command = [sys.executable, "-c", code, str(tmp_path)]
        run = subprocess.run(command, cwd=clone, env=variables, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        return run.stdout + run.stderr

    later = compiled.stat().st_mtime + 10
    os.utime(header, (later, later))  # times in a copy of a clone mean nothing
    assert "failed" not in build() and compiled.read_bytes() == before
    header.write_text(header.read_text() + "\n")
    earlier = compiled.stat().st_mtime - 10
    os.utime(header, (earlier, earlier))
    assert 'building extension "windlass.kernels.cpu._windlass_cpu" failed' in build()
    assert not compiled.exists()  # kernels of other sources do not prevent a later compilation
