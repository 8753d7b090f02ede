"""The HTTP side of a deployment: the app that `windlass serve` has, in front of a handle instead of an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from windlass._version import __version__
from windlass.server.http.loop_watch import LoopWatch
from windlass.server.startup.launch import make_app, prepare, read_template
from windlass.server.startup.ray.call import Start
from windlass.server.startup.ray.client import RayClient


@serve.ingress()
class Ingress:
    """start: see there. engines: the replicas. Ray Serve's proxies pass it what they are asked over HTTP."""

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

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def version(self) -> str:
        """That of Windlass here."""
        return __version__
