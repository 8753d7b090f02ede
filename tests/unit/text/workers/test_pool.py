"""Text processes: results, limits of time and memory, deaths, cancelling and closing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tokenizers
from helpers import toy_tokenizers as toys
from helpers.eventually import children, in_time
from tokenizers import Regex, models, pre_tokenizers

from windlass.engine.errors import LoadError
from windlass.server.text.tokenizer import Tokenizer
from windlass.server.text.workers import pool as pool_module
from windlass.server.text.workers.frames import Limits, WorkerSource, pack_ids, unpack_ids
from windlass.server.text.workers.pool import (
    CRASH_SECONDS,
    LARGE_JOB,
    MAX_CRASHES,
    RECYCLE_JOB_SIZE,
    ClosedError,
    ForkServer,
    KilledError,
    OutOfMemoryError,
    ProcessDiedError,
    RefusedError,
    TextPool,
    TextWorkerError,
    TooManyCrashesError,
    TooSlowError,
)
from windlass.server.text.workers.tasks import TextTasks

T = TypeVar("T")

MIB = 2**20
GENEROUS = Limits(seconds=30.0, memory=1024 * MIB)
SPECIAL = {"bos_token": "<|bos|>"}
TEMPLATE = (
    "{% if spin %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if eat %}{{ ('x' * eat) | length }}{% endif %}{% if refuse %}{{ raise_exception(refuse) }}{% endif %}"
    "{% if repeat %}{{ 'ab ' * repeat }}{% endif %}{{ messages[0].content }}"
)


def make_pool(backend: tokenizers.Tokenizer | None = None, template: str | None = TEMPLATE, **options: Any) -> TextPool:
    source = WorkerSource((backend or toys.byte_level()).to_str(), SPECIAL, template)
    return TextPool(
        source, **{"short": 2, "large": 1, "templates": 2, "grammars": 1, "max_waiting": 100 * MIB, **options}
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[TextPool]:
    made = make_pool()
    yield made
    made.close()


def run(make: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await make()

    return asyncio.run(main())


def conversation(**variables: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "hello"}],
        "add_generation_prompt": True,
        "continue_final_message": False,
        "variables": variables,
        "tools": None,
        "with_tools": False,
    }


def render(pool: TextPool, limits: Limits = GENEROUS, **variables: Any) -> Awaitable[str]:
    return pool.run(partial(TextTasks.render, **conversation(**variables)), limits, size=5, limiter=pool.templates)


def encode_chat(
    pool: TextPool,
    rendering: Limits = GENEROUS,
    tokenizing: Limits = GENEROUS,
    *,
    size: int = 5,
    max_characters: int | None = None,
    **variables: Any,
) -> Awaitable[tuple[str, bytes] | int]:
    task = partial(
        TextTasks.encode_chat, add_special_tokens=False, max_characters=max_characters, **conversation(**variables)
    )
    return pool.run(task, rendering, tokenizing, size=size, limiter=pool.templates)


def do(pool: TextPool, task: partial[T], size: int = 10) -> T:
    """The result of a task with generous limits."""
    return run(lambda: pool.run(task, GENEROUS, size=size))


def children_of(pid: int) -> list[int]:
    return children(pid)


def fork_server(pool: TextPool) -> int:
    assert pool._server is not None
    return pool._server._process.pid


TEXTS = ["", "hello world", "naïve 東京 😀", "a" * 5000, "<|eos|> x <tool>", "\n\n\t  "]


def test_results_equal_those_of_the_tokenizer(pool: TextPool) -> None:
    tokenizer = Tokenizer(toys.byte_level(), SPECIAL)
    for special in (True, False):
        packed = do(pool, partial(TextTasks.encode, texts=TEXTS, add_special_tokens=special))
        ids = [unpack_ids(each) for each in packed]
        assert ids == [tokenizer.encode(text, add_special_tokens=special) for text in TEXTS]
        texts = do(pool, partial(TextTasks.decode, prompts=packed, skip_special_tokens=special))
        assert texts == [tokenizer.decode(each, skip_special_tokens=special) for each in ids]
    shown = {"add_special_tokens": True, "offsets": True, "token_strs": True}
    answer = json.loads(do(pool, partial(TextTasks.tokenize, text=TEXTS[2], **shown, max_model_len=77, max_bytes=MIB)))
    ids, offsets = tokenizer.encode_with_offsets(TEXTS[2])
    assert answer["tokens"] == ids and answer["offsets"] == [list(pair) for pair in offsets]
    assert answer["count"] == len(ids) and answer["max_model_len"] == 77
    assert answer["token_strs"] == [tokenizer.token_text(each) for each in ids]
    assert run(lambda: render(pool)) == "hello"


def test_ids_survive_packing() -> None:
    ids = [0, 1, 2**31 - 1, *range(250_000)]
    assert unpack_ids(pack_ids(ids)) == ids
    assert unpack_ids(pack_ids([])) == []


def test_a_slow_job_is_killed_and_others_continue(pool: TextPool) -> None:
    async def seconds_of_others() -> float:
        begin = time.monotonic()
        spinning = asyncio.create_task(_outcome(render(pool, Limits(2.0, 256 * MIB), spin=1)))  # type: ignore[arg-type]
        for _ in range(20):
            assert await render(pool) == "hello"
        took = time.monotonic() - begin
        assert isinstance(await spinning, TooSlowError)
        assert time.monotonic() - begin < 15
        assert await render(pool) == "hello"
        return took

    in_time(lambda: asyncio.run(seconds_of_others()), 2.0)  # that is, before the spinning one is killed
    assert len(children_of(fork_server(pool))) <= 3  # what was killed is gone, not a zombie


def test_a_job_that_takes_too_much_memory_is_refused(pool: TextPool) -> None:
    async def main() -> None:
        limits = Limits(20.0, 64 * MIB)
        with pytest.raises(OutOfMemoryError):
            await render(pool, limits, eat=200 * MIB)
        assert await render(pool, limits, eat=MIB) == f"{MIB}hello"
        assert await render(pool, GENEROUS, eat=200 * MIB) == f"{200 * MIB}hello"

    asyncio.run(main())


def test_a_chat_is_rendered_and_tokenized_in_one_job(pool: TextPool) -> None:
    tokenizer = Tokenizer(toys.byte_level(), SPECIAL)
    before = pool.jobs
    text, packed = run(lambda: encode_chat(pool, max_characters=5))
    assert text == "hello" and unpack_ids(packed) == tokenizer.encode("hello", add_special_tokens=False)
    assert run(lambda: encode_chat(pool, max_characters=4)) == 5
    assert pool.jobs == before + 2


@pytest.mark.slow
def test_each_phase_of_a_chat_has_its_own_limits(pool: TextPool) -> None:
    async def main() -> None:
        short = Limits(1.0, 64 * MIB)
        for limits, variables, expected, phase in (
            ((short, GENEROUS), {"spin": 1}, TooSlowError, 0),
            ((short, GENEROUS), {"eat": 200 * MIB}, OutOfMemoryError, 0),
            ((GENEROUS, short), {"repeat": 4 * MIB}, TextWorkerError, 1),
            ((GENEROUS, GENEROUS), {"refuse": "no such role"}, RefusedError, 0),
        ):
            error = await _outcome(encode_chat(pool, *limits, **variables))
            assert isinstance(error, expected) and error.phase == phase, variables
        assert not isinstance(await _outcome(encode_chat(pool, short, short)), Exception)

    asyncio.run(main())


@pytest.mark.slow
def test_a_process_is_replaced_after_a_chat_that_renders_into_a_large_text() -> None:
    made = make_pool()
    try:
        run(lambda: encode_chat(made))
        assert len(made._idle) == 1
        run(lambda: encode_chat(made, repeat=RECYCLE_JOB_SIZE))
        assert not made._idle and not children_of(fork_server(made))
    finally:
        made.close()


def test_large_chats_wait_without_a_template_slot() -> None:
    """They are tokenized one at a time; chats of other callers are rendered meanwhile."""
    made = make_pool(templates=2)

    async def main() -> None:
        large = [asyncio.create_task(_outcome(encode_chat(made, size=LARGE_JOB, spin=1))) for _ in range(3)]
        while not made._running:
            await asyncio.sleep(0.01)
        text, _ = await encode_chat(made)  # type: ignore[misc]
        assert text == "hello" and not any(task.done() for task in large)
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)
        assert not made._large._queues and not made.templates._queues

    try:
        asyncio.run(main())
    finally:
        made.close()


def test_faulty_input_is_refused_with_the_reason(pool: TextPool) -> None:
    with pytest.raises(RefusedError, match="no such role"):
        run(lambda: render(pool, refuse="no such role"))
    shown = {"add_special_tokens": True, "offsets": True, "token_strs": False}
    with pytest.raises(RefusedError, match=r"the response has \d+ bytes"):
        do(pool, partial(TextTasks.tokenize, text="hello " * 1000, **shown, max_model_len=None, max_bytes=100))


def test_a_pattern_that_backtracks_is_an_error_of_the_text() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"^(a+)+$"), "isolated")
    made = make_pool(backend, None)
    try:
        with pytest.raises(RefusedError, match="tokenizer cannot process this text"):
            do(made, partial(TextTasks.encode, texts=["a" * 60 + "!"], add_special_tokens=True), size=60)
        packed = do(made, partial(TextTasks.encode, texts=["a"], add_special_tokens=True), size=1)
        assert unpack_ids(packed[0]) == [0]
    finally:
        made.close()


@pytest.mark.slow
def test_processes_that_are_killed_from_outside_are_replaced() -> None:
    made = make_pool()
    try:
        assert run(lambda: render(made)) == "hello"
        for child in children_of(fork_server(made)):
            os.kill(child, signal.SIGKILL)
        assert [run(lambda: render(made)) for _ in range(3)] == ["hello"] * 3  # they were idle: no job was lost
        for _ in range(5):
            made._idle.pop().kill()  # so that the next one needs a fork
            os.kill(fork_server(made), signal.SIGKILL)  # its death may not be visible yet
            assert [run(lambda: render(made, spin=0)) for _ in range(2)] == ["hello"] * 2
    finally:
        made.close()


@contextlib.contextmanager
def many_files_open() -> Iterator[None]:
    """Scope in which new descriptors are above 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while opened.enter_context(Path(os.devnull).open()).fileno() < 1100:
            pass
        yield


def test_jobs_run_with_more_than_a_thousand_descriptors() -> None:
    made = make_pool()
    try:
        with many_files_open():
            assert run(lambda: render(made)) == "hello"
            assert made._idle[0]._connection.fileno() > 1100
        assert made.processes_lost == 0
    finally:
        made.close()


def test_no_process_is_left_after_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_pool()

    def failing(*_: object) -> None:
        raise ValueError("not foreseen")

    try:
        monkeypatch.setattr(pool_module, "_wait_readable", failing)
        with pytest.raises(ValueError, match="not foreseen"):
            run(lambda: render(made))
        assert not children_of(fork_server(made))
    finally:
        made.close()


def test_a_process_killed_from_outside_is_not_an_error_of_the_job() -> None:
    made = make_pool()

    async def main() -> None:
        spinning = asyncio.create_task(_outcome(render(made, spin=1)))  # type: ignore[arg-type]
        while not made._server or not children_of(fork_server(made)):
            await asyncio.sleep(0.01)
        os.kill(children_of(fork_server(made))[0], signal.SIGKILL)
        assert isinstance(await spinning, KilledError)
        assert await render(made) == "hello"

    try:
        asyncio.run(main())
    finally:
        made.close()


def test_callers_whose_jobs_crash_repeatedly_wait(caplog: pytest.LogCaptureFixture) -> None:
    made = make_pool()

    def job(caller: str, **variables: Any) -> Awaitable[str]:
        task = partial(TextTasks.render, **conversation(**variables))
        return made.run(task, GENEROUS, size=5, caller=caller, limiter=made.templates)

    async def main() -> None:
        for _ in range(MAX_CRASHES):
            spinning = asyncio.create_task(_outcome(job("one", spin=1)))  # type: ignore[arg-type]
            while not made._server or not children_of(fork_server(made)):
                await asyncio.sleep(0.01)
            os.kill(children_of(fork_server(made))[0], signal.SIGSEGV)
            died = await spinning
            assert isinstance(died, ProcessDiedError) and "SIGSEGV" in str(died)
        with pytest.raises(TooManyCrashesError) as refused:
            await job("one")
        assert 0 < refused.value.retry_after <= CRASH_SECONDS
        assert await job("another") == "hello"
        encode = partial(TextTasks.encode, texts=["x"], add_special_tokens=False)
        assert await made.run(encode, GENEROUS, size=1, caller="one")  # other work of the same caller

    try:
        asyncio.run(main())
    finally:
        made.close()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["a text worker ended in render: SIGSEGV"] * MAX_CRASHES


def stop(pool: TextPool) -> int:
    """Stop the pool's fork server, with a shorter timeout for its answers; returns its process id."""
    assert pool._server is not None
    pool._server._control.settimeout(0.3)
    os.kill(fork_server(pool), signal.SIGSTOP)
    return fork_server(pool)


@pytest.mark.slow
def test_a_fork_server_that_hangs_is_replaced() -> None:
    made = make_pool()
    try:
        assert run(lambda: render(made)) == "hello"
        made._idle.pop().kill()
        hung = stop(made)
        assert run(lambda: render(made)) == "hello"
        assert fork_server(made) != hung and not _running(hung)
    finally:
        made.close()


@pytest.mark.slow
def test_late_answers_of_a_fork_server_are_discarded() -> None:
    made = make_pool()
    try:
        assert run(lambda: render(made)) == "hello"
        process, late = made._idle.pop(), stop(made)
        assert process.kill() is None
        with contextlib.suppress(ProcessLookupError):
            os.kill(late, signal.SIGCONT)
        assert run(lambda: render(made)) == "hello"
        assert fork_server(made) != late
        assert [each._pid for each in made._idle] == children_of(fork_server(made))
    finally:
        made.close()


def test_the_inherited_soft_limit_is_kept() -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)
    given = 64 * 1024 * MIB  # far more than a text process needs
    if limit[1] != resource.RLIM_INFINITY and limit[1] < given:
        pytest.skip("this machine allows less")
    made = make_pool()
    resource.setrlimit(resource.RLIMIT_AS, (given, limit[1]))
    try:
        made.spawn()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    try:
        assert run(lambda: render(made)) == "hello"
        for pid in (fork_server(made), made._idle[0]._pid):
            assert resource.prlimit(pid, resource.RLIMIT_AS)[0] == given
    finally:
        made.close()


def test_cancelling_ends_the_process_and_frees_the_slot() -> None:
    made = make_pool(templates=1)

    async def main() -> None:
        assert await render(made) == "hello"
        spinning = asyncio.create_task(render(made, GENEROUS, spin=1))  # type: ignore[arg-type]
        while not made._running:
            await asyncio.sleep(0.01)
        begin = time.monotonic()
        spinning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spinning
        assert await render(made) == "hello"
        assert time.monotonic() - begin < 20  # it would have spun for 30 s

    try:
        asyncio.run(main())
    finally:
        made.close()


@pytest.mark.parametrize(
    ("templates", "problem"),
    [
        ({"chat_template": "{% if %}"}, r"chat template cannot be used: .*does not parse.*`chat_template`"),
        ({"pair_template": "{% for"}, "`rerank_template`.*does not parse"),
        ({"pair_template": "{{ messages[0].content }}"}, "`rerank_template`.*role document"),
    ],
)
def test_a_template_that_cannot_be_used_ends_the_start_with_one_line(templates: dict[str, str], problem: str) -> None:
    source = WorkerSource(
        toys.byte_level().to_str(), SPECIAL, templates.get("chat_template"), None, templates.get("pair_template"), True
    )
    server = ForkServer(source)
    with pytest.raises(LoadError, match=problem) as caught:
        server.wait_loaded()
    assert "\n" not in str(caught.value)
    server.kill()


def test_closing_leaves_no_process_behind() -> None:
    made = make_pool()
    run(lambda: render(made))
    server = fork_server(made)
    forked = children_of(server)
    assert forked
    made.close()
    end = time.monotonic() + 30
    while any(_running(pid) for pid in (server, *forked)):
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises((ClosedError, RuntimeError)):
        run(lambda: render(made))


def test_closing_ends_jobs_that_run() -> None:
    made = make_pool()

    async def main() -> None:
        spinning = asyncio.create_task(_outcome(render(made, spin=1)))  # type: ignore[arg-type]
        while not made._server or not children_of(fork_server(made)):
            await asyncio.sleep(0.01)
        (pid,) = children_of(fork_server(made))
        begin = time.monotonic()
        made.close()
        assert isinstance(await spinning, Exception)
        assert time.monotonic() - begin < 20  # it would have spun for 30 s
        while _running(pid):
            assert time.monotonic() - begin < 30
            await asyncio.sleep(0.01)

    asyncio.run(main())


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def _outcome(job: Awaitable[Any]) -> Any:
    try:
        return await job
    except Exception as error:
        return error


def test_without_fork_server_only_processes_of_its_session_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process id of one that has ended may have been reused."""
    server = ForkServer(WorkerSource(toys.byte_level().to_str(), SPECIAL, None))
    server.wait_loaded()
    theirs, gone = server.fork(), server.fork()
    server.kill()
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    gone._pid = os.getpid()
    gone.kill()
    assert gone.exited and not killed
    theirs.kill()
    assert killed == [(theirs._pid, signal.SIGKILL)]


def test_processes_print_nowhere_if_the_host_has_no_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    server = ForkServer(WorkerSource("", SPECIAL, None))
    outputs = [str(Path(f"/proc/{server._process.pid}/fd/{number}").readlink()) for number in (1, 2)]
    server.kill()
    assert outputs == [os.devnull] * 2
