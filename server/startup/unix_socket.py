"""A listening Unix socket: made where nobody else listens, and removed at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from windlass.engine.errors import LoadError

_OTHERS = 0o117  # of the umask: the socket is for its owner and group


@contextlib.contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """The socket, which belongs to the owner and the group of this process; its file goes when the block ends.

    A socket that nobody listens on any more, as a server leaves that was killed, is replaced. Raises LoadError.
    """
    path = path.absolute()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        mask = os.umask(_OTHERS)  # the file must not be open to others for a moment either
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(65535)
        listener.set_inheritable(False)
        made = path.stat().st_ino
    except OSError as error:
        listener.close()
        raise LoadError(f"cannot listen on --uds {path} ({error.strerror or error}): choose another path") from None
    except LoadError:
        listener.close()
        raise
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if path.stat().st_ino == made:  # another server may have taken the path since
                path.unlink()


def _remove_stale(path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise LoadError(f"--uds {path} exists and is no socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise LoadError(f"--uds {path} exists and cannot be tried ({error}): remove it") from None
        else:
            raise LoadError(f"another server listens on --uds {path}: end it, or choose another path")
