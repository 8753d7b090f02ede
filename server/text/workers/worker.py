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


def serve(connection: socket.socket, tasks: TextTasks) -> None:
    """Answer jobs until the other end is gone."""
    with contextlib.suppress(OSError):
        while (job := frames.receive(connection)) is not None:
            frames.send_encoded(connection, _answer(job, tasks))


def _answer(job: Job, tasks: TextTasks) -> bytes:
    limit_memory(job.memory)
    refused: Refused | OutOfMemory
    try:
        return frames.encode(Done(getattr(tasks, job.task)(*job.args)))
    except MemoryError:
        refused = OutOfMemory()
    except (RequestError, ChatTemplateError) as error:
        refused = Refused(error.message)
    finally:
        limit_memory(None)
    return frames.encode(refused)


def limit_memory(extra: int | None) -> None:
    """Let this process take `extra` bytes more than it has, None for as many as the system lets it."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = hard if extra is None else _address_space() + extra
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
