"""Derived directories: their locks, and the removal of leftovers of killed starts."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from windlass.server.startup.derived_files import Derivation, write_files


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is cached by the module
    path = tmp_path / "model"
    path.write_text("weights")
    return path


def derivation() -> Derivation:
    return Derivation(folder="toys", index="toy.json", files=("toy.json",), version=1)


def derived(source: Path, by: Derivation | None = None) -> Path:
    by = by or derivation()
    index = json.dumps({"files": by.describe_sources([source], "it")})
    return by.directory("toy", [source], "it", lambda made: write_files(made, {"toy.json": index}))


def old(path: Path, hours: float) -> Path:
    before = time.time() - 3600 * hours
    os.utime(path, (before, before))
    return path


def open_files(directory: Path) -> int:
    links = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
    return sum(link.startswith(str(directory)) for link in links)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are counted in /proc")
def test_a_directory_is_locked_once(source: Path) -> None:
    by = derivation()
    made = derived(source, by)
    assert open_files(made) == 1
    for _ in range(5):
        assert derived(source, by) == made
    assert open_files(made) == 1
    (made / "toy.json").unlink()  # it is damaged: its replacement is locked instead
    assert derived(source, by) == made and open_files(made) == 1
    assert len(by._lock_descriptors) == 1


def test_directories_of_killed_starts_are_removed_after_an_hour(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "toys"
    for name in (".making-old", ".making-whole", ".making-new", "another"):
        (folder / name).mkdir(parents=True)
    (folder / ".making-whole" / "toy.json").write_text("{}")
    for name in (".making-old", ".making-whole", "another"):
        old(folder / name, 1.1)
    made = derived(source)
    assert {path.name for path in folder.iterdir()} == {".making-new", "another", made.name}


def test_temporary_directories_are_removed_unless_in_use(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "file"))  # not a writable folder
    used = derived(source)
    assert used.parent == tmp_path / "tmp" and used.name.startswith("windlass-toys-")
    left, half, new = (used.parent / f"windlass-toys-{name}" for name in ("left", "half", "new"))
    for path in (left, half, new):
        path.mkdir()
    (left / "toy.json").write_text("{}")
    (link := used.parent / "windlass-toys-link").symlink_to(new)
    for path in (used, left, half):
        old(path, 1.1)
    made = derived(source)
    assert set(used.parent.iterdir()) == {used, new, made, link}
