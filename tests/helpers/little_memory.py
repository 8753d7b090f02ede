"""Simulated device with little memory: steps with too many rows raise the error of torch on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.core.messages import ProgressCallback

NO_ROOM = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 2.69 MiB is free."
POINTS = ("attention", "head", "draw")
ROWS = 20  # for which there is memory in the process of `core`


def core(config: Any, progress: ProgressCallback) -> Any:
    """Core of an engine that always has little memory."""
    made: Any = EngineCore(config, progress)
    made.little_memory = little_memory(made, ROWS)
    made.little_memory.__enter__()
    return made


@contextlib.contextmanager
def little_memory(
    core: EngineCore, rows: int, point: str = "attention", error: Exception | None = None
) -> Iterator[list[int]]:
    """Make steps of more than `rows` rows fail in the third layer's attention, in the head or in sampling.

    Yields the rows of failed steps. Step recording is disabled. error: raised instead of the memory error.
    """
    backend, runner = core.runner.decoder.backend, core.runner
    failed: list[int] = []
    state = {"rows": 0, "layers": 0}
    originals = {"embed": backend.embed, "paged_attention": backend.paged_attention, "logits": backend.logits}
    sample, max_rows = runner.sampler.sample, runner.replay.max_rows

    def check(now: bool) -> None:
        if now and state["rows"] > rows:
            failed.append(state["rows"])
            raise error or torch.OutOfMemoryError(NO_ROOM)

    def embed(table: Any, ids: Any, *more: Any) -> Any:
        state.update(rows=len(ids), layers=0)
        return originals["embed"](table, ids, *more)

    def attention(*operands: Any) -> Any:
        state["layers"] += 1
        found = originals["paged_attention"](*operands)
        check(point == "attention" and state["layers"] == 3)
        return found

    def logits(*operands: Any) -> Any:
        check(point == "head")
        return originals["logits"](*operands)

    def drawn(*operands: Any) -> Any:
        found = sample(*operands)
        check(point == "draw")
        return found

    patched: Any = backend
    patched.embed, patched.paged_attention, patched.logits = embed, attention, logits
    runner.sampler.sample, runner.replay.max_rows = drawn, 0  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        for name in originals:
            delattr(patched, name)
        runner.sampler.sample, runner.replay.max_rows = sample, max_rows  # type: ignore[method-assign]


def fail_ahead(core: EngineCore, monkeypatch: pytest.MonkeyPatch, *, every: int, calls: int | None = None) -> list[int]:
    """Make every n-th asynchronous step run out of memory after a number of device calls, by default 0 to 4 in turn.
    Returns these numbers."""
    assert core.runner.graphs is not None
    device = core.runner.graphs._graphs
    begin, ask = core.runner.graphs.submit, device.submit
    begun, failed = list[int](), list[int]()

    def fails(*given: Any, ahead: bool) -> Any:
        if not ahead:
            return begin(*given)
        begun.append(1)
        turn, rest = divmod(len(begun), every)
        asked: list[int] = []

        def counted(work: Callable[[], None]) -> None:
            if len(asked) == (turn % 5 if calls is None else calls):
                failed.append(len(asked))
                raise torch.OutOfMemoryError(NO_ROOM)
            asked.append(1)
            ask(work)

        with monkeypatch.context() as patched:
            if rest == 0:
                patched.setattr(device, "submit", counted)
            return begin(*given, ahead=True)

    monkeypatch.setattr(core.runner.graphs, "submit", fails)
    return failed
