"""The compiled library: sources, struct sizes, instruction sets, and compilation for ARM."""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.cpu_kernels import kernels, look_again

from windlass.kernels.cpu import library
from windlass.kernels.cpu.elementwise_bindings import CompiledSamplingRow
from windlass.kernels.cpu.library import SIGNATURES
from windlass.kernels.cpu.sources import fingerprint

SOURCES = Path(__file__).parents[3] / "kernels" / "cpu" / "src"
HEADERS = sorted(path.name for path in SOURCES.glob("*.h"))
# The instruction set that includes every header, in its portable form.
DEFINES = "-DWINDLASS_PORTABLE -DWINDLASS_ISA=avx512_vnni -DWINDLASS_LANES=16 -DWINDLASS_VNNI -DWINDLASS_BF16"
ROOT = Path(__file__).parents[3]
ARM_TOOLS = "aarch64-linux-gnu-"


def test_struct_sizes_equal_those_of_the_compiler() -> None:
    kernels("generic")
    handle = ctypes.CDLL(str(library.find()))
    assert library.differing_structs(handle) == []
    assert handle.windlass_struct_size(b"SamplingRow") == ctypes.sizeof(CompiledSamplingRow)
    assert handle.windlass_struct_size(b"SamplingRows") == -1


@pytest.mark.parametrize("name", library.SIZES)
def test_a_library_with_another_size_is_not_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("generic")
    compiled = library.SIZES[name]
    monkeypatch.setitem(library.SIZES, name, compiled + 8)
    look_again(monkeypatch)
    reason = str(library.unavailable_reason())
    assert f"{name}: {compiled} bytes, not {compiled + 8}" in reason
    assert "install a C++ compiler" in reason and "\n" not in reason
    with pytest.raises(library.KernelsUnavailableError, match="compiler"):
        library.load()


def test_a_library_without_struct_sizes_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("generic")
    older = ctypes.CDLL(None)  # a library without these functions
    monkeypatch.setattr(ctypes, "CDLL", lambda path: older)
    look_again(monkeypatch)
    assert "install a C++ compiler" in str(library.unavailable_reason())


def test_a_library_of_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structs may be equal although a function has another argument; only the sources show that."""
    kernels("generic")
    look_again(monkeypatch)
    monkeypatch.setattr(library, "fingerprint", lambda folder: fingerprint(folder)[:-1] + "x")
    assert "(compiled from other sources): install a C++ compiler" in str(library.unavailable_reason())
    monkeypatch.setattr(library, "fingerprint", lambda folder: "")  # a package without them: nothing to compare with
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
def test_the_environment_forces_a_lower_instruction_set_or_none() -> None:
    kernels("generic")
    assert run_with("generic").splitlines() == ["generic", "compiled CPU kernels (generic)", "[[4.0, 4.0]]"]
    assert run_with("off").splitlines()[1:] == [
        "plain torch kernels: WINDLASS_CPU_ISA=off turns the compiled CPU kernels off",
        "WINDLASS_CPU_ISA=off turns the compiled CPU kernels off",
    ]
    assert "WINDLASS_CPU_ISA=mmx is not one of generic" in run_with("mmx")


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
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The package's sources compiled for ARM with its own flags, by the name of the instruction set."""
    if shutil.which(f"{ARM_TOOLS}g++") is None:
        pytest.skip("no cross compiler for ARM (g++-aarch64-linux-gnu)")
    extension = runpy.run_path(str(ROOT / "setup.py"))["kernels"]
    folder = tmp_path_factory.mktemp("arm")
    flags = ["-O1" if flag.startswith("-O") else flag for flag in extension.extra_compile_args]
    built = {}
    for source in extension.sources:
        target = folder / f"{Path(source).stem}.o"
        subprocess.run(
            [f"{ARM_TOOLS}g++", *flags, "-fPIC", "-c", source, "-o", target], cwd=ROOT, check=True, timeout=120
        )
        built[target.stem.removeprefix("isa_")] = target
    return built


@pytest.fixture(scope="module")
def listing(objects: dict[str, Path]) -> Callable[..., str]:
    def of(tool: str, *arguments: str) -> str:
        command = [f"{ARM_TOOLS}{tool}", *arguments[:-1], objects[arguments[-1]]]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    return of


def exported(symbols: str) -> set[str]:
    return set(re.findall(r" T (windlass_\w+)", symbols))


def test_arm_objects_have_every_function(listing: Callable[..., str]) -> None:
    for isa in ("generic", "neon"):
        assert exported(listing("nm", isa)) >= {f"windlass_{name}_{isa}" for name in SIGNATURES}
    assert "windlass_linear_blocks_neon_dot" in exported(listing("nm", "neon_dot"))


def test_objects_of_other_processors_are_empty(objects: dict[str, Path], listing: Callable[..., str]) -> None:
    for isa in set(objects) - {"generic", "neon", "neon_dot"}:
        assert not exported(listing("nm", isa))


def test_only_neon_dot_uses_dot_products(listing: Callable[..., str]) -> None:
    using = {isa for isa in ("generic", "neon", "neon_dot") if re.search(r"\tsdot\t", listing("objdump", "-d", isa))}
    assert using == {"neon_dot"}
