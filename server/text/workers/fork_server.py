"""The process that text workers are forked from, and the loop of a worker."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from pydantic_core import to_json

from windlass.engine.errors import RequestError
from windlass.engine.process_setup import log_as_json, wants_json
from windlass.server.text.chat_template import ChatTemplate, ChatTemplateError, build_pair_template
from windlass.server.text.pair_prompts import names_pair_roles
from windlass.server.text.tokenizer import Tokenizer
from windlass.server.text.workers import frames
from windlass.server.text.workers.frames import (
    ANSWER,
    COMMAND,
    FORK,
    REAP,
    Done,
    Job,
    OutOfMemory,
    Refused,
    WorkerSource,
)
from windlass.server.text.workers.tasks import TextTasks


def serve(connection: socket.socket, tasks: TextTasks, memory: MemoryLimit) -> None:
    """Answer jobs until the other end is gone."""
    with contextlib.suppress(OSError):
        while (job := frames.receive(connection)) is not None:
            frames.send_encoded(connection, _run_job(job, tasks, memory))


def _run_job(job: Job, tasks: TextTasks, memory: MemoryLimit) -> bytes:
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
        self._limit = resource.getrlimit(resource.RLIMIT_AS)[0]

    def set(self, extra: int | None) -> None:
        """Let this process take `extra` bytes more than it has, None for as many as it was given."""
        with contextlib.suppress(OSError, ValueError):
            soft = self._limit if extra is None else _address_space() + extra
            if self._limit != resource.RLIM_INFINITY:
                soft = min(soft, self._limit)
            resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


COMPILE_MEMORY = 512 * 2**20  # bytes a chat template may take while it is compiled


def main(argv: Sequence[str] | None = None) -> int:
    """Run the fork server; returns when its control socket closes."""
    parser = argparse.ArgumentParser(
        prog="windlass.server.text.workers.fork_server", description="internal: started by the server"
    )
    parser.add_argument("--fd", type=int, required=True)
    control = socket.socket(fileno=parser.parse_args(argv).fd)
    control.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if wants_json():
        log_as_json("text", "warning", threads=False)  # no thread may be there when it forks
    else:
        faulthandler.enable()
    memory = MemoryLimit()
    tasks = _load(control, memory)
    if tasks is None:
        return 1
    to_json("")  # imports what it needs at its first call: here, and not in every fork
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise write to, and so copy, every page
    children: set[int] = set()
    try:
        _run_commands(control, tasks, memory, children)
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return 0


def _load(control: socket.socket, memory: MemoryLimit) -> TextTasks | None:
    """Says Done when the tokenizer is loaded, when the templates are compiled, and, with what came of it, when that of pairs has
    been cut: each has a time of its own."""
    source = frames.receive(control)
    if source is None:
        return None
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(source.tokenizer), source.special_tokens)
    frames.send(control, Done())
    templates = list[ChatTemplate | None]()
    for text in (source.chat_template, source.tool_template):
        if text is None:
            templates.append(None)
            continue
        memory.set(COMPILE_MEMORY)
        try:
            templates.append(ChatTemplate(text, source.special_tokens))
        except (ChatTemplateError, MemoryError) as error:
            frames.send(control, Refused(str(error) or "compiling it takes too much memory"))
            return None
        finally:
            memory.set(None)
    tasks = TextTasks(tokenizer, *templates)
    frames.send(control, Done())
    pairs = _build_pair_template(source, templates[0], memory)
    frames.send(control, pairs)
    if isinstance(pairs, Refused):
        return None
    tasks.prepare_grammars()  # a start does not wait for it
    return tasks


def _build_pair_template(source: WorkerSource, chat: ChatTemplate | None, memory: MemoryLimit) -> Done | Refused:
    """The `PairTemplate`; Done without one where no template takes pairs and none has to."""
    text = source.pair_template
    if text is None and not source.requires_pair_template and (chat is None or not names_pair_roles(chat.source)):
        return Done()
    memory.set(COMPILE_MEMORY)
    try:
        if text is None and chat is None:
            raise ChatTemplateError("this model has no chat template")
        template = chat if text is None else ChatTemplate(text, source.special_tokens)
        assert template is not None
        return Done(build_pair_template(template))
    except (ChatTemplateError, MemoryError) as error:
        if not source.requires_pair_template:
            return Done()
        return Refused(str(error) or "it takes too much memory")
    finally:
        memory.set(None)


def _run_commands(control: socket.socket, tasks: TextTasks, memory: MemoryLimit, children: set[int]) -> None:
    while True:
        data, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if len(data) < COMMAND.size:
            return
        command, number = COMMAND.unpack(data)
        if command == FORK:
            try:
                pid = os.fork()
            except OSError as error:  # no room for another process now: those that run go on
                pid = -(error.errno or 1)
            if pid == 0:
                try:
                    control.close()
                    serve(socket.socket(fileno=fds[0]), tasks, memory)
                finally:
                    os._exit(0)  # whatever happened, a fork never goes on with the fork server's own work
            os.close(fds[0])
            if pid > 0:
                children.add(pid)
            control.sendall(ANSWER.pack(pid))
        elif command == REAP and number in children:
            children.discard(number)
            control.sendall(ANSWER.pack(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])))


if __name__ == "__main__":
    sys.exit(main())
