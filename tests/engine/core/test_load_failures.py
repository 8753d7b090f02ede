"""Messages of the engine process about loads that fail."""

from __future__ import annotations

import logging
import sys
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from helpers.configs import engine_config

from windlass.engine.core.engine_process import serve
from windlass.engine.core.messages import Load, LoadFailed, Message


class PlayedParent:
    """Sends the configuration, and records messages."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.inbox.put(Load(engine_config("somewhere")))
        self.told: list[Message] = []

    def emit(self, message: Message) -> None:
        self.told.append(message)

    def flush(self, timeout: float) -> None:
        pass


def told_of(error: Exception) -> str:
    def factory(*_: object) -> Any:
        raise error

    parent = PlayedParent()
    assert serve(factory, parent) == 1
    (failed,) = parent.told
    assert isinstance(failed, LoadFailed)
    return failed.message


def of_torch() -> Exception:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize("error", [MemoryError(), of_torch(), torch.OutOfMemoryError("CUDA out of memory.")], ids=repr)
def test_no_memory_is_told_as_that(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert told_of(error).startswith("not enough memory to load somewhere (")
    assert not caplog.records


@pytest.mark.parametrize(
    "error", [AttributeError("'Backend' object has no attribute 'device_memory'"), RuntimeError("a memory format")]
)
def test_a_defect_whose_text_has_that_word_is_logged_as_one(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert told_of(error) == f"cannot load somewhere: {type(error).__name__}: {error}"
    (record,) = caplog.records
    assert record.exc_info is not None and record.exc_info[1] is error


def test_without_torch_none_is_imported_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import may be what failed."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setitem(sys.modules, "windlass.engine.model.loading.device_selection", None)
    assert told_of(MemoryError("of the start")).startswith("not enough memory")
    assert told_of(RuntimeError("no torch")) == "cannot load somewhere: RuntimeError: no torch"
