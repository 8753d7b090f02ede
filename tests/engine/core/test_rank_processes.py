"""Rank processes, as the first rank starts them."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from pathlib import Path

import pytest
from helpers.configs import engine_config
from helpers.eventually import eventually

from windlass.engine import process_setup
from windlass.engine.core.ranks import RankProcesses


@pytest.mark.parametrize("closed", [False, True])
def test_where_the_host_has_no_standard_error_a_rank_prints_nowhere(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """Number 2 may be any of the engine's files by then, or none."""

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


def test_whoever_watches_late_is_told_of_a_rank_that_is_gone() -> None:
    """A rank may end between the last answer to its load and the first step."""
    with contextlib.closing(RankProcesses(engine_config("nowhere", tensor_parallel=2))) as others:
        others._ranks[0].process.kill()
        eventually(lambda: others._fault is not None, 30)
        told: list[str] = []
        others.watch(told.append)
        assert told == ["rank 1 ended: killed by SIGKILL"]
