"""The wheel carries everything a server needs: the packages, the compiled kernels, the bundled model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the tracked files, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    assert tracked.returncode == 0, "run the tests in a git checkout"
    for name in tracked.stdout.splitlines():
        source, target = ROOT / name, folder / "source" / name
        if name.startswith(("tests/", "docs/", "benchmarks/")) or not (source.exists() or source.is_symlink()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(folder / "source"),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_serves_its_own_model(installed: Path) -> None:
    names = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    for package in ("server/app.py", "engine/core.py", "kernels/reference.py", "clients/client.py"):
        assert f"windlass/{package}" in names
    for asset in (
        "report.html.j2",
        "assets/report.css",
        "assets/report.js",
        "assets/chart.js",
        "assets/uPlot.iife.min.js",
    ):
        assert f"windlass/clients/loadtest/{asset}" in names
    assert "windlass/py.typed" in names and "windlass/models/demo/model.safetensors" in names
    assert shutil.which("g++") is None or any(name.endswith(".so") for name in names)
    assert sum((installed / name).stat().st_size for name in names) < 40 << 20
    code = (
        "import windlass, sys; from windlass.server.cli import main; print(windlass.__file__, file=sys.stderr); main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "generate", "The", "--max-tokens", "3", "--temperature", "0"],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert str(installed) in run.stderr and len(run.stdout) > 3
