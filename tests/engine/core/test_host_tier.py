"""Host tier of an engine: blocks that come back from main memory, and from files, have the bits of a run that never lost them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.persisting import (
    FULL,
    KINDS,
    PROMPT,
    RANDOM,
    ask,
    cached,
    keeping,
    kind_of_keys,
    same_bits,
    tokens,
    written,
)
from engine_helpers.played_engines import BURSTS, graphed, played_device, record_plans, texts
from helpers.engines import greedy, make_core, run
from helpers.eventually import eventually
from helpers.marks import slow_but
from helpers.played_copies import PlayedCopies
from helpers.tiny_models import make_model

from windlass.engine.cache import host_tier
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.interface.context import NonPrefixReuseParams
from windlass.engine.interface.outputs import PersistStats
from windlass.engine.interface.request import EngineRequest

__all__ = ["played_device"]
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
HOST_KINDS = [kind for kind in KINDS if kind not in ("bfloat16 weights", "quantized", "far keys", "rotate")]
Models = dict[str, Path]
MakeCore = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models of two layers, since the simulated device computes row by row."""
    families: dict[str, dict[str, Any]] = {
        "llama": {},
        "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
        "smollm3": {},
        "deepseek_v3": {"first_k_dense_replace": 1},
    }
    return {
        name: make_model(name, tmp_path_factory.mktemp(name), num_hidden_layers=2, **sizes)
        for name, sizes in families.items()
    }


_SIZES: dict[str, int] = {}


def block_bytes(model: Path, **options: Any) -> int:
    """Bytes of a block in all KV groups."""
    asked = repr((model, options))
    if asked not in _SIZES:
        info = make_core(model, **options).info
        _SIZES[asked] = info.kv_bytes_per_token * info.block_size
    return _SIZES[asked]


def small(model: Path, blocks: int = 20, host: int = 200, **options: Any) -> dict[str, Any]:
    """Options of an engine with these numbers of blocks of each KV group on the device and in host memory."""
    size = block_bytes(model, **options)
    sizes: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 2, "deterministic": True}
    return {**sizes, "kv_cache_memory": blocks * size, "kv_host_memory": host * size, **options}


@pytest.fixture
def small_core(models: Models) -> Iterator[MakeCore]:
    """Make an engine with few blocks, which is closed after the test."""
    cores: list[EngineCore] = []

    def make(blocks: int = 20, host: int = 200, **options: Any) -> EngineCore:
        cores.append(make_core(models["llama"], **small(models["llama"], blocks, host, **options)))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


def large_core(models: Models, **options: Any) -> EngineCore:
    """An engine that evicts nothing."""
    return make_core(models["llama"], **{"deterministic": True, "kv_cache_memory": 64 << 20, **options})


def assert_same_tokens(core: EngineCore, oracle: EngineCore, sent: list[EngineRequest]) -> None:
    got, right = (run(one, sent, every_logit=False) for one in (core, oracle))
    assert texts(got) == texts(right)


def evict(core: EngineCore, times: int = 4) -> None:
    """Fill the cache of the device with other texts."""
    for _ in range(times):
        ask(core, tokens(150), 1)


def stats(core: EngineCore) -> PersistStats:
    return core.stats().persist


def copies_of(core: EngineCore) -> PlayedCopies:
    backend: Any = core.runner.decoder.backend
    return backend.copies


def wait_until_rows_are_free(core: EngineCore) -> None:
    transfer: Any = core._store.transfer
    eventually(lambda: len(transfer._free) == len(transfer._incoming) and transfer._staged == {}, 30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(HOST_KINDS, "latent", "draft model"))
def test_blocks_from_the_host_and_from_files_have_the_same_bits(kind: str, models: Models, tmp_path: Path) -> None:
    model, options, fields = kind_of_keys(kind, models)
    right = ask(make_core(model, deterministic=True, **options), **fields)
    windows = model == models["gemma3"]
    given = small(model, 60 if windows else 20, **options)
    with keeping(model, tmp_path, **given) as core:
        first = ask(core, **fields)
        evict(core, 8 if windows else 5)
        before = stats(core)
        again = ask(core, **fields)
        after = stats(core)
        assert cached(first) == 0 and cached(again) == FULL
        assert after.host_read_blocks > before.host_read_blocks and after.read_blocks == 0
        assert after.host_lost_blocks == 0 and after.host_blocks <= after.host_saved_blocks
    with keeping(model, tmp_path, **{**given, "kv_host_memory": None}) as core:
        restarted = ask(core, **fields)
        assert cached(restarted) == FULL and stats(core).read_blocks > 0
    for got in (first, again, restarted):
        assert got.token_ids == right.token_ids
        assert kind == "draft model" or same_bits(got, right)


@pytest.mark.slow
def test_random_texts_with_little_memory_give_equal_tokens(models: Models, small_core: MakeCore) -> None:
    """Several streams, common prefixes, blocks that are evicted and restored at every step."""
    core, oracle = small_core(24, 64, max_num_seqs=4, max_num_batched_tokens=48), large_core(models)
    heads = [tokens(64) for _ in range(7)]
    for turn in range(20):
        prompts = [[*RANDOM.choice(heads), *tokens(RANDOM.randrange(1, 30))] for _ in range(3)]
        assert_same_tokens(core, oracle, [greedy(f"{turn} {i}", text, 20) for i, text in enumerate(prompts)])
    found = stats(core)
    assert found.host_read_blocks > 20 and found.host_evicted_blocks > 20 and found.host_blocks <= 64
    assert found.restored_tokens > 300 and found.host_bytes == found.host_blocks * block_bytes(models["llama"])


@pytest.mark.slow
@BURSTS
def test_steps_planned_ahead_evict_cached_blocks(burst_seconds: float, models: Models) -> None:
    """Captured steps that are planned before the previous one has ended."""
    given = small(models["llama"], 24, 100, deterministic=False, burst_seconds=burst_seconds, max_num_seqs=3)
    core, device = graphed(models["llama"], **given)
    plans, oracle = record_plans(core), large_core(models, deterministic=False)
    pairs = [[greedy(f"{i}", [*tokens(70), i], 40) for i in range(2)] for _ in range(3)]
    for requests in (*pairs, *pairs[:2]):
        assert_same_tokens(core, oracle, requests)
    assert sum(len(plan.saved) for plan in plans if plan.num_inflight_passes) > 5 and device.replays > 50
    assert stats(core).host_read_blocks > 4 and stats(core).host_lost_blocks == 0
    core.close()


def test_more_blocks_are_evicted_by_a_step_than_there_are_staging_rows(
    models: Models, small_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are reused once their content is copied, also if few blocks are restored at once."""
    size = block_bytes(models["llama"])
    monkeypatch.setattr(host_tier, "_OUTGOING_BYTES", 2 * size)
    monkeypatch.setattr(host_tier, "_INCOMING_BYTES", 4 * size)
    core = small_core()
    right = ask(core)
    evict(core)
    again = ask(core)
    assert same_bits(again, right) and cached(again) == FULL
    assert stats(core).host_saved_blocks > 20 and stats(core).host_read_blocks == FULL // 16


@pytest.mark.slow
def test_preempted_streams_are_restored_by_copies(models: Models, small_core: MakeCore) -> None:
    """Only tokens in a partial block are computed again."""
    core = small_core(14, 64, max_num_seqs=3)
    assert_same_tokens(core, large_core(models), [greedy(f"{i}", tokens(40), 60) for i in range(3)])
    found = core.stats()
    assert found.num_preemptions > 0 and found.persist.restored_tokens >= 32
    assert found.recomputed_tokens["preemption"] <= 16 * found.num_preemptions


@pytest.mark.slow
@pytest.mark.parametrize(
    "at_once", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one block a plan", "one plan"]
)
def test_restored_blocks_do_not_evict_each_other(at_once: bool, models: Models, small_core: MakeCore) -> None:
    """More is requested than fits next to a running stream: the first blocks are restored, to the blocks of the tables."""
    core, oracle = small_core(24, max_model_len=320, max_num_seqs=3), large_core(models)
    ask(core, PROMPT, 1)
    evict(core, 6)
    plans = record_plans(core)
    core.add(greedy("running", tokens(19 * 16 - 9), 20))
    core.step()
    core.step()
    assert core.blocks.available() < [FULL // 16]
    core.add(greedy("waiting", PROMPT, 4))
    core.step()
    restoring: Any = core.scheduler._kv_restorer
    (fetch,) = restoring.fetches
    eventually(lambda: fetch.is_done, 30)
    if not at_once:
        core._store.transfer.load_budget_streaming = 1
    while restoring.fetches:
        core.step()
    loaded = [[(one.group, one.block) for one in plan.loaded] for plan in plans if plan.loaded]
    assert len(loaded) == 1 if at_once else len(loaded) > 1
    assert all(len(set(blocks)) == len(blocks) for blocks in loaded)
    assert stats(core).restored_tokens == 16 * sum(map(len, loaded)) > 16
    core.abort("waiting")
    for last in (5, 6):
        got, right = (ask(one, [*PROMPT, last], 8) for one in (core, oracle))
        assert got.token_ids == right.token_ids


@pytest.mark.slow
def test_the_least_recently_used_block_is_evicted_first(small_core: MakeCore) -> None:
    core, often, once = small_core(host=64), tokens(103), tokens(103)
    ask(core, once)
    ask(core, often)
    for _ in range(8):
        evict(core, 2)
        assert cached(ask(core, often)) == FULL
    assert cached(ask(core, once)) == 0
    assert stats(core).host_blocks <= 64 and stats(core).host_evicted_blocks > 0


@pytest.mark.slow
def test_copies_to_the_host_without_memory_lose_only_their_blocks(
    small_core: MakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    core = small_core()
    right = ask(core)

    def refuse() -> None:
        raise OUT_OF_MEMORY

    copies_of(core).before_ask = refuse
    evict(core)
    lost = stats(core).host_lost_blocks
    assert lost > 20 and stats(core).host_blocks == 0 and len(caplog.records) == 1
    copies_of(core).before_ask = lambda: None
    for expected in (0, FULL):
        again = ask(core)
        assert same_bits(again, right) and cached(again) == expected and stats(core).host_lost_blocks == lost
        evict(core)


@pytest.mark.slow
def test_blocks_that_cannot_be_restored_are_computed(small_core: MakeCore) -> None:
    """The staging rows reserved for them are free again."""
    core = small_core()
    right, copies = ask(core), copies_of(core)
    evict(core)

    def refuse() -> None:
        copies.before_ask = lambda: None
        raise OUT_OF_MEMORY

    copies.before_ask = refuse
    again = ask(core)
    assert same_bits(again, right) and cached(again) == 0
    wait_until_rows_are_free(core)
    evict(core)
    assert cached(ask(core)) == FULL


def test_requests_aborted_while_blocks_are_restored_leave_nothing(small_core: MakeCore) -> None:
    core = small_core()
    right = ask(core)
    evict(core)
    for number in range(5):
        core.add(greedy(str(number), PROMPT, 12))
        core.step()
        core.abort(str(number))
    wait_until_rows_are_free(core)
    assert same_bits(ask(core), right)


@pytest.mark.slow
def test_blocks_evicted_before_they_are_written_are_written_from_the_host(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read_block = threading.Event(), host_tier.DeviceBlockTransfer.read_block

    def waiting(transfer: Any, *given: Any) -> Any:
        gate.wait(60)
        return read_block(transfer, *given)

    monkeypatch.setattr(host_tier.DeviceBlockTransfer, "read_block", waiting)
    given = small(models["llama"])
    with keeping(models["llama"], tmp_path, **given) as core:
        right = ask(core)
        evict(core)
        assert stats(core).waiting_blocks > 20 and stats(core).lost_blocks == 0
        gate.set()
        written(core)
        assert stats(core).lost_blocks == 0
    with keeping(models["llama"], tmp_path, **given) as core:
        again = ask(core)
        assert same_bits(again, right) and cached(again) == FULL and stats(core).host_read_blocks == 0


@pytest.mark.slow
def test_a_block_evicted_while_it_is_copied_to_a_file_is_not_written(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without free host memory, since the copied bytes are unknown."""
    read_block, copied, asked = host_tier.DeviceBlockTransfer.read_block, list[int](), list[int]()
    prompts = [tokens(130) for _ in range(10)]

    def slow(transfer: Any, group: int, block: int, full_since: float) -> Any:
        first = [plane.copy() for plane in read_block(transfer, group, block, full_since)]
        if len(copied) % 8 == 0:  # until other tokens are in the block
            seen = len(asked)
            eventually(lambda: len(asked) in (*range(seen + 3, 99), len(prompts)), 60)
        copied.append(block)
        return [*first[:1], *read_block(transfer, group, block, full_since)[1:]]  # old keys and new values

    monkeypatch.setattr(host_tier.DeviceBlockTransfer, "read_block", slow)
    oracle = large_core(models)
    right = [ask(oracle, prompt, 4) for prompt in prompts]
    given = {**small(models["llama"]), "kv_host_memory": None}
    with keeping(models["llama"], tmp_path, **given) as core:
        for prompt in prompts:
            ask(core, prompt, 4)
            asked.append(1)
        assert stats(core).lost_blocks > 0
    monkeypatch.setattr(host_tier.DeviceBlockTransfer, "read_block", read_block)
    with keeping(models["llama"], tmp_path, **given) as core:
        assert all(same_bits(ask(core, prompt, 4), wanted) for prompt, wanted in zip(prompts, right, strict=True))


@pytest.mark.slow
def test_passages_are_restored_at_any_offset_within_their_scope(small_core: MakeCore) -> None:
    document, core = tokens(70), small_core(deterministic=False, max_num_batched_tokens=40)
    source, moved = [*tokens(7), *document, *tokens(4)], [*tokens(19), *document, *tokens(6)]
    ask(core, source, reuse=NonPrefixReuseParams(0, scope="me"))
    evict(core)
    assert cached(ask(core, moved, reuse=NonPrefixReuseParams(32, scope="you"))) == 0
    evict(core)
    again = ask(core, [*tokens(5), *moved], reuse=NonPrefixReuseParams(32, scope="me"))
    assert cached(again) >= 70 and stats(core).host_read_blocks >= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_host_memory": 1000}, "`cache.host_memory` is 0.0 MiB, and 64 blocks of this model take .*: raise it"),
        ({"kv_host_memory": 0}, "`cache.host_memory` must be at least 1"),
        ({"kv_host_memory": 1 << 60}, "GiB of main memory are free: lower it"),
        (
            {"kv_host_memory": 1 << 20, "prefix_caching": False},
            "`cache.host_memory` stores shared beginnings of prompts",
        ),
    ],
)
def test_host_memory_that_does_not_fit_is_refused(options: dict[str, Any], message: str, models: Models) -> None:
    with pytest.raises(LoadError, match=message):
        make_core(models["llama"], **options)


def test_host_memory_that_the_system_refuses(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")

    monkeypatch.setattr(PlayedCopies, "host_memory", refuse)
    message = r"`cache.host_memory`: the system does not provide .* OS call failed .*: lower it"
    with pytest.raises(LoadError, match=message):
        make_core(models["llama"], kv_host_memory=1 << 20)
