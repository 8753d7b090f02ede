"""The door of a deployment: an actor that holds the listening socket, so that connections wait while nobody accepts them.

The ingress gets the same socket over a Unix socket of the machine, and accepts. It may be replaced or die: who connects
meanwhile waits in the queue that the system keeps for the socket. The actor lives until the deployment is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import tempfile
import threading
from pathlib import Path
from typing import Any

import ray

from windlass.engine.errors import LoadError
from windlass.server.startup.launch import listen

NAMESPACE = "windlass"
HEAD = "node:__internal_head__"  # what Ray calls a resource that only the head has
_ACCEPT_SECONDS = 10.0


class Door:
    """Methods are called by Ray, in one thread."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._address: tuple[str, int] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="windlass-door-"))  # nobody else's
        self._path = self._folder / "socket"
        self._giving = socket.socket(socket.AF_UNIX)
        self._giving.bind(str(self._path))
        self._giving.listen()
        threading.Thread(target=self._give, name="door", daemon=True).start()

    def open(self, host: str, port: int) -> str | None:
        """Listen at this address, and at no other. Returns what is wrong with it."""
        if self._address == (host, port):
            return None
        try:
            listener = listen(host, port)
        except LoadError as error:
            return str(error)
        before, self._listener = self._listener, listener
        self._address = host, port
        if before is not None:
            before.close()
        return None

    def path(self) -> str:
        """Where the socket is handed out, to processes of this user on this machine."""
        return str(self._path)

    def close(self) -> None:
        """Listen no more, and leave nothing behind."""
        if self._listener is not None:
            self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _give(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                asking, _ = self._giving.accept()
                with asking:
                    _, uid, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                    if uid == os.getuid() and self._listener is not None:
                        socket.send_fds(asking, [b"."], [self._listener.fileno()])


def open_door(name: str, host: str, port: int) -> bool:
    """Have the door of this deployment listen; whether it was made now. Raises LoadError."""
    there = name_of_door(name) in {one["name"] for one in ray.util.list_named_actors(all_namespaces=True)}
    door = (
        ray.remote(Door)
        .options(
            name=name_of_door(name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={HEAD: 0.001},
        )
        .remote()
    )
    wrong = ray.get(door.open.remote(host, port))
    if wrong is not None:
        if not there:
            close_door(name)
        raise LoadError(wrong)
    return not there


def close_door(name: str) -> None:
    """Take the door away, where there is one."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        door = ray.get_actor(name_of_door(name), namespace=NAMESPACE)
        ray.get(door.close.remote())
        ray.kill(door)


async def listener_of(door: str) -> socket.socket:
    """The listening socket that the door of this name holds. Raises RuntimeError."""
    try:
        actor: Any = await asyncio.to_thread(ray.get_actor, door, namespace=NAMESPACE)
        return await asyncio.to_thread(_fetch, await actor.path.remote())
    except (ValueError, OSError, ray.exceptions.RayError) as error:
        raise RuntimeError(f"there is no listener for this deployment ({error}): deploy it again") from None


def name_of_door(name: str) -> str:
    """Of an actor. name: of the deployment."""
    return f"windlass-door-{name}"


def _fetch(path: str) -> socket.socket:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_ACCEPT_SECONDS)
        asking.connect(path)
        _, found, _, _ = socket.recv_fds(asking, 1, 1)
    if not found:
        raise OSError("the door is shut")
    return socket.socket(fileno=found[0])
