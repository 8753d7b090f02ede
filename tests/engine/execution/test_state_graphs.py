"""Captured decode steps of models with recurrent states on a simulated device; the oracle is the same engine without graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_helpers.played_engines import graphed, played_device
from helpers.engines import greedy, make_core, run
from helpers.every_request import prompt, run_checked, same, traffic
from helpers.little_memory import fail_ahead
from helpers.marks import slow_but
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest
from windlass.engine.scheduling import async_scheduling

__all__ = ["played_device"]
OPTIONS: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 4}
FAMILIES = ["qwen3_5", "lfm2", "granite4_h", "falcon_h1"]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def compared(directory: Path, *sent: list[EngineRequest], **options: Any) -> EngineCore:
    """An engine that has answered these lists in turn, with the tokens and logits of one without graphs."""
    options = {**OPTIONS, **options}
    plain = make_core(directory, cuda_graphs=False, **options)
    core, _ = graphed(directory, **options)
    for requests in sent:
        same(run_checked(core, requests, every_logit=False), run(plain, requests, every_logit=False), 0.0)
    return core


def replayed(core: EngineCore) -> int:
    assert core.runner.graphs is not None
    return core.runner.graphs.num_replayed


@pytest.mark.parametrize("family", slow_but(FAMILIES, "lfm2", "granite4_h"))
def test_every_kind_of_request(family: str, directory_of: Callable[[str], Path]) -> None:
    """Streams start and end, so that captured steps have empty rows; later requests find cached prefixes."""
    assert replayed(compared(directory_of(family), traffic())) > 60


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen3_5"))
def test_what_ends_a_block_ahead_is_found_later(family: str, directory_of: Callable[[str], Path]) -> None:
    """Two streams fill blocks at different times, in steps after which the next have been started; then both texts continue."""
    core, device = graphed(directory_of(family), **OPTIONS)
    first = [greedy("a", prompt(1, 21), 60), greedy("b", prompt(2, 30), 60)]
    found = run_checked(core, first, every_logit=False)
    steps, waits = core.stats().num_steps, len(set(device.waits))
    assert replayed(core) >= 59 and waits < steps + 3  # the host waits once for each, while it submits the next one
    later = [
        replace(one, request_id=f"{one.request_id}+", prompt_token_ids=text + tuple(prompt(3, 5)))
        for one in first
        for text in [tuple(one.prompt_token_ids) + tuple(found[one.request_id, 0].token_ids)]
    ]
    got = run_checked(core, later, every_logit=False)
    plain = run(make_core(directory_of(family), cuda_graphs=False, prefix_caching=False, **OPTIONS), later)
    same(got, plain, 0.0)
    # 21 + 60 and 30 + 60 tokens, the last of which was sampled and not computed.
    assert [got[name, 0].outputs[-1].cached_tokens for name in ("a+", "b+")] == [80, 80]


def test_a_stream_that_ends_beside_one_that_goes_on(directory_of: Callable[[str], Path]) -> None:
    """One surplus step is computed, which changes a state that no sequence uses any more."""
    ends = greedy("a", prompt(5, 12), 40, temperature=1.0, seed=3)
    token_ids = run(make_core(directory_of("lfm2"), cuda_graphs=False, **OPTIONS), [ends])["a", 0].token_ids
    last = next(i for i, token in enumerate(token_ids) if i >= 19 and token not in token_ids[:i])
    ends = replace(ends, sampling=replace(ends.sampling, stop_token_ids=(token_ids[last],)))
    again = greedy("again", [*prompt(5, 12), *token_ids[:last], 7], 9)
    core = compared(directory_of("lfm2"), [ends, greedy("b", prompt(6, 14), 70)], [again])
    assert replayed(core) > 60


@pytest.mark.parametrize("family", slow_but(["qwen3_5", "lfm2"], "lfm2"))
def test_contexts_that_shift_and_windows(family: str, directory_of: Callable[[str], Path]) -> None:
    sent = [
        greedy("shift", prompt(1, 40), 60, context=ContextRule("shift", keep_tokens=16)),
        greedy("plain", prompt(2, 9), 35),
        greedy("window", prompt(6, 30), 35, context=ContextRule(attention_window=16, attention_sinks=2)),
    ]
    core = compared(directory_of(family), sent, sent, shift_context=48)
    assert core.scheduler.counters.context_shifts >= 4 and replayed(core) > 100


def test_little_memory(directory_of: Callable[[str], Path]) -> None:
    """Preempted streams restart, and no state block is free for a snapshot."""
    core = make_core(directory_of("lfm2"), cuda_graphs=False, **OPTIONS)
    one = core.info.state_bytes + 6 * 16 * core.info.kv_bytes_per_token
    sent = [greedy(f"{i}", prompt(i, 20 + i), 50) for i in range(4)]
    core = compared(directory_of("lfm2"), sent, kv_cache_memory=int(2.4 * one))
    assert core.stats().num_preemptions and replayed(core) > 50


@pytest.mark.parametrize("family", slow_but(FAMILIES, "granite4_h"))
def test_proposed_tokens(family: str, directory_of: Callable[[str], Path]) -> None:
    """The states after them are stored until it is known which are accepted."""
    sent = [greedy(f"{i}", prompt(i, 24, period=5), 40, temperature=0.35 * i, seed=i) for i in range(4)]
    core = compared(directory_of(family), sent, speculative_ngram=3)
    stats = core.stats()
    assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens and replayed(core) > 15


def test_steps_ahead_that_find_no_memory(directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not they have changed a state before."""
    monkeypatch.setattr(async_scheduling, "FIRST_PAUSE", 0)
    sent = [greedy(f"{i}", prompt(i, 20 + i), 60, temperature=0.5 * i, seed=i) for i in range(3)]
    want = run(make_core(directory_of("lfm2"), cuda_graphs=False, **OPTIONS), sent, every_logit=False)
    core, _ = graphed(directory_of("lfm2"), **OPTIONS)
    failed = fail_ahead(core, monkeypatch, every=3)
    same(run_checked(core, sent, every_logit=False), want, 0.0)
    assert set(failed) == {0, 1, 2, 3, 4} and core.stats().num_preemptions


def test_a_state_that_a_step_ahead_has_changed_in_vain(
    directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streams fill blocks in one step with one free state block: the prefix of only one is found again."""
    monkeypatch.setattr(async_scheduling, "FIRST_PAUSE", 0)
    sent = [greedy(f"{i}", prompt(i, 20), 50, temperature=1.0, seed=i) for i in range(2)]
    options = {**OPTIONS, "max_num_seqs": 2}
    want = run(make_core(directory_of("qwen3_5"), cuda_graphs=False, **options), sent, every_logit=False)
    info = make_core(directory_of("qwen3_5"), **options).info
    memory = 3 * info.state_bytes + 10 * 16 * info.kv_bytes_per_token
    core, _ = graphed(directory_of("qwen3_5"), kv_cache_memory=memory, **options)
    assert core.blocks.available()[-1] == 3
    failed = fail_ahead(
        core, monkeypatch, every=1, calls=5
    )  # after a step that the device is computing, in a new block
    same(run_checked(core, sent, every_logit=False), want, 0.0)
    assert failed and core.stats().num_preemptions


def test_no_step_waits_for_states(directory_of: Callable[[str], Path]) -> None:
    """No captured work makes the host wait, nor does any copy of a state."""
    core, device = graphed(directory_of("qwen3_5"), prefix_caching=True, **OPTIONS)
    run(core, [greedy("a", prompt(1, 15), 50)], every_logit=False)
    assert len(set(device.waits)) <= core.stats().num_steps + 1
