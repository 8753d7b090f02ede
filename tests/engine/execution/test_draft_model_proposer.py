"""Draft model: it changes only the number of steps. The oracle is the same engine without it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import greedy, make_core, run
from helpers.every_request import DEMO, prompt, run_checked, same, small_models, traffic
from helpers.marks import slow_after, slow_but
from helpers.tiny_models import make_model

from windlass.engine.cache.cache_operations import LoadedBlock, SwappedPages
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling.scheduler_output import SchedulerOutput

VOCAB = 128
DirectoryOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> DirectoryOf:
    return small_models(tmp_path_factory)


def every_kind() -> list[EngineRequest]:
    """Requests with every option that changes the next token or ends a sample, and with their own scalings."""
    yarn = RopeScaling.from_dict({"rope_type": "yarn", "factor": 4.0})
    dynamic = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2.0})
    updates = [("rotate", 12), ("recompute", 15)]
    return [
        *traffic(),
        greedy("yarn", prompt(31, 48), 30, rope_scaling=yarn),
        *(greedy(kind, prompt(n, 40 + n), 60, rope_scaling=dynamic, rope_update=kind) for kind, n in updates),
    ]


def with_draft(directory: Path, draft: Path, **options: Any) -> EngineCore:
    return make_core(directory, **{"speculative_model": str(draft), "speculative_adaptive": False, **options})


def both(
    directory: Path, draft: Path, sent: Callable[[], list[EngineRequest]], drafting: dict[str, Any], **options: Any
) -> EngineCore:
    """Compare an engine that drafts with one that does not, with consistency checks after every step; return the former."""
    want = run(make_core(directory, **options), sent())
    core = with_draft(directory, draft, **drafting, **options)
    same(run_checked(core, sent()), want)
    return core


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("model", "draft", "drafting", "options"),
    slow_after(
        3,
        [
            ("llama", "llama", {}, {}),
            ("llama", "qwen3", {"speculative_tokens": 3}, {}),  # other weights, norms and shapes
            ("llama", "llama", {"speculative_ngram": 3, "speculative_ngram_min": 1}, {"deterministic": True}),
            ("llama", "llama", {"speculative_adaptive": True}, {}),
            ("llama", "llama", {"speculative_model_quantization": "int4"}, {"max_num_batched_tokens": 16}),
            ("qwen3", "llama", {}, {"prefix_caching": False, "max_num_seqs": 3}),
            ("llama", "llama", {"speculative_tokens": 16}, {"deterministic": True, "kv_cache_dtype": "int8"}),
            ("llama_bias", "llama", {}, {"deterministic": True, "quantization": "int8"}),
        ],
    ),
)
def test_a_draft_model_changes_no_result(
    model: str, draft: str, drafting: dict[str, Any], options: dict[str, Any], directory_of: DirectoryOf
) -> None:
    core = both(directory_of(model), directory_of(draft), every_kind, drafting, max_model_len=160, **options)
    stats = core.stats()
    assert stats.spec_decode_model_num_draft_tokens > 50
    if model == draft and not drafting.get("speculative_model_quantization"):
        assert stats.spec_decode_model_num_accepted_tokens > 100


@pytest.mark.parametrize("length", slow_after(2, [1, 16, 15, 17, 40]))
def test_all_proposals_of_the_same_model_are_accepted(length: int, directory_of: DirectoryOf) -> None:
    core = with_draft(directory_of("llama"), directory_of("llama"), deterministic=True, max_model_len=160)
    (got,) = run(core, [greedy("x", prompt(1, length), 41)]).values()
    stats = core.stats()
    # One token comes with the prompt, then five with every step.
    assert len(got.token_ids) == 41 and stats.num_steps == 1 + 8
    assert stats.spec_decode_model_num_accepted_tokens == stats.spec_decode_model_num_draft_tokens == 32
    # The draft model computes every token once, except the last two, which are missing when the sequence ends.
    assert core.runner.proposer.positions_computed == length + 41 - 2


def test_a_cached_prefix_has_keys_of_the_draft_model(directory_of: DirectoryOf) -> None:
    core = with_draft(directory_of("llama"), directory_of("llama"), deterministic=True, max_model_len=160)
    text = prompt(3, 60)
    run(core, [greedy("first", text, 1)])
    before = core.stats()
    run(core, [greedy("second", [*text[:50], 9, 8], 21), greedy("third", [*text[:40], 5], 21, n=2)])
    after = core.stats()
    assert after.prefix_cache_hits > 0
    accepted = after.spec_decode_model_num_accepted_tokens - before.spec_decode_model_num_accepted_tokens
    assert accepted == after.spec_decode_model_num_draft_tokens - before.spec_decode_model_num_draft_tokens > 20


@pytest.mark.parametrize(
    "rope", slow_after(1, [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 3.0}])
)
def test_the_draft_model_uses_the_scaling_of_the_request(rope: dict[str, Any], directory_of: DirectoryOf) -> None:
    core = with_draft(directory_of("llama"), directory_of("llama"), deterministic=True, max_model_len=160)
    run(core, [greedy("x", prompt(1, 70), 41, rope_scaling=RopeScaling.from_dict(rope)), greedy("y", prompt(2, 9), 41)])
    stats = core.stats()
    assert stats.spec_decode_model_num_accepted_tokens == stats.spec_decode_model_num_draft_tokens > 40


@pytest.mark.parametrize("update", slow_but(["rotate", "recompute"], "rotate"))
def test_keys_of_the_draft_model_are_rerotated(update: str, directory_of: DirectoryOf) -> None:
    core = with_draft(directory_of("llama"), directory_of("llama"), deterministic=True, max_model_len=160)
    for layer in range(core.info.num_layers):  # keys that are read before they are computed change the result
        pages = core.runner.proposer.cache.pages(layer)
        pages.key.fill_(torch.nan), pages.value.fill_(torch.nan)
    dynamic = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2.0})
    run(core, [greedy("x", prompt(1, 50), 90, rope_scaling=dynamic, rope_update=update)])
    stats = core.stats()
    assert stats.key_moves > 0 or stats.recomputed_tokens["rope_update"] > 0
    # A draft token that was missing when the frequencies changed is computed with the new ones.
    assert stats.spec_decode_model_num_accepted_tokens > 0.9 * stats.spec_decode_model_num_draft_tokens > 40


@pytest.mark.parametrize("temperature", slow_after(1, [0.0, 0.5]))
def test_shifted_contexts_with_a_draft_model_give_equal_results(temperature: float, directory_of: DirectoryOf) -> None:
    def sent() -> list[EngineRequest]:
        rule = ContextRule(overflow="shift", keep_tokens=16)
        return [
            greedy(f"{i}", prompt(i, 20 + 9 * i), 150, context=rule, temperature=temperature, seed=i) for i in range(3)
        ]

    directory = directory_of("llama")
    core = both(directory, directory, sent, {}, deterministic=True, max_model_len=64, max_total_tokens=400)
    stats = core.stats()
    assert stats.context_shifts > 5
    least = 0.8 if temperature == 0 else 0.0
    assert stats.spec_decode_model_num_accepted_tokens > least * stats.spec_decode_model_num_draft_tokens
    assert stats.spec_decode_model_num_draft_tokens > 100


def test_preempted_streams_with_a_draft_model_give_equal_results(directory_of: DirectoryOf) -> None:
    def sent() -> list[EngineRequest]:
        rule = ContextRule(overflow="shift", keep_tokens=16)
        return [
            greedy(f"{i}", prompt(i, 12), 80, priority=-i, context=rule if i % 2 else ContextRule()) for i in range(6)
        ]

    directory = directory_of("llama")
    probe = with_draft(directory, directory, max_model_len=64)
    memory = probe.info.kv_bytes_per_token * 16 * 12
    plain = make_core(directory).info.kv_bytes_per_token
    assert probe.info.kv_bytes_per_token == 2 * plain
    want = run(make_core(directory, deterministic=True, max_model_len=64, max_total_tokens=200), sent())
    core = with_draft(
        directory, directory, deterministic=True, max_model_len=64, max_total_tokens=200, kv_cache_memory=memory
    )
    assert core.info.num_kv_blocks == (12,) and core.info.kv_cache_bytes == memory
    same(run(core, sent()), want)
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.spec_decode_model_num_accepted_tokens > 0.8 * stats.spec_decode_model_num_draft_tokens > 100


def test_blocks_are_swapped_out_before_they_are_loaded_into(tmp_path: Path, directory_of: DirectoryOf) -> None:
    """A plan may swap out a block and load a file into it, also in the cache of the draft model."""
    core = with_draft(directory_of("llama"), directory_of("llama"), kv_persist=str(tmp_path))
    store, proposer = core._store, core.runner.proposer
    planes = [plane for cache in (core.runner.cache, proposer.cache) for plane in cache.planes[0] if plane.numel()]
    for plane in planes:
        plane[:, 3] = 1.0
    held = store.transfer.read_block(0, 3, time.monotonic())
    for plane in planes:
        plane[:, 3] = 2.0
    ticket = store.transfer.stage(0, tuple(plane.copy() for plane in held), lambda: False)
    first = core.runner.input_batch.step + 1
    loaded = (LoadedBlock(group=0, block=3, ticket=ticket),)
    core.runner.apply(SchedulerOutput(first, swapped_out=(SwappedPages(7, ((3,),)),), loaded=loaded))
    core.runner.apply(SchedulerOutput(first + 1, swapped_in=(SwappedPages(7, ((5,),)),)))
    assert len(planes) == 4
    assert all((plane[:, 3] == 1.0).all() and (plane[:, 5] == 2.0).all() for plane in planes)
    core.close()


def test_aborted_requests_do_not_affect_others(directory_of: DirectoryOf) -> None:
    directory = directory_of("llama")
    want = run(make_core(directory, deterministic=True), [greedy("stays", prompt(1, 20), 60)])
    core = with_draft(directory, directory, deterministic=True)
    core.add(greedy("goes", prompt(2, 30), 60))
    core.add(greedy("ends", prompt(4, 30), 60, n=3))
    for _ in range(4):
        core.step()
    core.add(greedy("late", prompt(3, 5), 60))
    core.abort("goes")
    core.end_sample("ends", 1)
    core.step()
    core.abort("ends")
    core.abort("late")
    same(run(core, [greedy("stays", prompt(1, 20), 60)]), want)
    assert core.runner.proposer is not None and not core.runner.proposer.progress and len(core.runner.input_batch) == 0


def test_draft_models_of_another_vocabulary_size(tmp_path: Path, directory_of: DirectoryOf) -> None:
    def sent() -> list[EngineRequest]:
        return [greedy("x", prompt(1, 20), 40), greedy("y", prompt(2, 30), 40, temperature=1.0, seed=3)]

    tokens = {f"t{i}": i for i in range(96)}
    found = []
    for size in (96, VOCAB):
        directory = make_model("llama", tmp_path / str(size), vocab_size=size, max_position_embeddings=64)
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added": size}))
        found.append(directory)
    small, large = found
    both(large, small, sent, {}, deterministic=True)
    want = run(make_core(small), [greedy("x", [5, 6, 7], 40)])
    same(run(with_draft(small, large), [greedy("x", [5, 6, 7], 40)]), want)


def test_incompatible_draft_models_are_refused(tmp_path: Path, directory_of: DirectoryOf) -> None:
    llama = directory_of("llama")
    for model, draft, message in (
        ("gemma3", "llama", "the model has layers with a sliding window"),
        ("llama", "gemma3", "the draft model has layers with a sliding window"),
        (
            "llama",
            "lfm2",
            r"the draft model is a Lfm2.*, which has recurrent layers, and the model \(Llama.*\) has none",
        ),
    ):
        with pytest.raises(LoadError, match=message):
            with_draft(directory_of(model), directory_of(draft))
    with pytest.raises(LoadError, match=r"the draft model: .*nowhere.config.json does not exist"):
        with_draft(llama, tmp_path / "nowhere")
    with pytest.raises(LoadError, match=r"a vocabulary of .* tokens, the model one of 128"):
        with_draft(llama, make_model("llama", tmp_path / "other", vocab_size=96))
    with pytest.raises(LoadError, match=r"speculation\.quantization=int3"):
        with_draft(llama, llama, speculative_model_quantization="int3")

    pair = [tmp_path / "one", tmp_path / "two"]
    for directory, names in zip(pair, ("abcd", "abdc"), strict=True):
        shutil.copytree(llama, directory)
        vocabulary = {name: i for i, name in enumerate(names)}
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    with pytest.raises(LoadError, match=r"another tokenizer .*token 2 is 'c' here, 'd' there"):
        with_draft(*pair)
    with_draft(pair[0], pair[0])


def test_model_info_describes_the_draft_model() -> None:
    core = with_draft(DEMO, DEMO, speculative_model_quantization="int8", speculative_tokens=3)
    draft = core.info.draft_model
    assert draft is not None and draft.num_tokens == 3 and draft.path == str(DEMO)
    assert draft.quantization is not None and draft.quantization.startswith("int8") and core.info.quantization is None
    assert make_core(DEMO).info.draft_model is None
    assert core.info.fingerprint == make_core(DEMO).info.fingerprint  # logits do not depend on it
