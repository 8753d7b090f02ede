"""Real servers with two ranks: answers equal those of one, and a dead rank ends the engine without remaining processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.eventually import alive, children, eventually
from helpers.real_server import RealServer, serve
from helpers.refused import inside, program, reason

pytestmark = pytest.mark.slow
SMALL = ("--kv-cache-memory", "32MiB", "--max-model-len", "512")
SCALING = {"rope_type": "yarn", "factor": 2.0}


def complete(server: RealServer, prompt: Any, **fields: object) -> Any:
    answer = server.complete(prompt, **{"max_tokens": 12, **fields})
    return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


def rank_pids(server: RealServer) -> list[int]:
    return children(server.engine_pid(), b"core.rank_process")


def is_gone(pid: int) -> Callable[[], bool]:
    return lambda: not alive(pid)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RealServer]:
    with serve("--tensor-parallel", "2", *SMALL) as server:
        yield server


def test_answers_of_two_ranks_equal_those_of_one(two_ranks: RealServer) -> None:
    asked: list[tuple[Any, dict[str, object]]] = [
        ("Once upon a time", {}),
        ("Once upon a time there was", {"rope_scaling": SCALING}),
        ("The king said", {"temperature": 0.9, "seed": 3, "n": 2}),
        (list(range(10, 300)), {"max_tokens": 20}),
        (list(range(10, 300)), {"max_tokens": 20}),  # its prefix is cached
    ]
    with serve(*SMALL) as server:
        expected = [complete(server, prompt, **fields) for prompt, fields in asked]
    assert len(rank_pids(two_ranks)) == 1
    assert [complete(two_ranks, prompt, **fields) for prompt, fields in asked] == expected
    assert "ranks     2" in two_ranks.log.read_text()


@pytest.mark.parametrize("kernels", ["best", "off"])
def test_dead_rank_restarts_the_engine(
    kernels: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shared memory, and with torch.distributed where there are no compiled kernels."""
    with contextlib.ExitStack() as stack:
        if kernels == "off":
            monkeypatch.setenv("WINDLASS_CPU_ISA", "off")
            server = stack.enter_context(serve("--tensor-parallel", "2", *SMALL))
        else:
            server = request.getfixturevalue("two_ranks")
        before = complete(server, "Once upon a time")
        engine, (rank,) = server.engine_pid(), rank_pids(server)
        os.kill(rank, signal.SIGKILL)  # detected although no request runs
        eventually(is_gone(engine), seconds=30)
        eventually(lambda: server.metric("windlass_engine_restarts_total") == 1, seconds=30)
        server.wait_ready()
        assert complete(server, "Once upon a time") == before
        assert "rank 1 ended: killed by SIGKILL" in server.log.read_text()
        assert rank_pids(server) != [rank]


@pytest.mark.parametrize("stopped", [False, True])
def test_no_rank_outlives_the_engine_or_the_server(stopped: bool) -> None:
    """Including a stopped rank, which does not see a closed pipe."""
    with serve("--tensor-parallel", "2", *SMALL) as server:
        (rank,) = rank_pids(server)
        if stopped:
            os.kill(rank, signal.SIGSTOP)
        os.kill(server.engine_pid(), signal.SIGKILL)
        eventually(is_gone(rank), seconds=30)
        eventually(lambda: server.metric("windlass_engine_restarts_total") == 1, seconds=30)
        server.wait_ready()
        engine, (rank,) = server.engine_pid(), rank_pids(server)
        server.process.kill()
        eventually(is_gone(engine), seconds=30)
        eventually(is_gone(rank), seconds=30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tensor-parallel", "5"), "the model has 4 heads of keys: use 4 or less"),
        (("--tensor-parallel", "0"), "--tensor-parallel must be at least 1"),
        (("--tensor-parallel", "2", "--device", "cuda:1"), "use --device cpu"),
        (("--tensor-parallel", "2", "--kv-persist", "/tmp/never"), "leave --kv-persist out"),
    ],
)
def test_refused_starts_are_one_line(options: tuple[str, ...], message: str) -> None:
    start = program if "cuda:1" in options else inside
    refused = start("serve", "demo", "--port", "0", *options)
    assert message in reason(refused)
    assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr


def test_random_weights_cannot_be_split() -> None:
    refused = inside("serve", "demo", "--port", "0", "--tensor-parallel", "2", WINDLASS_LOAD_FORMAT="dummy")
    assert "leave WINDLASS_LOAD_FORMAT=dummy out" in reason(refused)
