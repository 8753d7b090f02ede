"""The HTTP side of a deployment: the app that `windlass serve` has, in front of a handle instead of an engine.

It accepts connections itself where the deployment has a door (see `door`), with the HTTP server of `windlass serve`; else Ray
Serve's proxies pass it what they are asked.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from windlass._version import __version__
from windlass.server.http.descriptors import raise_limit
from windlass.server.http.loop_watch import LoopWatch
from windlass.server.http.server import HttpServer
from windlass.server.options.connections import ConnectionOptions
from windlass.server.startup.launch import make_app, make_server, prepare, read_template
from windlass.server.startup.ray.call import Start
from windlass.server.startup.ray.client import RayClient
from windlass.server.startup.ray.door import listener_of

REUSE_SECONDS = 1.0  # after an answer, to ask once more by its connection and be told that it ends


@serve.ingress()
class Ingress:
    """start: see there. engines: the replicas."""

    async def __init__(self, start: Start, engines: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        start.check()
        template = read_template(start.server)
        path, engine, settings = await asyncio.to_thread(prepare, start.model, start.engine, start.server)
        self._client = RayClient(engines, engine.to_config(Path(path)))
        self._app = make_app(self._client, path, settings, template)
        state = self._app.state.windlass
        await asyncio.to_thread(state.text.spawn)
        await asyncio.to_thread(state.text.wait_loaded)
        await self._client.start()
        self._watch = LoopWatch(state.beat).start()
        self._http: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._grace = settings.grace_seconds
        if start.door is not None:
            bounds = ConnectionOptions().to_settings().within(raise_limit())
            listener = await listener_of(start.door)
            self._http = make_server(
                self._app, listener, bounds, max_header_bytes=settings.max_header_bytes, access_log=False, tls=None
            )
            self._serving = asyncio.get_running_loop().create_task(self._http.serve(), name="http")

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Serve passes requests to, and shuts down before this object: nothing where the app has a server of its own."""
        return self._app if self._http is None else FastAPI()

    async def check_health(self) -> None:
        """Raise where nobody accepts connections any more: Serve starts another ingress."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the HTTP server ended")

    async def __del__(self) -> None:
        """What Serve awaits before it ends this process: answers that have begun may end."""
        if self._http is None or self._serving is None:
            return
        self._http.retire()
        busy = time.monotonic()
        ends = busy + self._grace
        while (now := time.monotonic()) < min(ends, busy + REUSE_SECONDS):
            if self._app.state.windlass.in_flight:
                busy = now
            await asyncio.sleep(0.05)
        await self._http.stop(max(0.0, ends - time.monotonic()))
        await asyncio.wait({self._serving}, timeout=2.0)

    async def version(self) -> str:
        """That of Windlass here."""
        return __version__
