"""`ModelHost`: an app and its engine on an event loop of their own thread, from start to end.

Nothing listens. The engine is a process as under `windlass serve`, so that torch never comes into the program that asks;
it ends with the program at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from windlass.clients.terminal.loading_display import LoadingDisplay
from windlass.clients.terminal.streams import on_terminal
from windlass.engine.interface.model_info import ModelInfo
from windlass.server.generation.request_rotation import check_profiles
from windlass.server.options.engine import EngineOptions
from windlass.server.options.server import ServerOptions
from windlass.server.options.settings import ServerSettings
from windlass.server.options.spelling import check_log_level
from windlass.server.startup.engines import Engines, SupervisedEngine
from windlass.server.startup.in_process.loop import LoopThread
from windlass.server.startup.in_process.transport import AppTransport
from windlass.server.startup.launch import make_app, prepare, read_template
from windlass.server.startup.own_rule import check_own_rule

T = TypeVar("T")


class ModelHost:
    """Loads when it is made; raises LoadError or RequestError, one line. `close` it.

    info: the loaded model. transport: for clients on its event loop; other threads have `run`.
    """

    info: ModelInfo

    def __init__(self, model: str | None, engine: EngineOptions, server: ServerOptions, log_level: str) -> None:
        level = check_log_level(log_level)
        template = read_template(server)
        self._loop = LoopThread()
        with contextlib.ExitStack() as undo:
            undo.callback(self._loop.close)
            engines = undo.enter_context(contextlib.closing(Engines(engine, level)))
            path, engine, settings = prepare(model, engine, server)
            client = engines.client(engine, path)
            undo.callback(client.kill)
            client.spawn()  # it loads while the tokenizer is imported and read
            app = make_app(client, path, settings, template)
            state = undo.enter_context(contextlib.closing(app.state.windlass))
            self.transport = AppTransport(app)
            self._loop.start()
            undo.callback(_end, self._loop, client)
            state.text.spawn()
            self.info = self.run(_load(client, settings))
            state.text.wait_loaded()
            # The callbacks hold nothing of this object, so a program that forgets it ends the engine too.
            self._close = weakref.finalize(self, _close, undo.pop_all(), self._loop)

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, worked out on the event loop; see `LoopThread.run`."""
        return self._loop.run(work)

    def close(self) -> None:
        """End the engine and all that runs. Safe to call twice. In a fork it does nothing: the engine is another's."""
        self._close()


async def _load(client: SupervisedEngine, settings: ServerSettings) -> ModelInfo:
    display = LoadingDisplay()
    client.progress = display if on_terminal() else None
    client.start_nowait()
    try:
        info = await client.wait_ready()
    finally:
        display.stop()
    check_profiles(settings.rope_profiles, info.rotary_groups)
    check_own_rule(settings, info)
    return info


def _close(undo: contextlib.ExitStack, loop: LoopThread) -> None:
    if loop.forked:  # also at the end of a process that was forked: whoever made the model ends it
        return
    if loop.is_current:  # garbage is collected on any thread, and this one cannot wait for itself
        threading.Thread(target=undo.close, name="windlass-end").start()
    else:
        undo.close()


def _end(loop: LoopThread, client: SupervisedEngine) -> None:
    """End the engine, then what still runs on the loop, then the loop."""
    loop.end(_wind_up(client))


async def _wind_up(client: SupervisedEngine) -> None:
    await client.close()  # requests in flight get their error
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait(others, timeout=1.0) if others else None
