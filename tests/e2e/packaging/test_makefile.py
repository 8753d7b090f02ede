"""The Makefile: the commands it would run, and incremental builds of the kernels."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from e2e_helpers.builds import ROOT, copy_clone
from helpers.eventually import eventually

from windlass.kernels.cpu.build import ISAS, all_isas, fingerprint


def commands(venv: Path, *words: str, folder: Path = ROOT) -> list[str]:
    """The commands that make would run, one per line."""
    others = ("MAKE", "MFLAGS", "CXX", "MARKS", "TESTERS")  # of a make that runs these tests
    environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    command = ["make", "--dry-run", f"VENV={venv}", *words]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=True)
    return run.stdout.splitlines()


def installs(lines: list[str]) -> list[str]:
    return re.findall(r"pip install .*-c constraints\.txt --no-compile (-e '[^']*')", "\n".join(lines))


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
    assert installs(commands(venv, "serve")) == []
    assert installs(commands(venv, "test")) == ["-e '.[dev]'"]
    assert installs(commands(venv, "serve", "EXTRAS=hub,plots")) == ["-e '.[hub,plots]'"]
    # The extras include the server, which needs no installation afterwards.
    assert any(
        line.endswith(f"{venv}/.installed-server") for line in commands(venv, "test") if line.startswith("touch")
    )
    for goal in ("test", "check", "format"):
        assert installs(commands(environment(tmp_path / goal, "dev"), goal)) == []


def test_serve_downloads_its_model_while_it_installs(tmp_path: Path) -> None:
    def downloads(*words: str) -> list[str]:
        lines = "\n".join(commands(tmp_path / "venv", *words))
        return re.findall(r" -m windlass\.server\.startup\.default_model *(.*) \|\| true", lines)

    assert downloads("serve") == [""] and downloads("serve", "MODEL=smollm2") == ["smollm2"] and downloads("test") == []
    assert (ROOT / "src" / "windlass" / "server" / "startup" / "default_model.py").is_file()
    for goal in ("serve", "test", "test-real", "bench"):
        assert any("kernels/cpu/build.py" in line for line in commands(tmp_path / "venv", goal))


def programs(folder: Path, python: str) -> Path:
    """An environment whose Python and windlass are shell scripts. Each appends its process and arguments to `started`."""
    (folder / "bin").mkdir(parents=True)
    for name, script in (("python", python), ("windlass", "exit 0")):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\necho "$$ $*" >> {folder}/started\n{script}\n')
        program.chmod(0o755)
    return folder


def started(venv: Path) -> list[str]:
    """The lines of `programs`."""
    file = venv / "started"
    return file.read_text().splitlines() if file.exists() else []


def start(venv: Path) -> subprocess.Popen[bytes]:
    """`make serve` as the leader of a group, which ctrl-C reaches as a whole."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "WINDLASS_"))}
    command = [
        "env",
        "--default-signal=INT",
        "make",
        "serve",
        f"VENV={venv}",
    ]  # a job in the background may ignore ctrl-C
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)


def test_a_failed_download_or_compilation_does_not_prevent_the_start(tmp_path: Path) -> None:
    venv = programs(tmp_path / "venv", 'case "$*" in *pip*) exit 0;; esac; exit 1')
    assert start(venv).wait(60) == 0
    assert started(venv)[-1].endswith(" serve --host 127.0.0.1 --port 8000") and len(started(venv)) == 4


def test_packages_kernels_and_model_arrive_in_parallel_and_end_with_ctrl_c(tmp_path: Path) -> None:
    venv = programs(tmp_path / "venv", "exec sleep 600")
    make = start(venv)
    eventually(lambda: len(started(venv)) == 3)
    os.killpg(make.pid, signal.SIGINT)
    assert make.wait(60) != 0
    eventually(lambda: not any(Path("/proc", line.split()[0]).exists() for line in started(venv)))
    assert len(started(venv)) == 3  # no server


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


def kernels_of(clone: Path) -> Path:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return clone / "kernels" / "cpu" / f"_windlass_cpu{suffix}"


def build(clone: Path, **variables: str) -> str:
    """Build an editable install of the clone. Without CXX the compiler is `false`: the build continues without kernels."""
    code = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    command = [sys.executable, "-c", code, str(clone.parent)]
    environment = {**os.environ, "CXX": "false", **variables}
    run = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def test_build_reuses_compiled_kernels_and_compiles_changed_ones(tmp_path: Path) -> None:
    clone = copy_clone(tmp_path / "clone")
    compiled = kernels_of(clone)
    before = f"windlass sources {fingerprint()}\0 windlass isas {','.join(ISAS)}\0".encode()
    compiled.write_bytes(before)
    header = clone / "kernels" / "cpu" / "src" / "simd.h"
    later = compiled.stat().st_mtime + 10
    os.utime(header, (later, later))  # times in a copy of a clone mean nothing
    assert "failed" not in build(clone, WINDLASS_ISAS=ISAS[0]) and compiled.read_bytes() == before
    header.write_text(header.read_text() + "\n")
    earlier = compiled.stat().st_mtime - 10
    os.utime(header, (earlier, earlier))
    assert 'building extension "windlass.kernels.cpu._windlass_cpu" failed' in build(clone)
    assert not compiled.exists()  # kernels of other sources do not prevent a later compilation


def test_kernels_of_another_processor_are_compiled_again(tmp_path: Path) -> None:
    """An environment that was copied to another machine."""
    clone = copy_clone(tmp_path / "clone")
    compiled = kernels_of(clone)
    compiled.write_bytes(f"windlass sources {fingerprint()}\0 windlass isas {ISAS[0]}\0".encode())
    printed = build(clone, WINDLASS_ISAS=next(isa for isa in ISAS[1:] if isa in all_isas()))
    assert "the kernels are compiled for generic, not for" in printed and not compiled.exists()
