"""Speculative decoding changes only the number of steps: the oracle is the same engine without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.fake_executor import FakeRotation, add, make_request, make_scheduler
from helpers.cache_invariants import assert_balanced, assert_consistent
from helpers.configs import engine_config
from helpers.engines import greedy, make_core, run
from helpers.every_request import DEMO, Results, prompt, run_checked, same, small_models, traffic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.engine_benchmark import run_engine_benchmark
from windlass.engine.errors import EngineError, LoadError
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.sampling.acceptance import SamplingRequest, sample_and_accept
from windlass.engine.sampling.sample_slot import ExtendedTokens, SampleSlot
from windlass.engine.sampling.sampler import Sampler
from windlass.engine.scheduling.speculation import DraftLengthController
from windlass.kernels import select_backend


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return small_models(tmp_path_factory)


def both(
    directory: Path, sent: Callable[[], list[EngineRequest]], k: int = 5, **options: Any
) -> tuple[EngineCore, Results, Results]:
    """A speculating engine, its results, and those of an engine without speculation."""
    want = run(make_core(directory, **options), sent())
    core = make_core(directory, speculative_ngram=k, **options)
    return core, run_checked(core, sent()), want


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {}),
        ("gemma3", {}),
        ("mistral", {"max_num_batched_tokens": 16}),
        ("demo", {"max_model_len": 128}),
        ("qwen3", {"prefix_caching": False, "max_num_seqs": 3}),
        # Intermediate rounding may differ after the last digit of a product changes: these need row-independent products.
        ("llama", {"deterministic": True}),
        ("gemma3", {"deterministic": True, "dtype": "bfloat16"}),
        ("qwen2", {"deterministic": True, "kv_cache_dtype": "int8"}),
        ("llama_bias", {"deterministic": True, "quantization": "int8"}),
        ("demo", {"deterministic": True, "quantization": "int4", "max_model_len": 128}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_tokens_equal_those_without_speculation(
    model: str, options: dict[str, Any], directory_of: Callable[[str], Path]
) -> None:
    core, got, want = both(directory_of(model), traffic, **{"max_model_len": 96, **options})
    same(got, want, 0.0 if options.get("deterministic") else 1e-5)
    stats = core.stats()
    assert stats.spec_decode_num_drafts > 10
    assert 10 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens
    assert sum(len(output.token_ids) > 1 for result in got.values() for output in result.outputs) > 3
    assert stats.generation_tokens == sum(len(result.token_ids) for result in got.values())


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("length", "seed", "period"), [(60, 4, 2), (1100, 3, 11)], ids=["row by row", "as a chunk"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
def test_loop_needs_fewer_steps(length: int, seed: int, period: int, deterministic: bool) -> None:
    """More than half of the tokens of a loop are proposed, in short and long contexts."""

    def sent() -> list[EngineRequest]:
        return [greedy("loop", prompt(seed, length, 4000, period), 96, logprobs=2)]

    core, got, want = both(DEMO, sent, max_model_len=1300, deterministic=deterministic)
    same(got, want, 0.0 if deterministic else 1e-5)
    stats = core.stats()
    assert stats.spec_decode_num_accepted_tokens > 48
    replay = core.runner.replay
    if length == 60 and replay.obstacle is None:
        assert replay.num_replayed > 0, "steps with proposals are decode steps and may be repeated"
    assert stats.num_steps == len(want["loop", 0].outputs) - stats.spec_decode_num_accepted_tokens
    assert core.runner.positions_computed == (
        length + 95 + stats.spec_decode_num_draft_tokens - stats.spec_decode_num_accepted_tokens
    )


def test_preempted_speculating_streams_give_equal_tokens(directory_of: Callable[[str], Path]) -> None:
    directory = directory_of("gemma3")
    whole = make_core(directory, max_model_len=96, deterministic=True)
    memory = 9 * whole.info.kv_bytes_per_token * whole.info.block_size
    want = run(whole, traffic())
    core = make_core(
        directory, max_model_len=96, deterministic=True, kv_cache_memory=memory, speculative_ngram=7, block_size=16
    )
    same(run_checked(core, traffic()), want, 0.0)
    stats = core.stats()
    assert stats.num_preemptions > 0 and stats.spec_decode_num_accepted_tokens > 10


SCALINGS = [
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "longrope",
        "factor": 2.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: str(scaling["rope_type"]))
@pytest.mark.parametrize("update", ["frozen", "recompute", "rotate", "exact"])
def test_proposals_end_before_a_frequency_change(
    update: Any, scaling: dict[str, Any], directory_of: Callable[[str], Path]
) -> None:
    """Frequencies change as these texts grow. A token computed with wrong ones would have other logits."""

    def sent() -> list[EngineRequest]:
        return [
            greedy(
                f"{length}",
                prompt(length, length, period=4),
                70,
                rope_scaling=RopeScaling.from_dict(scaling),
                rope_update="recompute" if update == "exact" else update,
                rope_exact=update == "exact",
            )
            for length in (9, 28, 60)
        ]

    directory = directory_of("llama")
    core, got, want = both(directory, sent, max_model_len=160, deterministic=True)
    same(got, want, 0.0)
    stats = core.stats()
    assert stats.spec_decode_num_accepted_tokens > 10
    if update == "rotate":
        assert stats.key_moves > 0
    if update in ("recompute", "exact"):
        assert stats.recomputed_tokens["rope_update"] > 0


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    model=st.sampled_from(["llama", "gemma3", "lfm2", "qwen3_5"]),  # the last two have recurrent states
    budget=st.integers(5, 48),
    blocks=st.integers(9, 40),
    max_num_seqs=st.integers(1, 6),
    k=st.integers(1, 20),
    shortest=st.integers(1, 3),
    int8=st.booleans(),
    requests=st.lists(
        st.fixed_dictionaries(
            {
                "seed": st.integers(0, 5),
                "length": st.integers(1, 50),
                "period": st.sampled_from([None, 1, 2, 7]),
                "max_tokens": st.integers(1, 40),
                "n": st.sampled_from([1, 1, 2]),
                "temperature": st.sampled_from([0.0, 0.0, 0.3]),
                "ignore_eos": st.booleans(),
                "repetition_penalty": st.sampled_from([1.0, 1.0, 1.1]),
                "at_step": st.integers(0, 20),
                "aborted_after": st.sampled_from([None, None, None, 3]),
            }
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_random_traffic_is_bit_identical_to_single_tokens(
    model: str,
    budget: int,
    blocks: int,
    max_num_seqs: int,
    k: int,
    shortest: int,
    int8: bool,
    requests: list[dict[str, Any]],
    directory_of: Callable[[str], Path],
) -> None:
    options: dict[str, Any] = {
        "deterministic": True,
        "max_model_len": 96,
        "kv_cache_dtype": "int8" if int8 else "auto",
    }
    alone = make_core(directory_of(model), **options)
    core = make_core(
        directory_of(model),
        **options,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        kv_cache_memory=blocks * (alone.info.kv_bytes_per_token * 16 + alone.info.state_bytes),
        speculative_ngram=k,
        speculative_ngram_min=shortest,
    )
    sent, arrivals, aborts = {}, {}, {}
    for i, wanted in enumerate(requests):
        at, aborted = wanted.pop("at_step"), wanted.pop("aborted_after")
        tokens = prompt(wanted["seed"], wanted.pop("length"), period=wanted.pop("period"))
        sent[f"{i}"], arrivals[f"{i}"] = greedy(f"{i}", tokens, **wanted), at
        if aborted:
            aborts[f"{i}"] = at + aborted
    got: dict[tuple[str, int], list[int]] = {}
    for step in range(2000):
        for name in (name for name, at in arrivals.items() if at == step):
            core.add(sent[name])
        for name in (name for name, at in aborts.items() if at == step):
            core.abort(name)
        for output in core.step() if core.has_work() else ():
            got.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        assert_consistent(core.blocks, (seq.cache for seq in core.scheduler.live_sequences()))
        if step > 30 and not core.has_work():
            break
    assert not core.has_work()
    assert_balanced(core.blocks)
    for name, request in sent.items():
        for key, result in run(alone, [request]).items():
            found = got.get(key, [])
            assert found == (result.token_ids[: len(found)] if name in aborts else result.token_ids)


def test_proposals_for_a_repeating_stream_are_accepted() -> None:
    scheduler, executor, _ = make_scheduler(speculation=6, block_size=2)
    add(executor, make_request("a", [0, 1, 2, 0, 1, 2], max_tokens=60, seed=2))
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.update(plan, executor.execute(plan))
    counters = scheduler.counters
    assert counters.spec_decode_num_accepted_tokens == executor.num_accepted > 20
    assert counters.num_steps < 45
    assert_balanced(scheduler.blocks)


def test_proposals_use_the_remaining_budget() -> None:
    scheduler, executor, _ = make_scheduler(speculation=8, budget=10)
    add(executor, make_request("stream", [0, 1, 2] * 3, max_tokens=60, seed=2))
    for _ in range(3):
        plan = scheduler.schedule()
        scheduler.update(plan, executor.execute(plan))
    assert any(item.draft for item in plan.sequences)
    add(executor, make_request("prompt", [3] * 30, max_tokens=1))
    for taken in (9, 9, 9, 3):
        plan = scheduler.schedule()
        chunks = {item.seq_id: item.num_tokens for item in plan.sequences if item.num_known_tokens - item.start > 1}
        assert sum(chunks.values()) == taken, "a proposal took a prompt's place"
        assert plan.num_tokens <= 10
        scheduler.update(plan, executor.execute(plan))


def test_proposals_do_not_affect_the_step_timer() -> None:
    scheduler, executor, _ = make_scheduler(speculation=8, target_step_seconds=1.0)
    add(executor, make_request("stream", [0, 1, 2] * 3, max_tokens=60, seed=2))
    plan = scheduler.schedule()
    scheduler.update(plan, executor.execute(plan))
    limits = scheduler.step_limiter.limit(0), scheduler.step_limiter.limit(1)
    while not plan.num_draft_tokens:
        plan = scheduler.schedule()
        results = executor.execute(plan)
        scheduler.observe(plan, 100.0)
        scheduler.update(plan, results)
    assert (scheduler.step_limiter.limit(0), scheduler.step_limiter.limit(1)) == limits


def test_proposals_do_not_preempt() -> None:
    """Two streams fill the pool to the last block: the first has slots for its own token only."""
    scheduler, executor, _ = make_scheduler(groups=((6, None),), block_size=4, speculation=8, prefix_caching=False)
    for name in "ab":
        add(executor, make_request(name, [0, 1, 2] * 3, max_tokens=4, seed=2))
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.update(plan, executor.execute(plan))
        assert_consistent(scheduler.blocks, (seq.cache for seq in scheduler.live_sequences()))
    assert executor.num_drafts > 0 and scheduler.counters.num_preemptions == 0


@pytest.mark.parametrize("policy", ["recompute", "rotate"])
def test_proposals_end_where_frequencies_change(policy: Any) -> None:
    scheduler, executor, _ = make_scheduler(speculation=9)
    add(executor, make_request("a", [0, 1, 2, 0, 1], max_tokens=90, seed=2), FakeRotation("dynamic", policy))
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.update(plan, executor.execute(plan))  # asserts that all rows are computed under one stage
    assert executor.num_accepted > 5


def test_number_of_proposals_adapts() -> None:
    pace = DraftLengthController(8)
    seen = []
    for _ in range(400):
        limit = pace.limit()
        seen.append(limit)
        if limit:
            pace.observe(limit, 0)
    assert seen[:5] == [8, 4, 2, 1, 0]
    assert sum(seen) <= 30, "proposals that always fail cost a bounded number of rows"
    assert sum(seen[-129:]) <= 2
    while not pace.limit():
        pass
    pace.observe(1, 1)
    assert pace.limit() == 2
    pace.observe(2, 2)
    pace.observe(4, 4)
    pace.observe(8, 8)
    assert pace.limit() == 8
    pace.observe(8, 3)
    assert pace.limit() == 4
    pace.observe(4, 0)
    assert pace.limit() == 2


def test_extended_equals_the_joined_list() -> None:
    joined, view = [1, 2, 3, 4, 5], ExtendedTokens([1, 2, 3], (4, 5))
    assert list(view) == joined and len(view) == 5
    for i in range(-5, 5):
        assert view[i] == joined[i]
    assert view[-3:] == joined[-3:] and view[1:4] == joined[1:4] and view[2:] == joined[2:]
    for beyond in (5, -6):
        with pytest.raises(IndexError):
            view[beyond]


def scheduled(draft: tuple[int, ...], **sampling: Any) -> SamplingRequest:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    tokens = [1, 2, 3]
    slot = SampleSlot(7, 0, params, 0, 2, tokens)
    return SamplingRequest(0, (slot,), draft)


def rows(*best: int) -> torch.Tensor:
    logits = torch.zeros(len(best), 10)
    for row, token in enumerate(best):
        logits[row, token] = 5.0
    return logits


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 1}, {"presence_penalty": 0.1}], ids=str)
@pytest.mark.parametrize(
    ("draft", "best", "accepted"),
    [
        ((4, 5, 6), (4, 5, 6, 7), (4, 5, 6, 7)),
        ((4, 5, 6), (4, 5, 8, 7), (4, 5, 8)),
        ((4, 5, 6), (9, 5, 6, 7), (9,)),
        ((4, 5, 6), (4, 9, 6, 7), (4, 9)),
    ],
)
def test_proposals_are_accepted_up_to_the_first_difference(
    draft: tuple[int, ...], best: tuple[int, ...], accepted: tuple[int, ...], sampling: dict[str, Any]
) -> None:
    (result,) = sample_and_accept(Sampler(10, select_backend("cpu")), rows(*best), [scheduled(draft, **sampling)])
    assert result.token_ids == accepted
    if "logprobs" in sampling:
        assert result.logprobs is not None
        assert [entry.token_id for entry in result.logprobs] == list(accepted)
        assert all(entry.rank == 1 for entry in result.logprobs)
    else:
        assert result.logprobs is None


@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 0.1}], ids=str)
def test_invalid_logits_after_accepted_tokens(sampling: dict[str, Any]) -> None:
    sampler, logits = Sampler(10, select_backend("cpu")), rows(4, 5, 6, 7)
    logits[2] = torch.nan
    (result,) = sample_and_accept(sampler, logits, [scheduled((4, 5, 6), **sampling)])
    assert result.error is None and result.token_ids == (4, 5)
    logits[0] = torch.nan
    (result,) = sample_and_accept(sampler, logits, [scheduled((4, 5, 6), **sampling)])
    assert isinstance(result.error, EngineError) and result.token_ids == ()


def test_penalties_count_accepted_tokens_only() -> None:
    """A penalised token is not sampled again, so a loop that the raw logits would continue ends after one round."""
    item = scheduled((4, 4, 4), presence_penalty=2.0)
    logits = rows(4, 4, 4, 4)
    logits[:, 8] = 4.0
    (result,) = sample_and_accept(Sampler(10, select_backend("cpu")), logits, [item])
    assert result.token_ids == (4, 8)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "several",
    [{"speculative_ngram": 4, "speculative_ngram_min": 1}, {"burst_seconds": 1.0}],
    ids=["proposals", "bursts"],
)
def test_engine_benchmark_counts_every_token(several: dict[str, Any]) -> None:
    config = engine_config(str(DEMO), device="cpu", kv_cache_memory=8 << 20, **several)
    for output_len in (40, 400):  # the longer one runs into the end of the context
        result = run_engine_benchmark(config, batch_size=2, input_len=100, output_len=output_len)
        tokens_each = min(output_len, 412) - 1
        assert tokens_each / 8 <= result["decode_steps"] < 0.9 * tokens_each
        seconds = result["decode_step_milliseconds"] / 1000
        assert result["decode_tokens_per_second"] * seconds == pytest.approx(2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"speculative_ngram": -1}, "`scheduling.speculation.num_tokens`"),
        ({"speculative_ngram": 65}, "`scheduling.speculation.num_tokens`"),
        ({"speculative_ngram_min": 0}, "`scheduling.speculation.min_match`"),
        ({"speculative_ngram_min": 5, "speculative_ngram_max": 4}, "`scheduling.speculation.max_match`"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, int], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        engine_config("x", **options)
