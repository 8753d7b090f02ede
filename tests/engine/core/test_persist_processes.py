"""Engine processes with a disk tier: killed at any moment, several at once, and on a full disk."""

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from engine_helpers.persisting import files_in
from helpers import keeping_engine
from helpers.device import ON_A_CPU
from helpers.keeping_engine import PROMPTS

from windlass.engine.cache.disk_tier import read_metadata

_SCRIPT = Path(keeping_engine.__file__)


def start(folder: Path | str, first: int = 0, *more: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(_SCRIPT), str(folder), str(first), *map(str, more)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def finish(engine: subprocess.Popen[str]) -> tuple[dict[int, list[int]], int, dict[str, Any], str]:
    """Answers by prompt, number of cached tokens, counters and log of an engine that runs to its end."""
    out, log = engine.communicate(timeout=300)
    assert engine.returncode == 0, log
    ready, *lines, counts = out.splitlines()
    assert ready == "ready"
    answers = [json.loads(line) for line in lines]
    return {n: drawn for n, drawn, _ in answers}, sum(cached for *_, cached in answers), json.loads(counts), log


@pytest.fixture(scope="module")
def right() -> dict[int, list[int]]:
    """Answers of an engine without a disk tier."""
    answers, _, _, _ = finish(start(""))
    assert len(answers) == PROMPTS
    return answers


def kill(engine: subprocess.Popen[str], seconds: float, right: dict[int, list[int]]) -> int:
    """Kill an engine after some seconds, check its answers, and return their number of cached tokens."""
    with engine:
        assert engine.stdout is not None and engine.stderr is not None
        try:
            assert engine.stdout.readline() == "ready\n", engine.stderr.read()  # no start fails
            timer = threading.Timer(seconds, engine.kill)
            timer.start()
            lines = [line for line in engine.stdout if line.startswith("[") and line.endswith("]\n")]
            timer.join()
        finally:
            engine.kill()
    answers = [json.loads(line) for line in lines]
    assert all(drawn == right[number] for number, drawn, _ in answers)
    return sum(cached for *_, cached in answers)


@ON_A_CPU
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "rounds", [pytest.param(12, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.soak)]
)
def test_killed_engines_leave_usable_files(rounds: int, right: dict[int, list[int]], tmp_path: Path) -> None:
    """Two engines at a time on one folder, each killed at a random moment."""
    rng, restored = random.Random(9), 0
    for _ in range(rounds):
        engines = [start(tmp_path, rng.randrange(PROMPTS)) for _ in range(2)]
        restored += sum(kill(engine, 0.4 * rng.random(), right) for engine in engines)
    answers, cached, counts, log = finish(start(tmp_path))
    assert answers == right and cached > PROMPTS * 16 and restored > 0
    assert counts == {"failures": 0, "damaged": 0, "foreign": 0} and log == ""
    for file in files_in(tmp_path):
        (record, _), _ = read_metadata(file.read_bytes())
        assert file.name.startswith(json.loads(record)["digest"])


@ON_A_CPU
@pytest.mark.slow
def test_two_engines_write_one_folder(right: dict[int, list[int]], tmp_path: Path) -> None:
    for _ in range(2):
        engines = [start(tmp_path, first) for first in (0, PROMPTS // 2)]
        for engine in engines:
            answers, _, counts, log = finish(engine)
            assert answers == right and log == ""
            assert counts == {"failures": 0, "damaged": 0, "foreign": 0}


@ON_A_CPU
@pytest.mark.slow
def test_a_disk_that_refuses_writes(right: dict[int, list[int]], tmp_path: Path) -> None:
    answers, cached, counts, log = finish(start(tmp_path, 0, 20_000))  # of about 66 KB a file
    assert answers == right and 0 < cached < PROMPTS * keeping_engine.LENGTH
    assert counts["failures"] >= 1
    assert log.count("File too large") == 1 and "cached blocks cannot be written" in log
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
