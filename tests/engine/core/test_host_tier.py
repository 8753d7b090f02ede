"""Blocks of a device that come back from the host's memory, and from files: the bits of a run that never lost them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.persisting import keeping, written
from engine_helpers.played_engines import graphed, played_device
from helpers.engines import Finished, greedy, make_core, run
from helpers.eventually import eventually
from helpers.marks import slow_but
from helpers.played_copies import PlayedCopies
from helpers.tiny_models import make_model

from windlass.engine.cache import host_tier
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.outputs import PersistStats
from windlass.engine.rotary.rope_scaling import RopeScaling

__all__ = ["played_device"]
_NUMBERS = random.Random(5)
_BLOCKS = 20  # of each KV group on the device


def tokens(count: int) -> list[int]:
    return [_NUMBERS.randrange(3, 128) for _ in range(count)]


PROMPT = tokens(103)
FULL = 96  # tokens of its whole blocks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of no more layers than show one for another: the device is played row by row."""
    two: dict[str, Any] = {"num_hidden_layers": 2}
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    families = {
        "llama": two,
        "gemma3": {**two, **kinds},
        "smollm3": two,
        "deepseek_v3": {**two, "first_k_dense_replace": 1},
    }
    return {name: make_model(name, tmp_path_factory.mktemp(name), **sizes) for name, sizes in families.items()}


_SIZES: dict[str, int] = {}


def block_bytes(model: Path, **options: Any) -> int:
    """Of all KV groups."""
    asked = repr((model, options))
    if asked not in _SIZES:
        info = make_core(model, **options).info
        _SIZES[asked] = info.kv_bytes_per_token * info.block_size
    return _SIZES[asked]


def small(model: Path, blocks: int = _BLOCKS, host: int = 200, **options: Any) -> dict[str, Any]:
    """Options of an engine with these numbers of blocks on the device and in host memory."""
    size = block_bytes(model, **options)
    sizes: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 2, "deterministic": True}
    return {**sizes, "kv_cache_memory": blocks * size, "kv_host_memory": host * size, **options}


def ask(core: EngineCore, prompt: list[int] = PROMPT, max_tokens: int = 12, **fields: Any) -> Finished:
    return run(core, [greedy("a", prompt, max_tokens, **fields)], every_logit=False)["a", 0]


def cached(got: Finished) -> int:
    return got.outputs[-1].cached_tokens


def same(one: Finished, other: Finished) -> bool:
    return one.token_ids == other.token_ids and all(
        torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True)
    )


def push_out(core: EngineCore, times: int = 4) -> None:
    """Have the cache of the device filled with other texts."""
    for _ in range(times):
        ask(core, tokens(150), 1)


def stats(core: EngineCore) -> PersistStats:
    return core.stats().persist


@pytest.fixture
def ended() -> Iterator[list[EngineCore]]:
    """Engines that are closed behind a test."""
    cores: list[EngineCore] = []
    yield cores
    for core in cores:
        core.close()


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("llama", {}, {}),
    "bfloat16": ("llama", {"kv_cache_dtype": "bfloat16"}, {}),
    "int8": ("llama", {"kv_cache_dtype": "int8"}, {}),
    "windows": ("gemma3", {}, {}),
    "windows, int8": ("gemma3", {"kv_cache_dtype": "int8"}, {}),
    "layers without rotation": ("smollm3", {}, {}),
    "latent": ("deepseek_v3", {}, {}),
    "latent, int8": ("deepseek_v3", {"kv_cache_dtype": "int8"}, {}),
    "larger blocks": ("llama", {"block_size": 32}, {}),
    "salt": ("llama", {}, {"cache_salt": "one"}),
    "scaling": ("llama", {}, {"rope_scaling": RopeScaling.from_dict({"rope_type": "yarn", "factor": 4})}),
    "window of the request": ("llama", {}, {"context": ContextRule(attention_window=40, attention_sinks=4)}),
    "drafting": ("llama", {"speculative_model": "itself", "speculative_adaptive": False}, {}),
}


@pytest.mark.parametrize("kind", slow_but(KINDS, "float32", "windows, int8", "latent", "scaling", "drafting"))
def test_the_same_bits_from_the_host_and_from_files(
    kind: str, models: dict[str, Path], tmp_path: Path, ended: list[EngineCore]
) -> None:
    family, options, fields = KINDS[kind]
    model = models[family]
    options = {name: str(model) if value == "itself" else value for name, value in options.items()}
    right = ask(make_core(model, deterministic=True, **options), **fields)
    given = small(model, 60 if family == "gemma3" else _BLOCKS, **options)
    with keeping(model, tmp_path, **given) as core:
        first = ask(core, **fields)
        push_out(core, 8 if family == "gemma3" else 5)
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
        assert kind == "drafting" or same(got, right)


@pytest.mark.slow
def test_texts_at_random_over_little_memory(models: dict[str, Path], ended: list[EngineCore]) -> None:
    """Several streams, prefixes in common, blocks that go and come at every step."""
    plenty = make_core(models["llama"], deterministic=True, kv_cache_memory=64 << 20)
    core = make_core(models["llama"], **small(models["llama"], 24, 64, max_num_seqs=4, max_num_batched_tokens=48))
    ended += [plenty, core]
    heads = [tokens(64) for _ in range(7)]
    for turn in range(20):
        sent = [
            greedy(f"{turn} {i}", [*_NUMBERS.choice(heads), *tokens(_NUMBERS.randrange(1, 30))], 20) for i in range(3)
        ]
        got, right = (run(one, sent, every_logit=False) for one in (core, plenty))
        assert {key: one.token_ids for key, one in got.items()} == {key: one.token_ids for key, one in right.items()}
    said = stats(core)
    assert said.host_read_blocks > 20 and said.host_evicted_blocks > 20 and said.host_blocks <= 64
    assert said.restored_tokens > 300 and said.host_bytes == said.host_blocks * block_bytes(models["llama"])


@pytest.mark.parametrize("burst_seconds", [0.0, 1.0], ids=["a pass a step", "bursts"])
def test_steps_under_way_evict_too(burst_seconds: float, models: dict[str, Path], ended: list[EngineCore]) -> None:
    """Captured steps that are planned before the one before them is over take blocks that others were cached in."""
    given = small(models["llama"], 24, 100, deterministic=False, burst_seconds=burst_seconds, max_num_seqs=3)
    core, device = graphed(models["llama"], **given)
    plenty = make_core(models["llama"], kv_cache_memory=64 << 20)
    ended += [plenty, core]
    start, ahead = core.runner.start, list[int]()

    def watched(plan: Any) -> Any:
        ahead.append(len(plan.saved) if plan.num_inflight_passes else 0)
        return start(plan)

    core.runner.start = watched  # type: ignore[method-assign]
    pairs = [[greedy(f"{i}", [*tokens(70), i], 40) for i in range(2)] for _ in range(3)]
    sent = [*pairs, *pairs[:2]]
    for requests in sent:
        got, right = (run(one, requests, every_logit=False) for one in (core, plenty))
        assert {key: one.token_ids for key, one in got.items()} == {key: one.token_ids for key, one in right.items()}
    assert sum(ahead) > 5 and device.replays > 50
    assert stats(core).host_read_blocks > 4 and stats(core).host_lost_blocks == 0


def test_a_step_that_evicts_more_than_there_are_rows_for(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, ended: list[EngineCore]
) -> None:
    """Rows are taken again once what was in them has gone; so where little comes back at once."""
    size = block_bytes(models["llama"])
    monkeypatch.setattr(host_tier, "_OUTGOING_BYTES", 2 * size)
    monkeypatch.setattr(host_tier, "_INCOMING_BYTES", 4 * size)
    core = make_core(models["llama"], **small(models["llama"]))
    ended.append(core)
    right = ask(core)
    push_out(core)
    again = ask(core)
    assert same(again, right) and cached(again) == FULL
    assert stats(core).host_saved_blocks > 20 and stats(core).host_read_blocks == FULL // 16


def test_streams_that_gave_up_their_places_come_back_by_copies(
    models: dict[str, Path], ended: list[EngineCore]
) -> None:
    """What they had computed is not computed again, but for what ended within a block."""
    core = make_core(models["llama"], **small(models["llama"], 14, 64, max_num_seqs=3))
    plenty = make_core(models["llama"], deterministic=True, kv_cache_memory=64 << 20)
    ended += [plenty, core]
    sent = [greedy(f"{i}", tokens(40), 60) for i in range(3)]
    got, right = (run(one, sent, every_logit=False) for one in (core, plenty))
    assert {key: one.token_ids for key, one in got.items()} == {key: one.token_ids for key, one in right.items()}
    said = core.stats()
    assert said.num_preemptions > 0 and said.persist.restored_tokens >= 32
    assert said.recomputed_tokens["preemption"] <= 16 * said.num_preemptions


@pytest.mark.parametrize("at_once", [False, True], ids=["a block a plan", "one plan"])
def test_what_comes_back_evicts_nothing_that_came_with_it(
    at_once: bool, models: dict[str, Path], ended: list[EngineCore]
) -> None:
    """More is requested than fits next to a running stream: the first blocks are restored, to the places that the tables name."""
    core = make_core(models["llama"], **small(models["llama"], 24, max_model_len=320, max_num_seqs=3))
    plenty = make_core(models["llama"], deterministic=True, kv_cache_memory=64 << 20)
    ended += [plenty, core]
    ask(core, PROMPT, 1)
    push_out(core, 6)
    start, loaded = core.runner.start, list[list[tuple[int, int]]]()

    def watched(plan: Any) -> Any:
        if plan.loaded:
            loaded.append([(one.group, one.block) for one in plan.loaded])
        return start(plan)

    core.runner.start = watched  # type: ignore[method-assign]
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
        core._store.transfer.load_budget_streaming = 1  # type: ignore[union-attr]
    while restoring.fetches:
        core.step()
    assert len(loaded) == 1 if at_once else len(loaded) > 1
    assert all(len(set(blocks)) == len(blocks) for blocks in loaded)
    assert stats(core).restored_tokens == 16 * sum(map(len, loaded)) > 16
    core.abort("waiting")
    for last in (5, 6):
        got, right = (ask(one, [*PROMPT, last], 8) for one in (core, plenty))
        assert got.token_ids == right.token_ids


def test_the_longest_unused_goes_first(models: dict[str, Path], ended: list[EngineCore]) -> None:
    core = make_core(models["llama"], **small(models["llama"], host=64))
    ended.append(core)
    often, once = tokens(103), tokens(103)
    ask(core, once)
    ask(core, often)
    for _ in range(8):
        push_out(core, 2)
        assert cached(ask(core, often)) == FULL
    assert cached(ask(core, once)) == 0
    assert stats(core).host_blocks <= 64 and stats(core).host_evicted_blocks > 0


def test_no_memory_for_a_copy_loses_the_blocks_and_nothing_else(
    models: dict[str, Path], ended: list[EngineCore], caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(models["llama"], **small(models["llama"]))
    ended.append(core)
    backend: Any = core.runner.decoder.backend
    copies: PlayedCopies = backend.copies
    right = ask(core)

    def refuse() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    copies.before_ask = refuse
    push_out(core)
    lost = stats(core).host_lost_blocks
    assert lost > 20 and stats(core).host_blocks == 0 and len(caplog.records) == 1
    copies.before_ask = lambda: None
    again = ask(core)
    assert same(again, right) and cached(again) == 0
    push_out(core)
    again = ask(core)
    assert same(again, right) and cached(again) == FULL and stats(core).host_lost_blocks == lost


def test_what_does_not_come_back_is_computed(models: dict[str, Path], ended: list[EngineCore]) -> None:
    """And what the reader had taken for it is free again."""
    core = make_core(models["llama"], **small(models["llama"]))
    ended.append(core)
    backend: Any = core.runner.decoder.backend
    right = ask(core)
    push_out(core)

    def refuse() -> None:
        backend.copies.before_ask = lambda: None
        raise torch.OutOfMemoryError("CUDA out of memory")

    backend.copies.before_ask = refuse
    again = ask(core)
    assert same(again, right) and cached(again) == 0
    pages: Any = core._store.transfer  # type: ignore[union-attr]
    eventually(lambda: len(pages._free) == len(pages._incoming) and pages._staged == {}, 30)
    push_out(core)
    assert cached(ask(core)) == FULL


def test_requests_that_end_while_blocks_come_leave_nothing(models: dict[str, Path], ended: list[EngineCore]) -> None:
    core = make_core(models["llama"], **small(models["llama"]))
    ended.append(core)
    right = ask(core)
    push_out(core)
    for number in range(5):
        core.add(greedy(str(number), PROMPT, 12))
        core.step()
        core.abort(str(number))
    pages: Any = core._store.transfer  # type: ignore[union-attr]
    eventually(lambda: len(pages._free) == len(pages._incoming) and pages._staged == {}, 30)
    assert same(ask(core), right)


def test_what_is_evicted_before_it_is_written_is_written_from_the_host(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read_block = threading.Event(), host_tier.DeviceBlockTransfer.read_block

    def waiting(pages: Any, *given: Any) -> Any:
        gate.wait(60)
        return read_block(pages, *given)

    monkeypatch.setattr(host_tier.DeviceBlockTransfer, "read_block", waiting)
    given = small(models["llama"])
    with keeping(models["llama"], tmp_path, **given) as core:
        right = ask(core)
        push_out(core)
        assert stats(core).waiting_blocks > 20 and stats(core).lost_blocks == 0
        gate.set()
        written(core)
        assert stats(core).lost_blocks == 0
    with keeping(models["llama"], tmp_path, **given) as core:
        again = ask(core)
        assert same(again, right) and cached(again) == FULL and stats(core).host_read_blocks == 0


def test_a_block_that_is_evicted_while_it_is_copied_to_a_file(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without free host memory the file is not written, since the copied bytes are unknown."""
    read_block, copied, asked = host_tier.DeviceBlockTransfer.read_block, list[int](), list[int]()
    prompts = [tokens(130) for _ in range(10)]

    def slow(pages: Any, group: int, block: int, full_since: float) -> Any:
        first = [plane.copy() for plane in read_block(pages, group, block, full_since)]
        if len(copied) % 8 == 0:  # until others are where it was
            seen = len(asked)
            eventually(lambda: len(asked) in (*range(seen + 3, 99), len(prompts)), 60)
        copied.append(block)
        return [*first[:1], *read_block(pages, group, block, full_since)[1:]]  # keys of before, values of behind

    monkeypatch.setattr(host_tier.DeviceBlockTransfer, "read_block", slow)
    plenty = make_core(models["llama"], deterministic=True, kv_cache_memory=64 << 20)
    right = [ask(plenty, prompt, 4) for prompt in prompts]
    given = {**small(models["llama"]), "kv_host_memory": None}
    with keeping(models["llama"], tmp_path, **given) as core:
        for prompt in prompts:
            ask(core, prompt, 4)
            asked.append(1)
        assert stats(core).lost_blocks > 0
    monkeypatch.setattr(host_tier.DeviceBlockTransfer, "read_block", read_block)
    with keeping(models["llama"], tmp_path, **given) as core:
        assert all(same(ask(core, prompt, 4), wanted) for prompt, wanted in zip(prompts, right, strict=True))


def test_passages_come_back_from_the_host(models: dict[str, Path], ended: list[EngineCore]) -> None:
    """At any offset, and only within their scope."""
    document = tokens(70)
    given = small(models["llama"], deterministic=False, max_num_batched_tokens=40)
    core = make_core(models["llama"], **given)
    ended.append(core)
    source, turned = [*tokens(7), *document, *tokens(4)], [*tokens(19), *document, *tokens(6)]
    ask(core, source, reuse=NonPrefixReuseParams(0, scope="me"))
    push_out(core)
    assert cached(ask(core, turned, reuse=NonPrefixReuseParams(32, scope="you"))) == 0
    push_out(core)
    again = ask(core, [*tokens(5), *turned], reuse=NonPrefixReuseParams(32, scope="me"))
    assert cached(again) >= 70 and stats(core).host_read_blocks >= 4


REFUSED = [
    ({"kv_host_memory": 1000}, "`cache.host_memory` is 0.0 MiB, and 64 blocks of this model take .*: raise it"),
    ({"kv_host_memory": 0}, "`cache.host_memory` must be at least 1"),
    ({"kv_host_memory": 1 << 60}, "GiB of main memory are free: lower it"),
    ({"kv_host_memory": 1 << 20, "prefix_caching": False}, "`cache.host_memory` keeps what prompts share"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_do_not_fit(options: dict[str, Any], message: str, models: dict[str, Path]) -> None:
    with pytest.raises(LoadError, match=message):
        make_core(models["llama"], **options)


def test_main_memory_that_the_system_does_not_give(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")

    monkeypatch.setattr(PlayedCopies, "host_memory", refuse)
    with pytest.raises(
        LoadError, match=r"`cache.host_memory`: the system does not provide .* OS call failed .*: lower it"
    ):
        make_core(models["llama"], kv_host_memory=1 << 20)
