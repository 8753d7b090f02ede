"""Compilation of the CPU kernels: instruction sets, units, compiler commands.

setup.py imports this file, and the Makefile runs it while packages are downloaded, so it needs the standard library only.
`python kernels/cpu/build.py` compiles the library for this processor, unless that is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER / "src"

# Slowest to fastest for each kind of processor; the index is the level in src/isa.h.
ISAS = ("generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon", "neon_dot")

# Instruction sets that extend another one. Where both are compiled, the extension overrides these units only.
EXTENSIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "avx2_vnni": ("avx2", ("attention_decode", "attention_prefill", "block_products")),
    "avx512_vnni": ("avx512", ("attention_decode", "attention_prefill", "block_products")),
    "avx512_bf16": ("avx512_vnni", ("attention_prefill", "panel_products")),
    "avx512_amx": ("avx512_bf16", ("attention_prefill", "matrix_products")),
    "neon_dot": ("neon", ("attention_decode", "block_products")),
}

# Units, slowest to compile first. Products and attention keep tiles of sums in registers only under -O3, which unrolls their
# loops: under -O2 a decode step of Qwen2.5-Coder 1.5B took 8 % longer, its prompts 22 %, float32 products four times as long.
# Blocks are repacked eleven times as fast; -O2 vectorizes none of these loops (Xeon with AMX, 2026-11-30). The loops of others
# are written as vectors, and -O3 only doubles their compilation.
UNITS = {
    "block_products": "-O3",
    "dense_products": "-O3",
    "attention_decode": "-O3",
    "sequences": "-O2",
    "rotation": "-O2",
    "pointwise": "-O2",
    "attention_prefill": "-O3",
    "block_formats": "-O3",
    "panel_products": "-O3",
    "matrix_products": "-O3",
}
FLAGS = ("-std=c++17", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", "-g0")


class BuildError(Exception):
    """The kernels cannot be compiled; the message gives the reason."""


def fingerprint(folder: Path = SOURCES) -> str:
    """Of the C++ files in `folder`, the flags and the units, in hexadecimal; empty where there are no files."""
    files = sorted((*folder.glob("*.cpp"), *folder.glob("*.h")))
    whole = hashlib.sha256(repr((FLAGS, UNITS, EXTENSIONS)).encode())
    for file in files:
        content = file.read_bytes()
        whole.update(f"{file.name} {len(content)}\n".encode() + content)
    return whole.hexdigest()[:32] if files else ""


def compiler() -> list[str]:
    """The C++ compiler: CXX, or the first of g++, c++ and clang++ on the path. Raises BuildError."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C++ compiler: install g++ 11 or newer, or set CXX")


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr.strip()}")


def host_isas(folder: Path) -> tuple[str, ...]:
    """The instruction sets that this processor supports, slowest to fastest. `folder` receives a small library that knows."""
    probe = folder / "probe.so"
    defines = ('-DWINDLASS_SOURCES=""', '-DWINDLASS_ISAS=""')
    _run([*compiler(), "-O0", *FLAGS, *defines, "-shared", str(SOURCES / "library.cpp"), "-o", str(probe)])
    return supported(ctypes.CDLL(str(probe)))


def supported(library: ctypes.CDLL) -> tuple[str, ...]:
    """The instruction sets that this processor supports, slowest to fastest."""
    return tuple(isa for level, isa in enumerate(ISAS) if library.windlass_can_run(level))


def all_isas() -> tuple[str, ...]:
    """All instruction sets of this kind of processor."""
    arm = platform.machine() in ("aarch64", "arm64")
    x86 = platform.machine() in ("x86_64", "AMD64")
    return tuple(
        isa for isa in ISAS if isa == "generic" or (arm and isa.startswith("neon")) or (x86 and isa.startswith("avx"))
    )


def wanted_isas(folder: Path) -> tuple[str, ...]:
    """The sets to compile: WINDLASS_ISAS (`all`, `host`, or names separated by commas); by default the host's best one.

    Raises BuildError for an unknown name.
    """
    chosen = os.environ.get("WINDLASS_ISAS") or "host"
    if chosen == "all":
        return all_isas()
    if chosen == "host":
        return (host_isas(folder)[-1],)
    names = tuple(name.strip() for name in chosen.split(","))
    if unknown := [name for name in names if name not in all_isas()]:
        raise BuildError(f"WINDLASS_ISAS: unknown {', '.join(unknown)}; known here: all, host, {', '.join(all_isas())}")
    return tuple(isa for isa in ISAS if isa in names)


def objects(isas: Sequence[str]) -> list[tuple[str, str]]:
    """(unit, instruction set) of each object file, slowest to compile first."""
    return [
        (unit, isa)
        for unit in UNITS
        for isa in isas
        if isa not in EXTENSIONS or EXTENSIONS[isa][0] not in isas or unit in EXTENSIONS[isa][1]
    ]


def compile_library(target: Path, isas: Sequence[str], *flags: str) -> None:
    """Compile the kernels for these instruction sets into `target`, in parallel, with a line of progress per unit.

    flags: further ones, which override those of the units.
    """
    start, jobs = time.monotonic(), os.cpu_count() or 1
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        folder = Path(name)
        described = (f'-DWINDLASS_SOURCES="{fingerprint()}"', f'-DWINDLASS_ISAS="{",".join(isas)}"')
        outputs: dict[Path, tuple[str, str, tuple[str, ...]]] = {
            folder / "library.o": ("library.cpp", "-O2", described)
        }
        for unit, isa in objects(isas):
            outputs[folder / f"{unit}.{isa}.o"] = f"unit_{unit}.cpp", UNITS[unit], (f"-DWINDLASS_ISA={isa}",)
        futures = {
            pool.submit(
                _run, [*compiler(), level, *FLAGS, *flags, *defines, "-c", str(SOURCES / source), "-o", str(output)]
            ): output
            for output, (source, level, defines) in outputs.items()
        }
        try:
            for number, done in enumerate(as_completed(futures), 1):
                done.result()
                seconds = time.monotonic() - start
                print(
                    f"kernels: {number} of {len(futures)} compiled, {seconds:.0f} s ({futures[done].stem})", flush=True
                )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            _run([*compiler(), "-shared", "-fopenmp", *map(str, outputs), "-o", str(partial)])
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def compiled(path: Path) -> tuple[str, tuple[str, ...]]:
    """Fingerprint and instruction sets of a compiled library, read from the file without loading it."""
    content = path.read_bytes()
    sources = re.search(rb"windlass sources ([0-9a-f]+)\0", content)
    isas = re.search(rb"windlass isas ([a-z0-9_,]+)\0", content)
    return (sources[1].decode() if sources else "", tuple(isas[1].decode().split(",")) if isas else ())


def outdated(path: Path, folder: Path) -> str | None:
    """Why the library must be compiled again for this processor, or None."""
    if not path.exists():
        return "the kernels are not compiled"
    sources, isas = compiled(path)
    if sources != fingerprint():
        return "the sources of the kernels have changed"
    with contextlib.suppress(OSError):
        if not os.environ.get("WINDLASS_ISAS") and supported(ctypes.CDLL(str(path)))[-1] in isas:
            return None  # the usual case, without a compiler
    if missing := [isa for isa in wanted_isas(folder) if isa not in isas]:
        return f"the kernels are compiled for {', '.join(isas)}, not for {', '.join(missing)}"
    return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other processes that compile these sources."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def library_path() -> Path:
    """The library in the source tree for this interpreter."""
    return FOLDER / f"_windlass_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(path: Path) -> None:
    """Compile the library at `path` unless it is up to date. Raises BuildError."""
    with locked(SOURCES), TemporaryDirectory() as name:
        if reason := outdated(path, Path(name)):
            # An outdated library would be refused at run time. Without it, a later build with a compiler creates a new one.
            path.unlink(missing_ok=True)
            isas = wanted_isas(Path(name))
            print(f"kernels: {reason}; compiling for {', '.join(isas)}", flush=True)
            compile_library(path, isas)


def main() -> None:
    try:
        build(library_path())
    except BuildError as error:
        sys.exit(f"kernels: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
