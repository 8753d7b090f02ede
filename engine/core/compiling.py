"""Requests whose grammar is being compiled: they wait here, beside the steps, until it is.

Responsible for their order and their end; it admits nothing and knows nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait

from windlass.engine.api.request import EngineRequest
from windlass.engine.errors import EngineError, QueueFullError, RequestError
from windlass.engine.sampling.grammar.compiler import CompiledGrammar, GrammarCompiler

_GRAMMAR_WAIT_SECONDS = 0.005  # seconds that an engine without other work waits at a time


class GrammarQueue:
    """most: requests that may wait at once."""

    def __init__(self, compiler: GrammarCompiler, max_waiting: int) -> None:
        self._compiler, self._max_waiting = compiler, max_waiting
        self._waiting: dict[str, tuple[EngineRequest, Future[CompiledGrammar]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[EngineRequest]:
        """Those that wait."""
        return [request for request, _ in self._waiting.values()]

    @property
    def num_tokens(self) -> int:
        """Of their prompts together."""
        return sum(len(request.prompt_token_ids) for request, _ in self._waiting.values())

    def add(self, request: EngineRequest, grammar: str) -> None:
        """Let a request wait until its grammar is compiled.

        Raises QueueFullError, and RequestError for an id that waits already.
        """
        if request.request_id in self._waiting:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id", "duplicate_request_id")
        if len(self._waiting) >= self._max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests wait for their grammars already: try again later")
        self._waiting[request.request_id] = (request, self._compiler.compile_in_background(grammar))

    def drop(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        if request_id in self._waiting:
            self._waiting.pop(request_id)[1].cancel()

    def finished(self, *, pause: bool) -> Iterator[tuple[EngineRequest, CompiledGrammar | EngineError]]:
        """Those that need not wait any more, in the order in which they came, with their grammar or what is wrong with it.

        pause: wait a moment for the first of them, since there is nothing else to do.
        """
        if pause and self._waiting:
            wait([next(iter(self._waiting.values()))[1]], _GRAMMAR_WAIT_SECONDS)
        for request_id, (request, compiled) in list(self._waiting.items()):
            if compiled.done():
                del self._waiting[request_id]
                yield request, _result_of(compiled)


def _result_of(compiled: Future[CompiledGrammar]) -> CompiledGrammar | EngineError:
    error = compiled.exception()
    if error is None:
        return compiled.result()
    if isinstance(error, EngineError):
        return error
    return EngineError(f"the grammar could not be compiled: {type(error).__name__}")
