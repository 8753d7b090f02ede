"""A library that was compiled from other headers than this Python mirrors is refused in one line that says what to do."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from helpers.cpu_kernels import kernels, look_again

from windlass.kernels.cpu import library
from windlass.kernels.cpu.elementwise_bindings import CompiledSamplingRow
from windlass.kernels.cpu.sources import fingerprint


def test_every_struct_has_the_size_that_the_compiler_gave_it() -> None:
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


def test_a_library_that_tells_no_sizes_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("generic")
    older = ctypes.CDLL(None)  # has none of our functions
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


def test_a_change_of_any_source_is_seen(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == ""
    seen = set()
    for name, text in (("a.cpp", "1"), ("b.h", "2"), ("b.h", "3"), ("c.h", ""), ("d.txt", "4")):
        (tmp_path / name).write_text(text)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 4
