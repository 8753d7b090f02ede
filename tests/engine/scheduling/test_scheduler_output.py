"""Scheduler outputs for ranks: their size, detection of lost outputs, and equal results of a rank.

`engine_helpers.fake_executor` asserts in every step of the tests that use it, above all `test_scheduler_machine`, that
outputs agree with the state of the scheduler.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from engine_helpers.fake_executor import FakeRotation, add, make_request, make_scheduler
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.input_batch import InputBatch, MissedPlanError
from windlass.engine.execution.model_runner import ModelRunner
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.engine.sampling.sampler import Sampler
from windlass.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput, Snapshot, StepResult

STREAMS = 8


def decode_sizes(context: int, **options: Any) -> list[int]:
    """Bytes of the pickled outputs of forty decode steps of eight streams, after the n-gram index is complete."""
    tokens = STREAMS * (context + 500)
    scheduler, executor, _ = make_scheduler(
        groups=[(tokens // 16 + 100, None), (tokens // 16 + 100, 64)],
        block_size=16,
        budget=tokens,
        max_model_len=context + 500,
        max_num_seqs=STREAMS,
        **options,
    )
    for i in range(STREAMS):
        prompt = [(7 * j + i) % 5 for j in range(context)]
        add(executor, make_request(str(i), prompt, max_tokens=400))
    sequences = InputBatch(num_groups=2)
    sizes = []
    for _ in range(100):
        plan = scheduler.schedule()
        encoded = pickle.dumps(plan)
        sequences.apply(pickle.loads(encoded))
        sizes.append(len(encoded))
        results = []
        for item in plan.sequences:
            live = sequences.by_id[item.seq_id]
            # The sampled tokens continue as the prompt did, so half of the proposals are accepted.
            drawn = [(7 * (item.num_known_tokens + i) + item.seq_id) % 5 for i in range(1 + len(item.draft) // 2)]
            assert live.slot.seq_id == item.seq_id
            results.append(StepResult(item.seq_id, tuple(drawn)))
        scheduler.update(plan, results)
    return sizes[-40:]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("options", [{}, {"speculation": 4}], ids=["plain", "speculation"])
def test_plan_size_depends_on_new_events(options: dict[str, int]) -> None:
    short, long = decode_sizes(1_000, **options), decode_sizes(100_008, **options)
    # Equal events, but numbers above 65,535 need two more bytes: start and number of tokens of each stream, and sometimes
    # lengths of its tables, and blocks.
    assert all(0 <= b - a <= STREAMS * 12 for a, b in zip(short, long, strict=True))
    assert min(long) < 1_000 and max(long) < 2_000


def test_missing_plan_is_detected_and_repaired_by_a_snapshot() -> None:
    scheduler, executor, _ = make_scheduler()
    add(executor, make_request("r", range(10), n=2, max_tokens=20))
    plans = []
    for _ in range(4):
        plans.append(scheduler.schedule())
        scheduler.update(plans[-1], executor.execute(plans[-1]))
    sequences = InputBatch(num_groups=1)
    sequences.apply(plans[0])
    for wrong in (plans[2], plans[0]):
        with pytest.raises(MissedPlanError, match=f"plan {wrong.step} follows plan 1: .* snapshot"):
            sequences.apply(wrong)
        assert sequences.step == 1 and len(sequences.by_id[0].token_ids) == 10
    snapshot = scheduler.snapshot()
    assert snapshot.step == 4
    sequences.restore(snapshot)
    with pytest.raises(MissedPlanError):
        sequences.apply(plans[3])
    plan = scheduler.schedule()
    sequences.apply(plan)
    executor.execute(plan)
    for seq in scheduler.live_sequences():
        executor.compare(sequences, seq)


def test_disagreement_with_the_plan_is_detected() -> None:
    scheduler, executor, _ = make_scheduler()
    add(executor, make_request("r", range(10), max_tokens=20))
    plan = scheduler.schedule()
    sequences = InputBatch(num_groups=1)
    sequences.apply(plan)
    with pytest.raises(MissedPlanError, match="has 10 tokens here, 12 in the scheduler"):
        sequences.apply(SchedulerOutput(2, sequences=(ScheduledSequence(0, 11, 1, 12),)))
    with pytest.raises(MissedPlanError, match="new but already known"):
        sequences.apply(SchedulerOutput(3, new=plan.new))


def test_tokens_and_end_of_a_sequence_are_sent_once() -> None:
    scheduler, executor, _ = make_scheduler()
    add(executor, make_request("a", range(10), max_tokens=3))
    add(executor, make_request("b", range(10, 19), max_tokens=30), FakeRotation("yarn"))
    plans = []
    for _ in range(6):
        plans.append(scheduler.schedule())
        scheduler.update(plans[-1], executor.execute(plans[-1]))
    assert [[new.seq_id for new in plan.new] for plan in plans] == [[0, 1], [], [], [], [], []]
    assert [plan.removed for plan in plans] == [(), (), (), (0,), (), ()]
    assert [len(plan.rotary_rows) for plan in plans] == [2, 0, 0, 0, 0, 0]
    assert all(len(item.token_ids) == 1 for plan in plans[1:] for item in plan.sequences)
    scheduler.abort("b")
    assert scheduler.schedule().removed == (1,)
    assert scheduler.schedule() == SchedulerOutput(8)
    assert scheduler.snapshot().sequences == ()


def add_rank(core: EngineCore) -> tuple[ModelRunner, list[SchedulerOutput]]:
    """A second runner with its own cache and rotary tables, which receives only pickled plans of an engine without graphs.

    Its tokens must equal those of the engine's runner.
    """
    own = core.runner
    decoder, size = own.decoder, core.info.block_size
    cache = KVCache(
        decoder.spec.kv_groups, list(core.info.num_kv_blocks), size, own.cache.pages(0).key.dtype, decoder.backend
    )
    tables = RotaryTables(own.tables.num_rows, [g.base for g in decoder.spec.rotary_groups], decoder.backend)
    rank = ModelRunner(decoder, cache, tables, Sampler(decoder.spec.vocab_size, decoder.backend), size)
    execute, apply, plans = own.execute, own.apply, []

    def execute_both(plan: SchedulerOutput) -> list[StepResult]:
        plans.append(plan)
        results = execute(plan)
        assert rank.execute(pickle.loads(pickle.dumps(plan))) == results
        return results

    def follow_both(plan: SchedulerOutput) -> None:
        apply(plan)
        if plan not in plans:
            rank.apply(pickle.loads(pickle.dumps(plan)))

    own.execute = execute_both  # type: ignore[method-assign]
    own.apply = follow_both  # type: ignore[method-assign]
    return rank, plans


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rank_computes_equal_results_from_plans(family: str, tmp_path: Path) -> None:
    core = make_core(
        make_model(family, tmp_path, max_position_embeddings=64),
        max_model_len=256,
        speculative_ngram=4,
        speculative_ngram_min=1,
        cuda_graphs=False,
    )
    rank, plans = add_rank(core)
    dynamic = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2.0})
    linear = RopeScaling.from_dict({"rope_type": "linear", "factor": 3.0})
    run(core, [greedy("a", range(3, 40), 90), greedy("b", [5, 6, 7] * 9, 60, n=3, temperature=0.9, seed=4)])
    run(
        core,
        [
            greedy("c", range(3, 40), 40, rope_scaling=linear, repetition_penalty=1.2, min_tokens=30),
            greedy("d", range(5, 60), 90, rope_scaling=dynamic, rope_update="rotate"),
            greedy("e", range(5, 61), 90, rope_scaling=dynamic, rope_update="recompute"),
            greedy("f", range(9, 30), 0, prompt_logprobs=2),
        ],
    )
    assert any(plan.rerotations for plan in plans) and any(plan.num_draft_tokens for plan in plans)
    assert any(plan.forks for plan in plans) and any(plan.copies for plan in plans)
    assert len(rank.input_batch) == rank.sampler.num_tracked == len(core.runner.input_batch) == 0


def test_rank_continues_from_a_snapshot(tmp_path: Path) -> None:
    core = make_core(make_model("llama", tmp_path), cuda_graphs=False)
    rank, _ = add_rank(core)
    core.add(greedy("a", range(3, 40), 30, repetition_penalty=1.3))
    for _ in range(6):
        core.step()
    rank.sampler.forget(0)
    rank.restore(Snapshot(0))
    with pytest.raises(MissedPlanError):
        core.step()
    snapshot: Snapshot = pickle.loads(pickle.dumps(core.scheduler.snapshot()))
    assert snapshot.step == core.runner.input_batch.step
    rank.restore(snapshot)
    assert rank.input_batch.by_id[0].token_ids == core.runner.input_batch.by_id[0].token_ids
    assert rank.sampler.num_tracked == 0 < core.runner.sampler.num_tracked
