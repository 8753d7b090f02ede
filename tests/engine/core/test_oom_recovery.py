"""OOM recovery: the newest request of a step fails, and all others get the same tokens as alone.

No GPU is needed: steps raise the error of torch on a GPU, after some of their layers have written to the cache.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cache_invariants import assert_balanced
from helpers.configs import engine_config
from helpers.engines import Finished, greedy, make_core, run
from helpers.little_memory import NO_ROOM, POINTS, ROWS, little_memory
from helpers.marks import slow_but
from helpers.tiny_models import make_model

from windlass.engine.client.process_client import ProcessClient
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import DeviceMemoryError
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.interface.request import EngineRequest, PoolingRule, SamplingParams
from windlass.kernels import DeviceMemory, is_out_of_memory

TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=64)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 128, length).tolist()


def outputs_of(core: EngineCore, steps: int = 200) -> list[RequestOutput]:
    found: list[RequestOutput] = []
    for _ in range(steps):
        if not core.has_work():
            return found
        found += core.step()
    raise AssertionError("not idle")


def failed_requests(outputs: list[RequestOutput]) -> list[str]:
    """Ids of the requests that failed, all without memory."""
    failed = [output for output in outputs if output.error is not None]
    assert all(isinstance(output.error, DeviceMemoryError) for output in failed)
    return [output.request_id for output in failed]


def finish(
    core: EngineCore, outputs: list[RequestOutput], expected: dict[str, dict[int, list[int]]], failed: str = "newest"
) -> list[RequestOutput]:
    """Step until the engine is idle; only `failed` has failed, and the other requests have the expected tokens."""
    outputs = [*outputs, *outputs_of(core)]
    assert failed_requests(outputs) == [failed]
    for name, tokens in expected.items():
        assert tokens_of(outputs, name) == tokens, name
    assert_idle(core)
    return outputs


def tokens_of(outputs: list[RequestOutput], request_id: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for output in outputs:
        if output.request_id == request_id:
            found.setdefault(output.index, []).extend(output.token_ids)
    return found


def assert_idle(core: EngineCore) -> None:
    assert_balanced(core.blocks)
    assert core.blocks.num_used_blocks == 0
    assert len(core.runner.input_batch) == core.runner.sampler.num_tracked == core.runner.tables.num_live == 0
    assert core.stats().num_running == core.stats().num_waiting == 0


def alone(core: EngineCore, request: EngineRequest) -> dict[int, list[int]]:
    found: dict[tuple[str, int], Finished] = run(core, [request])
    return {index: entry.token_ids for (_, index), entry in found.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n-gram proposals": {"speculative_ngram": 2},
    "deterministic": {"deterministic": True},
}
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "three samples": {"n": 3, "temperature": 0.8, "seed": 4},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.3, "logprobs": 1},
    "prompt log-probabilities": {"prompt_logprobs": 1},
}


# Each option, kind of request and point once.
QUICK = {
    ("plain", "attention", "three samples"),
    ("n-gram proposals", "head", "greedy"),
    ("deterministic", "draw", "penalties"),
    ("plain", "draw", "prompt log-probabilities"),
}


@pytest.mark.parametrize(
    ("kind", "point", "request_kind"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in itertools.product(OPTIONS, POINTS, FIELDS)
    ],
)
def test_the_newest_request_of_a_step_fails_and_the_others_continue(
    model: Path, kind: str, point: str, request_kind: str
) -> None:
    core, fields = make_core(model, prefix_caching=False, **OPTIONS[kind]), FIELDS[request_kind]
    running, other = greedy("running", prompt(1, 9), 12, **fields), greedy("other", prompt(2, 6), 9, **fields)
    expected = {request.request_id: alone(core, request) for request in (running, other)}
    with little_memory(core, ROWS, point) as failed:
        core.add(running)
        outputs = core.step() + core.step()
        core.add(other)  # both start in one step, next to the running one
        core.add(greedy("newest", prompt(3, 24), 12, **fields))
        finish(core, outputs, {**expected, "newest": {0: []}})
    assert failed and max(failed) > ROWS
    assert alone(core, greedy("newest", prompt(3, 20), 4)) == {0: alone(core, greedy("again", prompt(3, 20), 4))[0]}


@pytest.mark.parametrize("point", slow_but(["head", "draw"], "draw"))
@pytest.mark.parametrize(
    ("context", "options"),
    [
        (ContextRule(), {}),
        (ContextRule("shift", keep_tokens=16), {}),
        (ContextRule("shift", keep_tokens=16), {"speculative_ngram": 4, "speculative_ngram_min": 1}),
    ],
    ids=["plain", "shift", "proposals"],
)
def test_recurrent_streams_restart_after_a_failed_step(
    point: str, context: ContextRule, options: dict[str, Any], tmp_path: Path
) -> None:
    """States written by the failed step must not be read."""
    model = make_model("qwen3_5", tmp_path / "model", max_position_embeddings=64)
    core = make_core(model, shift_context=48, **options)
    running = greedy("running", prompt(1, 30), 30, context=context, n=2, temperature=0.7, seed=4)
    other = greedy("other", prompt(2, 6), 9)
    expected = {request.request_id: alone(core, request) for request in (running, other)}
    core.add(running)
    outputs = [output for _ in range(24) for output in core.step()]  # tokens have been dropped, under `shift`
    with little_memory(core, ROWS, point) as failed:
        core.add(other)
        core.add(greedy("newest", prompt(3, 24), 12))
        outputs += core.step()
    assert len(failed) == 1 and core.scheduler.counters.num_preemptions == 3
    finish(core, outputs, expected)


@pytest.mark.parametrize("ended", [None, 1], ids=["all", "one ends before"])
def test_samples_wait_for_a_restarted_chunked_prompt(ended: int | None, tmp_path: Path) -> None:
    """They existed when the step failed, and wait for the end of the prompt again."""
    model = make_model("qwen3_5", tmp_path / "model")
    core = make_core(model, max_num_batched_tokens=16, prefix_caching=False)
    forking = greedy("forking", prompt(1, 24), 12, n=3, temperature=0.9, seed=4)
    expected = alone(core, forking)
    core.add(forking)
    outputs = core.step()
    core.add(greedy("newest", prompt(3, 24), 12))
    with little_memory(core, 12, "head") as failed:
        outputs += core.step()
    assert failed and core.scheduler.counters.num_preemptions == 1
    if ended is not None:
        core.end_sample("forking", ended)
        del expected[ended]
    finish(core, outputs, {"forking": expected})


def test_a_later_chunk_without_memory_fails_its_prompt(tmp_path: Path) -> None:
    core = make_core(make_model("gemma3", tmp_path / "model"), max_num_batched_tokens=24, prefix_caching=False)
    running, long = greedy("running", prompt(6, 40), 20), greedy("long", prompt(5, 70), 6)
    expected = alone(core, running), alone(core, long)
    core.add(running)
    outputs = core.step() + core.step() + core.step()
    core.add(long)
    outputs += core.step()  # the first chunk finds memory, the second does not
    with little_memory(core, ROWS) as failed:
        outputs += core.step()
    assert failed == [24] and failed_requests(outputs) == ["long"]
    finish(core, outputs, {"running": expected[0]}, failed="long")
    assert alone(core, long) == expected[1]


def test_an_engine_serves_after_a_step_without_memory_for_any_request(model: Path) -> None:
    core = make_core(model)
    expected = alone(core, greedy("a", prompt(1, 9), 5))
    with little_memory(core, 0) as failed:
        for name in "abc":
            core.add(greedy(name, prompt(1, 9), 5))
        outputs = outputs_of(core)
    assert failed_requests(outputs) == ["c", "b", "a"] and len(failed) == len(outputs) == 3
    assert_idle(core)
    assert alone(core, greedy("a", prompt(1, 9), 5)) == expected


def test_a_burst_without_memory_is_repeated(model: Path) -> None:
    """Tokens of its first passes are sampled again, once."""
    core = make_core(model, burst_seconds=1.0, prefix_caching=False)
    running = greedy("running", prompt(1, 9), 40, temperature=0.7, seed=3, repetition_penalty=1.2)
    expected = alone(core, running)
    core.add(running)
    core.add(greedy("newest", prompt(2, 9), 40, temperature=0.7, seed=4))
    outputs = core.step() + core.step() + core.step()
    sample, calls = core.runner.sampler.sample, 0

    def fails(*operands: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError(NO_ROOM)
        return sample(*operands)

    core.runner.sampler.sample = fails
    outputs = finish(core, outputs, {"running": expected})
    assert calls > 10 and max(len(output.token_ids) for output in outputs) > 3


def test_a_draft_model_proposes_again_after_a_failed_step(model: Path, tmp_path: Path) -> None:
    draft = make_model("llama", tmp_path / "draft", max_position_embeddings=64, num_hidden_layers=4)
    core = make_core(model, speculative_model=str(draft), speculative_tokens=2, prefix_caching=False)
    running = greedy("running", prompt(1, 9), 14)
    expected = alone(core, running)
    with little_memory(core, ROWS) as failed:
        core.add(running)
        outputs = core.step() + core.step()
        core.add(greedy("newest", prompt(3, 24), 12))
        finish(core, outputs, {"running": expected})
    assert failed


def test_pooled_rows_are_not_counted_twice(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(model, max_num_batched_tokens=12)
    rule = PoolingRule(kind="mean")

    def pooled(name: str, seed: int) -> EngineRequest:
        sampling = SamplingParams(max_tokens=0, temperature=0.0)
        return EngineRequest(name, prompt(seed, 20), sampling, pooling=rule)

    def vectors(outputs: list[RequestOutput]) -> dict[str, bytes | None]:
        return {output.request_id: output.pooled and output.pooled.values for output in outputs}

    core.add(pooled("first", 1))
    expected = vectors(outputs_of(core))
    add, taken = core.runner._pooler.add, []

    def fails(seq_id: int, *operands: Any) -> Any:
        taken.append(seq_id)
        if seq_id != taken[0]:  # in a step in which the rows of the first request have been added
            raise torch.OutOfMemoryError(NO_ROOM)
        return add(seq_id, *operands)

    monkeypatch.setattr(core.runner._pooler, "add", fails)
    core.add(pooled("first", 1))
    core.add(pooled("second", 2))
    outputs = outputs_of(core)
    assert failed_requests(outputs) == ["second"]
    assert vectors([output for output in outputs if output.error is None]) == expected
    assert_idle(core)


class _Memory(DeviceMemory):
    """Device memory that records whether `held`, a tensor of the failed step, is gone at each release."""

    total = 1 << 30

    def __init__(self) -> None:
        self.held: weakref.ref[torch.Tensor] | None = None
        self.gone: list[bool] = []

    def free(self) -> int:
        return 1 << 20

    def used_by_process(self) -> int:
        return 0

    def allocated(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def release_cached(self) -> None:
        self.gone.append(self.held is not None and self.held() is None)


def test_memory_is_released_after_the_failed_step_holds_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(model)
    memory = _Memory()
    monkeypatch.setattr(core.runner.decoder.backend, "device_memory", memory)
    logits = core.runner.decoder.logits

    def fails(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        if not memory.gone:
            memory.held = weakref.ref(found)
            raise torch.OutOfMemoryError(NO_ROOM)
        return found

    monkeypatch.setattr(core.runner.decoder, "logits", fails)
    for name in ("kept", "newest"):
        core.add(greedy(name, prompt(1, 9), 5))
    outputs = outputs_of(core)
    assert memory.gone == [True] and failed_requests(outputs) == ["newest"]


def test_failed_block_copies_end_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated copy or rotation would be wrong, so the engine ends, as after any other error."""
    core = make_core(model)

    def fails(copies: Any) -> None:
        raise torch.OutOfMemoryError(NO_ROOM)

    monkeypatch.setattr(core.runner.cache, "copy_blocks", fails)
    core.add(greedy("a", prompt(1, 9), 5))
    with pytest.raises(torch.OutOfMemoryError):
        core.step()


LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    "error", [LOST, RuntimeError("CUDA error: device-side assert triggered"), KeyError("x")], ids=repr
)
def test_a_lost_device_ends_the_engine(model: Path, error: Exception) -> None:
    core = make_core(model)
    core.add(greedy("a", prompt(1, 9), 5))
    with little_memory(core, 0, error=error), pytest.raises(type(error)):
        core.step()


def test_out_of_memory_errors_are_recognized() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(NO_ROOM))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be …"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA driver error: out of memory"))
    others = (
        LOST,
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] can't allocate memory"),
        MemoryError(),
    )
    assert not any(map(is_out_of_memory, others))


@pytest.mark.slow
@pytest.mark.anyio
async def test_streams_of_a_client_continue(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
    config = engine_config(model, kv_cache_memory=8 << 20, device="cpu", prefix_caching=False)
    client = ProcessClient(config, core="helpers.little_memory:core")
    await client.start()

    async def ask(request: EngineRequest, begun: asyncio.Event | None = None) -> list[int]:
        tokens: list[int] = []
        async for output in client.generate(request):
            tokens += output.token_ids
            if begun is not None:
                begun.set()
        return tokens

    try:
        expected = await ask(greedy("alone", prompt(1, 9), 50))
        streams = []
        for number in range(3):
            begun = asyncio.Event()
            streams.append(asyncio.ensure_future(ask(greedy(f"stream {number}", prompt(1, 9), 50), begun)))
            await begun.wait()
        with pytest.raises(DeviceMemoryError, match="ran out of memory"):
            await ask(greedy("newest", prompt(3, 40), 5))
        assert await asyncio.gather(*streams) == [expected] * 3
        assert client.state == "ready" and await ask(greedy("again", prompt(1, 9), 50)) == expected
        assert (await client.stats()).kv_blocks_used == 0
    finally:
        await client.close()
