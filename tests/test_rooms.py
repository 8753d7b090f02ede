"""Rooms stay small: a source file is read in one sitting, and the top of a floor is seen at a glance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = 400
ENTRIES = 12
FOLDERS = ("server", "engine", "kernels", "clients", "benchmarks", "docs", "models")


def sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".cpp")]
    return [ROOT / "setup.py", *found]


def test_a_source_file_stays_below_400_lines() -> None:
    files = sources()
    assert len(files) > 250
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length >= LINES} == {}


@pytest.mark.parametrize("floor", ["engine", "kernels", "server"])
def test_the_top_of_a_floor_is_seen_at_a_glance(floor: str) -> None:
    entries = sorted(path.name for path in (ROOT / floor).iterdir() if not path.name.startswith(("_", ".")))
    assert 3 <= len(entries) <= ENTRIES, entries


def test_the_picture_is_the_one_the_imports_make_now(tmp_path: Path) -> None:
    made = tmp_path / "rooms.svg"
    command = [sys.executable, ROOT / "docs" / "make_rooms_picture.py", "--out", made]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    committed = (ROOT / "docs" / "rooms.svg").read_text(encoding="utf-8")
    assert made.read_text(encoding="utf-8") == committed, "run docs/make_rooms_picture.py"
