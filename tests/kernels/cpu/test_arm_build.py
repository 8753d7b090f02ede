"""The kernels for 64-bit ARM compile, where a cross compiler is installed; CONTRIBUTING.md says how their results are
tested."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from windlass.kernels.cpu.library import SIGNATURES

ROOT = Path(__file__).parents[3]
TOOLS = "aarch64-linux-gnu-"


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The package's sources compiled for ARM with its own flags, by the name of the instruction set."""
    if shutil.which(f"{TOOLS}g++") is None:
        pytest.skip("no cross compiler for ARM (g++-aarch64-linux-gnu)")
    extension = runpy.run_path(str(ROOT / "setup.py"))["kernels"]
    folder = tmp_path_factory.mktemp("arm")
    flags = ["-O1" if flag.startswith("-O") else flag for flag in extension.extra_compile_args]
    built = {}
    for source in extension.sources:
        target = folder / f"{Path(source).stem}.o"
        subprocess.run([f"{TOOLS}g++", *flags, "-fPIC", "-c", source, "-o", target], cwd=ROOT, check=True, timeout=120)
        built[target.stem.removeprefix("isa_")] = target
    return built


@pytest.fixture(scope="module")
def listing(objects: dict[str, Path]) -> Callable[..., str]:
    def of(tool: str, *arguments: str) -> str:
        command = [f"{TOOLS}{tool}", *arguments[:-1], objects[arguments[-1]]]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    return of


def exported(symbols: str) -> set[str]:
    return set(re.findall(r" T (windlass_\w+)", symbols))


def test_every_function_is_there(listing: Callable[..., str]) -> None:
    for isa in ("generic", "neon"):
        assert exported(listing("nm", isa)) >= {f"windlass_{name}_{isa}" for name in SIGNATURES}
    assert "windlass_linear_blocks_neon_dot" in exported(listing("nm", "neon_dot"))


def test_files_of_other_processors_are_empty(objects: dict[str, Path], listing: Callable[..., str]) -> None:
    for isa in set(objects) - {"generic", "neon", "neon_dot"}:
        assert not exported(listing("nm", isa))


def test_only_the_file_that_is_chosen_for_them_has_dot_products(listing: Callable[..., str]) -> None:
    using = {isa for isa in ("generic", "neon", "neon_dot") if re.search(r"\tsdot\t", listing("objdump", "-d", isa))}
    assert using == {"neon_dot"}
