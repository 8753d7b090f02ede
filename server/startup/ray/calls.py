"""Calls of replicas: a request goes to one through Ray, its outputs come by a lane, or by Ray where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from itertools import count
from typing import Any

import ray.util
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from windlass.engine.errors import EngineError
from windlass.engine.interface.outputs import RequestOutput
from windlass.server.startup.ray.call import Address, Ended, Finished, Item, Lost, ReplicaCall
from windlass.server.startup.ray.lane import LaneEnd

_logger = logging.getLogger("windlass.server")

LOST = (RayError, RayServeException)


class CallLost(Exception):
    """The replica, or the way to it, is gone. replica: which, if that is known."""

    def __init__(self, replica: str) -> None:
        super().__init__(replica)
        self.replica = replica


class CallEnded(Exception):
    """The replica ended it with an error."""

    def __init__(self, replica: str, error: EngineError) -> None:
        super().__init__(str(error))
        self.replica, self.error = replica, error


class Calls:
    """Those of one ingress, in its event loop."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._generate = handle.options(method_name="generate", stream=True)
        self._end = LaneEnd()
        self._numbers = count(1)
        self._following: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Begin to take outputs by lanes. Where that cannot be they come by Ray."""
        try:
            await self._end.listen(ray.util.get_node_ip_address())
        except OSError as error:
            _logger.warning("no lanes from replicas, tokens come by Ray: %s", error)

    @property
    def address(self) -> Address | None:
        """Where lanes lead to."""
        return self._end.address

    async def close(self) -> None:
        await self._end.stop()

    @contextlib.asynccontextmanager
    async def begun(self, call: ReplicaCall) -> AsyncIterator[AsyncIterator[list[RequestOutput]]]:
        """The outputs of a call, which is cancelled with it. They raise CallLost and CallEnded."""
        number = next(self._numbers)
        news: asyncio.Queue[Item | Finished | Lost] = asyncio.Queue()
        self._end.open(number, news.put_nowait)
        stream = self._generate.remote(replace(call, lane=self._end.address, number=number))
        following = asyncio.ensure_future(_follow(stream, news))
        self._following.add(following)
        following.add_done_callback(self._following.discard)
        whole = asyncio.Event()
        try:
            async with contextlib.aclosing(_outputs(news, whole)) as outputs:
                yield outputs
        finally:
            self._end.close(number)
            if not whole.is_set():
                stream.cancel()
                following.cancel()


async def _outputs(
    news: asyncio.Queue[Item | Finished | Lost], whole: asyncio.Event
) -> AsyncGenerator[list[RequestOutput], None]:
    while True:
        match await news.get():
            case list(outputs):
                yield outputs
            case Ended(replica, error):
                whole.set()
                raise CallEnded(replica, error)
            case Finished():
                whole.set()
                return
            case Lost(replica):
                raise CallLost(replica)


async def _follow(stream: Any, news: asyncio.Queue[Item | Finished | Lost]) -> None:
    """What Ray says of a call: outputs that came its way, and that the replica died."""
    try:
        async for item in stream:
            if isinstance(item, Finished):
                return  # the lane says the rest
            news.put_nowait(item)
        news.put_nowait(Finished())
    except LOST:
        news.put_nowait(Lost())
    except Exception:  # whatever it is, the request waits for an end
        _logger.exception("a call of a replica failed")
        news.put_nowait(Lost())
