"""Compiled CPU kernels in all variants that this machine supports, and tensors that end at a protected page."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from windlass.kernels.cpu import library
from windlass.kernels.cpu.library import Library

ARM = platform.machine() in ("aarch64", "arm64")


# Native variants whose code the portable ones contain, for processors without their instructions.
_LIKE = {
    "16 lanes": "avx512",
    "8 lanes vnni": "avx2_vnni",
    "16 lanes vnni": "avx512_vnni",
    "16 lanes bf16": "avx512_bf16",
    "16 lanes amx": "avx512_amx",
}


@functools.cache
def _runnable() -> tuple[str, ...]:
    """Return the variants that this processor supports; none if they cannot be loaded, which tests report."""
    path = library.find()
    try:
        return () if path is None else library.runnable(path)
    except (OSError, AttributeError):
        return ()


def _unless_real(*forms: str) -> tuple[Any, ...]:
    """Return the portable variants without a native one on this processor. Others would only cost minutes of compiling."""
    marks = [pytest.mark.slow, pytest.mark.timeout(1200)]  # other processes wait for the compiling one
    return tuple(pytest.param(form, marks=marks) for form in forms if _LIKE[form] not in _runnable())


# The last of these that the processor supports is its fastest.
_NATIVE = ("neon", "neon_dot") if ARM else ("avx2", "avx2_vnni", "avx512", "avx512_vnni")


def _variants(*native: str) -> tuple[Any, ...]:
    """Return the generic variant and these native ones, of which all but the fastest are marked as slow."""
    fastest = next((form for form in reversed(native) if form in _runnable()), None)
    return ("generic", *(form if form == fastest else pytest.param(form, marks=pytest.mark.slow) for form in native))


FORMS = (*_variants(*(form for form in _NATIVE if not form.endswith(("_dot", "_vnni")))), *_unless_real("16 lanes"))
# With the variants that have their own code for quantized weights and quantized keys and values.
PACKED_FORMS = (*_variants(*_NATIVE), *_unless_real("16 lanes", "8 lanes vnni", "16 lanes vnni"))
# Variants that multiply pairs of bfloat16.
PAIR_FORMS = ("avx512_bf16", "avx512_amx", *_unless_real("16 lanes bf16", "16 lanes amx"))
# Variants with a matrix unit.
MATRIX_FORMS = ("avx512_amx", *_unless_real("16 lanes amx"))

_FLAGS = "-O1 -std=c++17 -fopenmp -fPIC -shared -fvisibility=hidden -Wno-psabi -DWINDLASS_PORTABLE".split()
_BUILT = Path(__file__).resolve().parents[2] / "build" / "test-kernels"  # by digest of the sources, shared between runs
_FAMILIES = {"8": "avx2", "16": "avx512"}  # of the portable variants


@functools.cache
def _portable(family: str) -> Path:
    """Compile the AVX2 or AVX-512 files without these instructions, so that any processor runs them."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the portable kernels with")
    folder = Path(library.__file__).resolve().parent / "src"
    # The generic file describes the structs that Python fills.
    sources = [str(folder / "isa_generic.cpp"), *(str(path) for path in sorted(folder.glob(f"isa_{family}*.cpp")))]
    command = [compiler, *_FLAGS, '-DWINDLASS_SOURCES="portable"', *sources]
    read = hashlib.sha256(" ".join(command).encode())
    for file in sorted(folder.iterdir()):
        read.update(file.read_bytes())
    target = _BUILT / f"portable_{family}_{read.hexdigest()[:16]}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):  # another test process may compile the same
        if not target.exists():
            partial = target.with_suffix(".partial")
            subprocess.run([*command, "-o", str(partial)], check=True, timeout=1000)
            partial.replace(target)
    return target


@functools.cache
def kernels(form: str) -> Library:
    """Load one of FORMS or PACKED_FORMS; skip the test if this machine does not support it."""
    path = library.find()
    if path is None:
        assert shutil.which("g++") is None, "g++ is here, yet the CPU kernels were not compiled: reinstall windlass"
        pytest.skip("the CPU kernels were not compiled, there is no g++")
    lanes, _, rest = form.partition(" lanes")
    if lanes in _FAMILIES:
        return library.bind(_portable(_FAMILIES[lanes]), _FAMILIES[lanes] + rest.replace(" ", "_"))
    if form not in library.runnable(path):
        pytest.skip(f"this processor has no {form}")
    return library.bind(path, form)


def choose(patch: pytest.MonkeyPatch, form: Library | str) -> None:
    """Use these compiled kernels in this process; a string is the reason why there are none."""
    found = (None, form) if isinstance(form, str) else (form, None)
    patch.setattr(library, "_load_once", lambda: found)


def look_again(patch: pytest.MonkeyPatch) -> None:
    """Detect the compiled kernels again at each query."""
    patch.setattr(library, "_load_once", library._load_once.__wrapped__)


def at_the_end_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy followed by an unreadable page, so that an overrun ends the process."""
    page = mmap.PAGESIZE
    size = tensor.numel() * tensor.element_size()
    room = -(-size // page) * page
    area = mmap.mmap(-1, room + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + room), ctypes.c_size_t(page), 0) == 0
    copy = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=room - size).view(tensor.shape)
    return copy.copy_(tensor)
