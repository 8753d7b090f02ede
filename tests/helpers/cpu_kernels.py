"""Compiled CPU kernels in all variants that this machine supports, and tensors that end at a protected page."""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from windlass.kernels.cpu import library
from windlass.kernels.cpu.build import compile_library, fingerprint, supported
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
def _supported() -> tuple[str, ...]:
    """Return the instruction sets that this processor supports, slowest first; none without compiled kernels."""
    path = library.find()
    return () if path is None else supported(ctypes.CDLL(str(path)))


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the sets of the installed library that this processor supports, slowest first."""
    path = library.find()
    return () if path is None else library.runnable(path)


# Compiling takes a minute or more, and other processes wait meanwhile.
_COMPILED_HERE = (pytest.mark.slow, pytest.mark.timeout(1200))


def _unless_real(*forms: str) -> tuple[Any, ...]:
    """Return the portable variants without a native one on this processor."""
    return tuple(pytest.param(form, marks=_COMPILED_HERE) for form in forms if _LIKE[form] not in _supported())


_NATIVE = ("neon", "neon_dot") if ARM else ("avx2", "avx2_vnni", "avx512", "avx512_vnni")
_PAIRS = ("avx512_bf16", "avx512_amx")


def _variants(*forms: str) -> tuple[Any, ...]:
    """Return these variants; all but the installed one are marked as slow."""
    return tuple(
        form if form in _installed()[-1:] else pytest.param(form, marks=_COMPILED_HERE) for form in dict.fromkeys(forms)
    )


# The installed set always belongs to these: it includes the code of the sets that it extends.
FORMS = (
    *_variants("generic", *(form for form in _NATIVE if not form.endswith(("_dot", "_vnni"))), *_installed()[-1:]),
    *_unless_real("16 lanes"),
)
# With the variants that have their own code for quantized weights and quantized keys and values.
PACKED_FORMS = (*_variants("generic", *_NATIVE), *_unless_real("16 lanes", "8 lanes vnni", "16 lanes vnni"))
# Variants that multiply pairs of bfloat16.
PAIR_FORMS = (*_variants(*_PAIRS), *_unless_real("16 lanes bf16", "16 lanes amx"))
# Variants with a matrix unit.
MATRIX_FORMS = (*_variants("avx512_amx"), *_unless_real("16 lanes amx"))

_BUILT = Path(__file__).resolve().parents[2] / "build" / "test-kernels"  # by digest of the sources, shared between runs


_PORTABLE_SETS = (("avx2", "avx2_vnni"), ("avx512", "avx512_vnni", "avx512_bf16", "avx512_amx"))


@functools.cache
def _compiled(isas: tuple[str, ...], portable: bool) -> Path:
    """Compile the kernels for these sets; portable: without their instructions, so that any processor runs them."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile kernels with")
    target = _BUILT / f"{isas[0]}_{'portable_' if portable else ''}{fingerprint()}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):  # another test process may compile the same
        if not target.exists():
            compile_library(target, isas, "-O1", *(["-DWINDLASS_PORTABLE"] if portable else []))
    return target


@functools.cache
def kernels(form: str | None = None) -> Library:
    """Load one of FORMS or PACKED_FORMS, by default the fastest; skip the test if this machine does not support it."""
    path = library.find()
    if path is None:
        assert shutil.which("g++") is None, "g++ is here, yet the CPU kernels were not compiled: run make serve"
        pytest.skip("the CPU kernels were not compiled, there is no g++")
    form = form or _installed()[-1]
    if isa := _LIKE.get(form):
        isas = next(isas for isas in _PORTABLE_SETS if isa in isas)
        return library.bind(_compiled(isas, portable=True), isa)
    if form not in _supported():
        pytest.skip(f"this processor has no {form}")
    return library.bind(path if form in _installed() else _compiled((form,), portable=False), form)


def rounds_queries(library: Library) -> bool:
    """Whether int8 pages are multiplied as they are, with queries and weights rounded to 16 bits (where head sizes permit)."""
    return library.isa in ("avx2_vnni", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon_dot")


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
