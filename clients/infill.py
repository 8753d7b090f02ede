"""The methods of the synchronous client for gaps in texts. No rule lives here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Unpack, overload

from windlass.clients import _calls as calls
from windlass.clients._calls import Call, StreamCall
from windlass.clients.infill_types import Infill
from windlass.clients.options import InfillOptions, Timeout
from windlass.clients.streams import Stream

T = TypeVar("T")
A = TypeVar("A")


class InfillMethods:
    """What `Client` has for gaps."""

    @overload
    def infill(
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
    def infill(
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
    ) -> Stream[Infill, Infill]: ...

    def infill(
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
    ) -> Infill | Stream[Infill, Infill]:
        """What stands between two texts, of a model that was taught to fill gaps. Its context cuts what is too long.

        options: body fields by their API names, which are llama.cpp's: `n_predict`, `input_extra`, `n_indent` and others. See
        `completions` for the other arguments; its `suffix` fills gaps too, cuts nothing and gives several answers.
        """
        fixed = {"input_prefix": input_prefix, "input_suffix": input_suffix, "model": model, "timeout": deadline}
        body = calls.build_body(fixed, options, extra_body)
        if stream:
            return self._open(calls.infill_stream(body, timeout))
        return self._run(calls.infill(body, timeout))

    def _run(self, call: Call[T]) -> T:
        raise NotImplementedError

    def _open(self, call: StreamCall[T, A]) -> Stream[T, A]:
        raise NotImplementedError
