"""The compiled library: sources, struct sizes, instruction sets, and compilation for ARM."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.cpu_kernels import kernels, look_again

from windlass.kernels.cpu import library
from windlass.kernels.cpu.build import FLAGS, fingerprint, objects
from windlass.kernels.cpu.elementwise_bindings import CompiledSamplingRow
from windlass.kernels.cpu.library import SIGNATURES

SOURCES = Path(__file__).parents[3] / "kernels" / "cpu" / "src"
HEADERS = sorted(path.name for path in SOURCES.glob("*.h"))
# The instruction set that includes every header, in its portable form.
DEFINES = "-DWINDLASS_PORTABLE -DWINDLASS_ISA=avx512_amx -include isa.h"
ROOT = Path(__file__).parents[3]
ARM_TOOLS = "aarch64-linux-gnu-"
MATRIX = {"linear_blocks_amx", "linear_panels_amx"}


def test_struct_sizes_equal_those_of_the_compiler() -> None:
    kernels()
    handle = ctypes.CDLL(str(library.find()))
    assert library.differing_structs(handle) == []
    assert handle.windlass_struct_size(b"SamplingRow") == ctypes.sizeof(CompiledSamplingRow)
    assert handle.windlass_struct_size(b"SamplingRows") == -1


@pytest.mark.parametrize("name", library.SIZES)
def test_a_library_with_another_size_is_not_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels()
    compiled = library.SIZES[name]
    monkeypatch.setitem(library.SIZES, name, compiled + 8)
    look_again(monkeypatch)
    reason = str(library.unavailable_reason())
    assert f"{name}: {compiled} bytes, not {compiled + 8}" in reason
    assert "install a C++ compiler" in reason and "\n" not in reason
    with pytest.raises(library.KernelsUnavailableError, match="compiler"):
        library.load()


def test_a_library_without_struct_sizes_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels()
    older = ctypes.CDLL(None)  # a library without these functions
    monkeypatch.setattr(ctypes, "CDLL", lambda path: older)
    look_again(monkeypatch)
    assert "install a C++ compiler" in str(library.unavailable_reason())


def test_a_library_of_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structs may be equal although a function has another argument; only the sources show that."""
    kernels()
    look_again(monkeypatch)
    monkeypatch.setattr(library, "fingerprint", lambda: fingerprint()[:-1] + "x")
    assert "(compiled from other sources): install a C++ compiler" in str(library.unavailable_reason())
    monkeypatch.setattr(library, "fingerprint", lambda: "")  # a package without them: nothing to compare with
    assert library.unavailable_reason() is None or "=off" in str(library.unavailable_reason())


def test_fingerprint_changes_with_any_source(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == ""
    seen = set()
    for name, text in (("a.cpp", "1"), ("b.h", "2"), ("b.h", "3"), ("c.h", ""), ("d.txt", "4")):
        (tmp_path / name).write_text(text)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 4


def run_with(isa: str) -> str:
    program = (
        "from windlass.kernels import cpu, select_backend\n"
        "reason = cpu.unavailable_reason()\n"
        "print(reason if reason else cpu.load().isa)\n"
        "import torch\n"
        "print(select_backend('cpu').explain())\n"
        "try:\n    print(cpu.linear_small(cpu.load(), torch.ones(1, 4), torch.ones(2, 4)).tolist())\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "WINDLASS_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_the_environment_selects_a_compiled_instruction_set_or_none() -> None:
    path = kernels().path
    slowest = library.runnable(path)[0]
    assert run_with(slowest).splitlines() == [slowest, f"compiled CPU kernels ({slowest})", "[[4.0, 4.0]]"]
    assert run_with("off").splitlines()[1:] == [
        "plain torch kernels: WINDLASS_CPU_ISA=off turns the compiled CPU kernels off",
        "WINDLASS_CPU_ISA=off turns the compiled CPU kernels off",
    ]
    assert f"WINDLASS_CPU_ISA=mmx is not one of {slowest}" in run_with("mmx")


def test_a_library_for_other_processors_only_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = library.runnable(kernels().path)
    look_again(monkeypatch)
    monkeypatch.setattr(library, "supported", lambda handle: ("another",))
    reason = str(library.unavailable_reason())
    assert f"compiled for {compiled[0]}" in reason and "which this processor does not support" in reason
    assert "pip install -e . again (in a clone, make serve does)" in reason


# -- compilation -----------------------------------------------------------------------------------------------------


def errors_of(source: str) -> str:
    command = ["g++", "-fsyntax-only", "-std=c++17", "-fopenmp", "-Wno-psabi", *DEFINES.split(), f"-I{SOURCES}"]
    done = subprocess.run(
        [*command, "-x", "c++", "-"], input=source, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stderr


@pytest.mark.slow
def test_headers_compile_alone_and_twice_in_a_file() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    assert len(HEADERS) > 20
    with ThreadPoolExecutor() as pool:
        errors = list(pool.map(lambda name: errors_of(f'#include "{name}"\n' * 2), HEADERS))
    assert dict(zip(HEADERS, errors, strict=True)) == dict.fromkeys(HEADERS, "")


@pytest.fixture(scope="module")
def arm_objects(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The units compiled for ARM, by unit and instruction set."""
    if shutil.which(f"{ARM_TOOLS}g++") is None:
        pytest.skip("no cross compiler for ARM (g++-aarch64-linux-gnu)")
    folder, built = tmp_path_factory.mktemp("arm"), {}
    for unit, isa in objects(("generic", "neon", "neon_dot")):
        built[unit, isa] = folder / f"{unit}.{isa}.o"
        source = SOURCES / f"unit_{unit}.cpp"
        command = [f"{ARM_TOOLS}g++", "-O1", *FLAGS, f"-DWINDLASS_ISA={isa}", "-c", source, "-o", built[unit, isa]]
        subprocess.run(command, check=True, timeout=120)
    return built


@pytest.fixture(scope="module")
def listing(arm_objects: dict[tuple[str, str], Path]) -> Callable[..., str]:
    def of(tool: str, *arguments: str) -> str:
        files = [path for (_, isa), path in arm_objects.items() if isa == arguments[-1]]
        command = [f"{ARM_TOOLS}{tool}", *arguments[:-1], *files]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    return of


def exported(symbols: str) -> set[str]:
    return set(re.findall(r" T (windlass_\w+)", symbols))


def test_arm_objects_have_every_function(listing: Callable[..., str]) -> None:
    for isa in ("generic", "neon"):
        assert exported(listing("nm", isa)) >= {f"windlass_{name}_{isa}" for name in set(SIGNATURES) - MATRIX}
    assert "windlass_linear_blocks_neon_dot" in exported(listing("nm", "neon_dot"))


def test_only_neon_dot_uses_dot_products(listing: Callable[..., str]) -> None:
    using = {isa for isa in ("generic", "neon", "neon_dot") if re.search(r"\tsdot\t", listing("objdump", "-d", isa))}
    assert using == {"neon_dot"}
