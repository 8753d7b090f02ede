"""The process that text processes are forked from: `python -m windlass.server.text.workers.fork_server --fd N`.

It loads the tokenizer and compiles the chat template once; a fork of it is ready within milliseconds and shares that
memory, so a text process that took too long or too much is simply killed and another takes its place. It has one thread
and never tokenizes itself: nothing is half done when it forks. A closed control socket ends it and all it forked.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence

import tokenizers
from pydantic_core import to_json

from windlass.engine.process_setup import log_as_json, wants_json
from windlass.server.text.chat_template import ChatTemplate, ChatTemplateError
from windlass.server.text.pair_prompt import may_take_pairs
from windlass.server.text.pair_template import cut_pairs
from windlass.server.text.tokenizer import Tokenizer
from windlass.server.text.workers import frames
from windlass.server.text.workers.fork_commands import ANSWER, COMMAND, FORK, REAP
from windlass.server.text.workers.frames import Done, Refused, TextSource
from windlass.server.text.workers.tasks import TextTasks
from windlass.server.text.workers.worker import MemoryLimit, serve

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
        _obey(control, tasks, memory, children)
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
    pairs = _cut_for_pairs(source, templates[0], memory)
    frames.send(control, pairs)
    if isinstance(pairs, Refused):
        return None
    tasks.prepare_grammars()  # a start does not wait for it
    return tasks


def _cut_for_pairs(source: TextSource, chat: ChatTemplate | None, memory: MemoryLimit) -> Done | Refused:
    """The `PairTemplate`; Done without one where no template takes pairs and none has to."""
    text = source.pair_template
    if text is None and not source.needs_pairs and (chat is None or not may_take_pairs(chat.source)):
        return Done()
    memory.set(COMPILE_MEMORY)
    try:
        if text is None and chat is None:
            raise ChatTemplateError("this model has no chat template")
        template = chat if text is None else ChatTemplate(text, source.special_tokens)
        assert template is not None
        return Done(cut_pairs(template))
    except (ChatTemplateError, MemoryError) as error:
        if not source.needs_pairs:
            return Done()
        return Refused(str(error) or "it takes too much memory")
    finally:
        memory.set(None)


def _obey(control: socket.socket, tasks: TextTasks, memory: MemoryLimit, children: set[int]) -> None:
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
