"""Preparations for the first grammar run in the first idle time, once, and never while there is work."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
from helpers.engines import greedy
from helpers.scripted_core import ScriptedCore
from llguidance import LLMatcher, LLTokenizer

import windlass
from windlass.engine.core import engine_process
from windlass.engine.core.messages import Add, Close, Message, StepDone
from windlass.engine.interface.config import EngineConfig
from windlass.engine.sampling.grammar import GrammarCompiler

DEMO = Path(windlass.__file__).parent / "models" / "demo"


class Core(ScriptedCore):
    """Notes how many steps had been taken when the idle moment came."""

    def __init__(self, inbox: SimpleQueue[Message]) -> None:
        super().__init__(EngineConfig(model="scripted"))
        self.inbox, self.noted = inbox, list[tuple[bool, int]]()

    def prepare_in_idle_time(self) -> None:
        super().prepare_in_idle_time()
        self.noted.append((self.has_work(), self._steps))
        self.inbox.put(Add(greedy("second", [50], max_tokens=2)))


def test_it_comes_once_and_never_beside_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "IDLE_SECONDS", 0.05)
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "0.03")  # the first request takes longer than an idle moment
    inbox: SimpleQueue[Message] = SimpleQueue()
    core, done = Core(inbox), list[str]()

    def emit(message: object) -> None:
        if isinstance(message, StepDone):
            done.extend(output.request_id for output in message.outputs if output.finish_reason)
            if "second" in done:
                threading.Timer(0.2, inbox.put, [Close()]).start()  # two more moments without work

    inbox.put(Add(greedy("first", [50], max_tokens=5)))
    engine_process.EngineLoop(core, inbox, emit).run()
    assert done[:2] == ["first", "second"]
    assert core.noted == [(False, core.noted[0][1])] and core.noted[0][1] >= 5


def test_the_vocabulary_is_there_when_the_first_grammar_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()

    def vocabulary(path: str, **fields: object) -> LLTokenizer:
        made.append(threading.current_thread().name)
        return LLTokenizer(path, **fields)

    monkeypatch.setattr("llguidance.LLTokenizer", vocabulary)
    compiler = GrammarCompiler(DEMO, 4096, [2])
    compiler.prepare_in_background()
    compiler.compile_in_background(LLMatcher.grammar_from_regex("[0-9]+")).result(30)
    assert len(made) == 1 and made[0].startswith("engine-grammar")


def test_without_a_tokenizer_or_an_end_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    monkeypatch.setattr("llguidance.LLTokenizer", lambda path, **fields: made.append(path))
    for directory, ends in (
        (tmp_path, [2]),
        (DEMO, []),
    ):  # a model without an eos token is reported when a grammar comes
        compiler = GrammarCompiler(directory, 4096, ends)
        compiler.prepare_in_background()
        compiler._pool.submit(int).result(30)  # it has one thread: what came before is done
    assert made == []
