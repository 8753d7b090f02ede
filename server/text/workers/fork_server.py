"""Fork server of the text workers, and the loop of a worker."""

from __future__ import annotations

import argparse
import contextlib
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
from windlass.engine.process_setup import disable_core_dumps, log_as_json, trim_heap, wants_json
from windlass.server.text.chat_template import ChatTemplate, ChatTemplateError, build_pair_template
from windlass.server.text.tokenizer import Tokenizer
from windlass.server.text.tokenizer_files import names_pair_roles
from windlass.server.text.workers import frames
from windlass.server.text.workers.frames import ANSWER, COMMAND, FORK, REAP, Job, NextPhase, Result, WorkerSource
from windlass.server.text.workers.tasks import TextTasks

COMPILE_MEMORY = 512 * 2**20  # bytes for compiling a chat template


class MemoryLimit:
    """Address space limit of this process, never above the soft limit that it inherited."""

    def __init__(self) -> None:
        self._limit = resource.getrlimit(resource.RLIMIT_AS)[0]

    def set(self, extra: int | None) -> None:
        """Allow `extra` bytes more than the process has now; None restores the inherited limit."""
        with contextlib.suppress(OSError, ValueError):
            soft = self._limit if extra is None else _address_space() + extra
            if self._limit != resource.RLIM_INFINITY:
                soft = min(soft, self._limit)
            resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


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
    disable_core_dumps()
    if wants_json():
        log_as_json("text", "warning", threads=False)  # a process that forks must have no threads
    memory = MemoryLimit()
    tasks = _load(control, memory)
    if tasks is None:
        return 1
    to_json("")  # its first call imports modules: once here instead of in every fork
    gc.collect()
    trim_heap()
    gc.freeze()  # otherwise a collection in a fork would write to every page, and so copy it
    children: set[int] = set()
    try:
        _run_commands(control, tasks, memory, children)
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return 0


def _load(control: socket.socket, memory: MemoryLimit) -> TextTasks | None:
    """Load and send a Result after each of three parts, which have separate time limits: the tokenizer, the chat templates, and
    the template of pairs with its value."""
    source = frames.receive(control)
    if source is None:
        return None
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(source.tokenizer), source.special_tokens)
    frames.send(control, Result())
    templates = list[ChatTemplate | None]()
    for text in (source.chat_template, source.tool_template):
        if text is None:
            templates.append(None)
            continue
        memory.set(COMPILE_MEMORY)
        try:
            templates.append(ChatTemplate(text, source.special_tokens))
        except (ChatTemplateError, MemoryError) as error:
            frames.send(control, Result(error="input", message=str(error) or "compiling it takes too much memory"))
            return None
        finally:
            memory.set(None)
    tasks = TextTasks(tokenizer, *templates)
    frames.send(control, Result())
    pairs = _build_pair_template(source, templates[0], memory)
    frames.send(control, pairs)
    if pairs.error:
        return None
    tasks.prepare_grammars()  # after the last Result: the start does not wait for it
    return tasks


def _build_pair_template(source: WorkerSource, chat: ChatTemplate | None, memory: MemoryLimit) -> Result:
    """The `PairTemplate` as a Result; its value is None if no template supports pairs and none is required."""
    text = source.pair_template
    if text is None and not source.requires_pair_template and (chat is None or not names_pair_roles(chat.source)):
        return Result()
    memory.set(COMPILE_MEMORY)
    try:
        if text is None and chat is None:
            raise ChatTemplateError("this model has no chat template")
        template = chat if text is None else ChatTemplate(text, source.special_tokens)
        assert template is not None
        return Result(build_pair_template(template))
    except (ChatTemplateError, MemoryError) as error:
        if not source.requires_pair_template:
            return Result()
        return Result(error="input", message=str(error) or "it takes too much memory")
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
            except OSError as error:  # the system cannot start another process; running ones continue
                pid = -(error.errno or 1)
            if pid == 0:
                try:
                    control.close()
                    serve(socket.socket(fileno=fds[0]), tasks, memory)
                finally:
                    os._exit(0)  # a fork must never return into the fork server's own code
            os.close(fds[0])
            if pid > 0:
                children.add(pid)
            control.sendall(ANSWER.pack(pid))
        elif command == REAP and number in children:
            children.discard(number)
            control.sendall(ANSWER.pack(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])))


def serve(connection: socket.socket, tasks: TextTasks, memory: MemoryLimit) -> None:
    """Run jobs until the peer is gone."""
    with contextlib.suppress(OSError):
        while (job := frames.receive(connection)) is not None:
            frames.send_encoded(connection, _run_job(connection, job, tasks, memory))


def _run_job(connection: socket.socket, job: Job, tasks: TextTasks, memory: MemoryLimit) -> bytes:
    task, limits = job
    phase = 0

    def next_phase(size: int) -> None:
        nonlocal phase
        phase += 1
        frames.send(connection, NextPhase(size))
        memory.set(limits[phase].memory)

    tasks.next_phase = next_phase
    memory.set(limits[0].memory)
    try:
        return frames.encode(Result(task(tasks)))
    except MemoryError:
        failure = Result(error="memory", phase=phase)
    except (RequestError, ChatTemplateError) as error:
        failure = Result(error="input", message=error.message, phase=phase)
    finally:
        memory.set(None)
    return frames.encode(failure)


if __name__ == "__main__":
    sys.exit(main())
