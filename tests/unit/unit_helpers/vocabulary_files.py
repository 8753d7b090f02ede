"""llama.cpp's vocabulary files with texts and expected ids, and chat templates of many models.

Downloaded on demand from the source distribution of llama-cpp-python on PyPI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

_VERSION = "0.3.36"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_INSIDE = f"llama_cpp_python-{_VERSION}/vendor/llama.cpp/models/"
_SECONDS = 240
# pip requests the metadata of a source distribution before it stores it, for which the real build backend requires CMake.
_BACKEND = f"""
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "llama_cpp_python-{_VERSION}.dist-info"
    (Path(folder) / name).mkdir()
    (Path(folder) / name / "METADATA").write_text("Metadata-Version: 2.1\\nName: llama_cpp_python\\nVersion: {_VERSION}\\n")
    return name
"""


def vocabulary_files(cache: Path) -> Path:
    """Return the folder of `ggml-vocab-*.gguf`, `.inp`, `.out` and `*.jinja` (75 MB), downloaded once into `cache`.

    Skips the test if the download fails.
    """
    folder = cache / f"{_VERSION}-with-templates"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=cache) as work:
        archive = _download(Path(work))
        made = Path(work) / "models"
        made.mkdir()
        with tarfile.open(archive) as files:
            for member in files:
                name = member.name.removeprefix(_INSIDE).removeprefix("templates/")
                wanted = name.startswith("ggml-vocab-") or name.endswith(".jinja")
                if member.isfile() and wanted and "/" not in name:
                    source = files.extractfile(member)
                    assert source is not None
                    with (made / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
        if not folder.is_dir():
            made.rename(folder)
    return folder


def _download(work: Path) -> Path:
    backend = work / "scikit_build_core"
    backend.mkdir()
    (backend / "__init__.py").write_text("")
    (backend / "build.py").write_text(_BACKEND)
    wanted = work / "wanted.txt"
    wanted.write_text(f"llama-cpp-python=={_VERSION} --hash=sha256:{_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--require-hashes", "--retries=1", "--timeout=15", "--progress-bar=off"]
    command += ["--dest", str(work), "-r", str(wanted)]
    try:
        found = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(work), "TMPDIR": str(work)},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"the source of llama-cpp-python {_VERSION} was not downloaded within {_SECONDS} s")
    archives = list(work.glob("*.tar.gz"))
    if found.returncode or not archives:
        pytest.skip(f"pip cannot download the source of llama-cpp-python {_VERSION}: {found.stderr.strip()[-300:]}")
    return archives[0]
