"""Every header of the kernels compiles alone, so that they can be included in any order, and is included once."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "kernels" / "cpu" / "src"
HEADERS = sorted(path.name for path in SOURCES.glob("*.h"))
# The one instruction set whose code takes in every header, in the form that needs none of its instructions.
DEFINES = "-DWINDLASS_PORTABLE -DWINDLASS_ISA=avx512_vnni -DWINDLASS_LANES=16 -DWINDLASS_VNNI -DWINDLASS_BF16"


def errors_of(source: str) -> str:
    command = ["g++", "-fsyntax-only", "-std=c++17", "-fopenmp", "-Wno-psabi", *DEFINES.split(), f"-I{SOURCES}"]
    done = subprocess.run(
        [*command, "-x", "c++", "-"], input=source, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stderr


@pytest.mark.slow
def test_every_header_compiles_alone_and_twice_in_a_file() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    assert len(HEADERS) > 20
    with ThreadPoolExecutor() as pool:
        errors = list(pool.map(lambda name: errors_of(f'#include "{name}"\n' * 2), HEADERS))
    assert dict(zip(HEADERS, errors, strict=True)) == dict.fromkeys(HEADERS, "")
