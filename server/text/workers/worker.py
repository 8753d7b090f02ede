"""The loop of one text process: takes a job, runs it within its memory, answers.

Knows frames and the tasks' errors. The other side decides when it has waited long enough and kills the process.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from pathlib import Path

from windlass.engine.errors import RequestError
from windlass.server.text.chat_template import ChatTemplateError
from windlass.server.text.workers import frames
from windlass.server.text.workers.frames import Done, Job, OutOfMemory, Refused
from windlass.server.text.workers.tasks import TextTasks


def serve(connection: socket.socket, tasks: TextTasks, memory: MemoryLimit) -> None:
    """Answer jobs until the other end is gone."""
    with contextlib.suppress(OSError):
        while (job := frames.receive(connection)) is not None:
            frames.send_encoded(connection, _answer(job, tasks, memory))


def _answer(job: Job, tasks: TextTasks, memory: MemoryLimit) -> bytes:
    memory.set(job.memory)
    refused: Refused | OutOfMemory
    try:
        return frames.encode(Done(job.call.of(tasks)))
    except MemoryError:
        refused = OutOfMemory()
    except (RequestError, ChatTemplateError) as error:
        refused = Refused(error.message)
    finally:
        memory.set(None)
    return frames.encode(refused)


class MemoryLimit:
    """What this process may take: never more than the soft limit that it was started with, or that its parent was."""

    def __init__(self) -> None:
        self._most = resource.getrlimit(resource.RLIMIT_AS)[0]

    def set(self, extra: int | None) -> None:
        """Let this process take `extra` bytes more than it has, None for as many as it was given."""
        with contextlib.suppress(OSError, ValueError):
            soft = self._most if extra is None else _address_space() + extra
            if self._most != resource.RLIM_INFINITY:
                soft = min(soft, self._most)
            resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
