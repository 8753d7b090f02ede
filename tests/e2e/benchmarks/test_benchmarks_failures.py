"""What a benchmark keeps where one of its programs dies, hangs or cannot be started."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


FAR_END = """
import json, os, sys, time
print(json.dumps({"ready": True, "info": {"version": "7"}}), flush=True)
for line in sys.stdin:
    kind = json.loads(line)["kind"]
    if kind == "die":
        os._exit(9)
    if kind == "hang":
        time.sleep(30)
    print(json.dumps({"values": [{"hang": 32768.0}.get(kind, 4096.0)]}), flush=True)
"""


def test_a_worker_that_has_died_is_closed_without_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = module("harness.worker", monkeypatch)
    near = worker.Worker([sys.executable, "-c", FAR_END], log=tmp_path / "log")
    for kind in ("die", "decode"):
        with pytest.raises(worker.WorkerError, match="ended"):
            near.measure({"kind": kind})
        near.process.wait()
    near.close()


def test_what_a_worker_answers_too_late_is_no_answer_to_the_next_question(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = module("harness.worker", monkeypatch)
    near = worker.Worker([sys.executable, "-c", FAR_END], log=tmp_path / "log")
    try:
        assert near.measure({"kind": "decode"}) == [4096.0]
        with pytest.raises(worker.WorkerError, match="no answer within 0 s"):
            near.measure({"kind": "hang"}, timeout=0.0)
        with pytest.raises(worker.WorkerError, match="ended"):
            near.measure({"kind": "decode"})
    finally:
        near.close()


def test_a_program_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = module("harness.worker", monkeypatch)
    with pytest.raises(worker.WorkerError, match="cannot be started"):
        worker.Worker([str(tmp_path / "python")], log=tmp_path / "log")


class Steady:
    """A machine that reads 40 GB/s, whatever it is asked."""

    def samples(self) -> dict[str, list[float]]:
        return {name: [40.0] for name in ("read_gb_s", "copy_gb_s", "fp32_gflop_s")}

    def beside(self, name: str, work: Any) -> tuple[Any, tuple[float, float]]:
        return work(lambda: None), (40.0, 40.0)


class Contestant:
    """It dies at its `most`-th measure."""

    program, weights, kv_dtype, slow = "Windlass", "int8", "auto", False

    def __init__(self, name: str, most: int, error: type[Exception]) -> None:
        self.name, self._left, self._error = name, most, error

    def start(self) -> None:
        pass

    close = start

    def version(self) -> str:
        return "7"

    def weight_bytes(self) -> float:
        return 1e9

    def info(self) -> dict[str, Any]:
        return {"weight_bytes": 1e9, "kv_bytes_per_token": 1e4, "kv_cache_dtype": "float16"}

    def cache(self) -> tuple[str, float]:
        return "float16", 1e4

    def measure(self, measure: Any, repeats: int, prepared: Any) -> list[float]:
        self._left -= 1
        if self._left < 0:
            raise self._error("the process has ended")
        prepared()
        return [20.0]


def test_a_run_is_kept_measure_by_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peers = module("peers", monkeypatch)
    dies = Contestant("Windlass int4", 1, peers.WorkerError)
    whole = Contestant("Windlass int8", 4, KeyboardInterrupt)  # as where somebody ends the run in its third measure
    monkeypatch.setattr(peers, "contestants_for", lambda *given: [dies, whole])
    monkeypatch.setattr(peers, "prepare_windlass", lambda *given: None)
    monkeypatch.setattr(peers, "Rates", lambda threads: Steady())
    earlier = {"schema": 1, "model": "1b", "runs": []}
    (tmp_path / "peers.json").write_text(json.dumps(earlier))
    words = ["--only", "decode", "--streams", "1", "2", "3", "--rounds", "2", "--max-foreign", "1"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *words, "--work", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        peers.main()
    (run,) = json.loads((tmp_path / "peers.json").read_text())["runs"]
    found = [(one["measure"], one["contestant"], len(one["samples"])) for one in run["results"]]
    assert found == [
        ("decode, 1 stream", "Windlass int4", 1),
        ("decode, 1 stream", "Windlass int8", 2),
        ("decode, 2 streams", "Windlass int8", 2),
    ]
    assert [one["contestant"] for one in run["left_out"]] == ["Windlass int4"] * 2
