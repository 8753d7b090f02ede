"""The methods of the asynchronous client for gaps in texts. No rule lives here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Unpack, overload

from windlass.clients import _calls as calls
from windlass.clients._calls import Call, StreamCall
from windlass.clients.infill_types import Infill
from windlass.clients.options import InfillOptions, Timeout
from windlass.clients.streams import AsyncStream

T = TypeVar("T")
A = TypeVar("A")


class AsyncInfillMethods:
    """What `AsyncClient` has for gaps."""

    @overload
    async def infill(
        self,
        input_prefix: str,
        input_suffix: str,
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[InfillOptions],
    ) -> Infill: ...

    @overload
    async def infill(
        self,
        input_prefix: str,
        input_suffix: str,
        *,
        model: str | None = None,
        stream: Literal[True],
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[InfillOptions],
    ) -> AsyncStream[Infill, Infill]: ...

    async def infill(
        self,
        input_prefix: str,
        input_suffix: str,
        *,
        model: str | None = None,
        stream: bool = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[InfillOptions],
    ) -> Infill | AsyncStream[Infill, Infill]:
        """See `Client.infill`. A stream begins with `async with await client.infill(…, stream=True)`."""
        fixed = {"input_prefix": input_prefix, "input_suffix": input_suffix, "model": model, "timeout": deadline}
        body = calls.build_body(fixed, options, extra_body)
        if stream:
            return await self._open(calls.infill_stream(body, timeout))
        return await self._run(calls.infill(body, timeout))

    async def _run(self, call: Call[T]) -> T:
        raise NotImplementedError

    async def _open(self, call: StreamCall[T, A]) -> AsyncStream[T, A]:
        raise NotImplementedError
