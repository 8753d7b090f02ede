"""Builds of both distributions from a copy of the tracked files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_UNUSED = ("tests/", "docs/", "benchmarks/")


def copy_clone(folder: Path) -> Path:
    """Copy the files of a clone without tests, pages and benchmarks, with the compiled kernels of this checkout."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert tracked.returncode == 0, "run the tests in a git checkout"
    for name in tracked.stdout.splitlines():
        source, target = ROOT / name, folder / name
        if name.startswith(_UNUSED) or not (source.exists() or source.is_symlink()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    for compiled in ROOT.glob("kernels/cpu/*.so"):
        shutil.copy2(compiled, folder / compiled.relative_to(ROOT))
    return folder


def build(source: Path, kind: str, folder: Path, **variables: str) -> Path:
    """The archive that `python -m build` makes of a source folder. kind: wheel or sdist. variables: of its environment."""
    pytest.importorskip("build", reason="needs the extra e2e: pip install -e '.[e2e]'")
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), str(source)]
    environment = {**os.environ, **variables}
    built = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent, env=environment, check=False)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (archive,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return archive
