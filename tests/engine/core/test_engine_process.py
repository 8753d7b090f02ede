"""Engine process: idle time, failed loads, rank processes and the expected duration of a step."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import types
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from helpers.configs import engine_config
from helpers.engines import greedy, make_core
from helpers.eventually import eventually
from helpers.scripted_core import ScriptedCore
from llguidance import LLMatcher, LLTokenizer

import windlass
from windlass.engine import process_setup
from windlass.engine.core import engine_core, engine_process
from windlass.engine.core.engine_core import StepTimeEstimator
from windlass.engine.core.engine_process import serve
from windlass.engine.core.messages import Add, Close, Load, LoadFailed, Message, StepDone
from windlass.engine.core.ranks import RankProcesses
from windlass.engine.interface.config import EngineConfig
from windlass.engine.sampling.grammar import GrammarCompiler

DEMO = Path(windlass.__file__).parent / "models" / "demo"


class Core(ScriptedCore):
    """Records whether there was work, and the number of steps, at each idle time."""

    def __init__(self, inbox: SimpleQueue[Message]) -> None:
        super().__init__(EngineConfig(model="scripted"))
        self.inbox, self.idle_times = inbox, list[tuple[bool, int]]()

    def prepare_in_idle_time(self) -> None:
        super().prepare_in_idle_time()
        self.idle_times.append((self.has_work(), self._steps))
        self.inbox.put(Add(greedy("second", [50], max_tokens=2)))


def test_idle_preparation_runs_once_and_only_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "IDLE_SECONDS", 0.05)
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "0.03")  # the first request takes longer than an idle time
    inbox: SimpleQueue[Message] = SimpleQueue()
    core, done = Core(inbox), list[str]()

    def emit(message: object) -> None:
        if isinstance(message, StepDone):
            done.extend(output.request_id for output in message.outputs if output.finish_reason)
            if "second" in done:
                threading.Timer(0.2, inbox.put, [Close()]).start()  # two more idle times

    inbox.put(Add(greedy("first", [50], max_tokens=5)))
    engine_process.EngineLoop(core, inbox, emit).run()
    assert done[:2] == ["first", "second"]
    assert core.idle_times == [(False, core.idle_times[0][1])] and core.idle_times[0][1] >= 5


def test_the_vocabulary_is_prepared_before_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()

    def vocabulary(path: str, **fields: object) -> LLTokenizer:
        made.append(threading.current_thread().name)
        return LLTokenizer(path, **fields)

    monkeypatch.setattr("llguidance.LLTokenizer", vocabulary)
    compiler = GrammarCompiler(DEMO, 4096, [2])
    compiler.prepare_in_background()
    compiler.compile_in_background(LLMatcher.grammar_from_regex("[0-9]+")).result(30)
    assert len(made) == 1 and made[0].startswith("engine-grammar")


def test_no_vocabulary_is_prepared_without_tokenizer_or_eos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    monkeypatch.setattr("llguidance.LLTokenizer", lambda path, **fields: made.append(path))
    for directory, ends in (
        (tmp_path, [2]),
        (DEMO, []),
    ):  # a model without an eos token is reported at the first grammar
        compiler = GrammarCompiler(directory, 4096, ends)
        compiler.prepare_in_background()
        compiler._pool.shutdown()  # waits for earlier jobs
    assert made == []


class RecordingParent:
    """Parent that sends the configuration and records messages."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.inbox.put(Load(engine_config("somewhere")))
        self.received: list[Message] = []

    def emit(self, message: Message) -> None:
        self.received.append(message)

    def flush(self, timeout: float) -> None:
        pass


def failure_of(error: Exception) -> str:
    def factory(*_: object) -> Any:
        raise error

    parent = RecordingParent()
    assert serve(factory, parent) == 1
    (failed,) = parent.received
    assert isinstance(failed, LoadFailed)
    return failed.message


def allocation_error() -> Exception:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize(
    "error", [MemoryError(), allocation_error(), torch.OutOfMemoryError("CUDA out of memory.")], ids=repr
)
def test_a_load_without_memory_is_reported_as_such(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert failure_of(error).startswith("not enough memory to load somewhere (")
    assert not caplog.records


@pytest.mark.parametrize(
    "error", [AttributeError("'Backend' object has no attribute 'device_memory'"), RuntimeError("a memory format")]
)
def test_a_defect_that_mentions_memory_is_logged_as_a_defect(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert failure_of(error) == f"cannot load somewhere: {type(error).__name__}: {error}"
    (record,) = caplog.records
    assert record.exc_info is not None and record.exc_info[1] is error


def test_a_load_failure_is_reported_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of torch may have failed."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setitem(sys.modules, "windlass.engine.model.loading.device_selection", None)
    assert failure_of(MemoryError("of the start")).startswith("not enough memory")
    assert failure_of(RuntimeError("no torch")) == "cannot load somewhere: RuntimeError: no torch"


@pytest.mark.parametrize("closed", [False, True])
def test_ranks_print_nowhere_if_the_host_has_no_standard_error(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    """File descriptor 2 may then be any file of the engine, or closed."""

    def no_such_file(number: int) -> None:
        raise OSError

    if closed:
        monkeypatch.setattr(process_setup, "os", types.SimpleNamespace(**{**vars(os), "fstat": no_such_file}))
    else:
        monkeypatch.setattr(sys, "stderr", None)
    with contextlib.closing(RankProcesses(engine_config("nowhere", tensor_parallel=2))) as others:
        (rank,) = others._ranks
        outputs = [str(Path(f"/proc/{rank.process.pid}/fd/{number}").readlink()) for number in (1, 2)]
    assert outputs == [os.devnull] * 2


def test_a_late_watcher_is_notified_of_an_ended_rank() -> None:
    """A rank may end between the last answer to its load and the first step."""
    with contextlib.closing(RankProcesses(engine_config("nowhere", tensor_parallel=2))) as others:
        others._ranks[0].process.kill()
        eventually(lambda: others._fault is not None, 30)
        faults: list[str] = []
        others.watch(faults.append)
        assert faults == ["rank 1 ended: killed by SIGKILL"]


DEMO = Path(windlass.__file__).parent / "models" / "demo"


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ([], {1: None}),
        ([(64, 1.0)], {1: None, 63: None, 64: 1.0, 127: 1.0}),  # no estimate below the smallest observed size
        ([(8, 0.5), (8, 2.0), (8, 1.0)], {15: 2.0}),  # the slowest step of a size
        ([(1, 0.25), (16, 1.0)], {128: 8.0, 4: 1.0}),  # doubled for each size between
        ([(1, 0.25), (16, 1.0), (1, 30.0)], {16: 30.0, 0: None}),  # one token after a very long context
    ],
)
def test_step_time_estimates(observed: list[tuple[int, float]], expected: dict[int, float | None]) -> None:
    estimator = StepTimeEstimator()
    for size, seconds in observed:
        estimator.observe(size, seconds)
    assert {size: estimator.seconds(size) for size in expected} == expected


def test_an_engine_announces_unknown_and_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(DEMO)
    announced: list[float | None] = []
    core.add(greedy("a", [5, 6, 7], max_tokens=3))
    while core.has_work():
        core.step(announced.append)
    assert announced == [None, None]  # a prompt of three tokens, and then the first step of one
    monkeypatch.setattr(engine_core, "ANNOUNCE_SECONDS", 0.0)
    core.add(greedy("b", [5, 6, 7, 8], max_tokens=1))
    core.step(announced.append)
    assert len(announced) == 3 and announced[-1] is not None and 0.0 < announced[-1] < 60.0
