"""Scheduler: budget, order, chunks, preemption, samples, end conditions, counters and step length."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from engine_helpers.fake_executor import (
    EOS,
    FakeExecutor,
    FakeRotation,
    add,
    keys_of,
    make_request,
    make_scheduler,
    oracle,
)
from helpers.cache_invariants import assert_balanced, assert_consistent

from windlass.engine.errors import DeadlineError, QueueFullError, RequestError
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.scheduling.chunked_prefill import StepLimiter, split_prefill_budget
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.engine.scheduling.scheduler_output import SchedulerOutput, StepResult

NONE = dict.fromkeys(("preemption", "full_prefix_hit", "rope_update", "cache_reuse"), 0)  # tokens computed again


def step(scheduler: Scheduler, executor: FakeExecutor) -> tuple[SchedulerOutput, list[RequestOutput]]:
    plan = scheduler.schedule()
    outputs = scheduler.update(plan, executor.execute(plan))
    assert_consistent(scheduler.blocks, (seq.cache for seq in scheduler.live_sequences()))
    return plan, outputs


def finish(scheduler: Scheduler, executor: FakeExecutor, limit: int = 1000) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(limit):
        if not scheduler.has_work():
            assert_balanced(scheduler.blocks)
            return outputs
        outputs += step(scheduler, executor)[1]
    raise AssertionError("requests do not finish")


def tokens_of(outputs: list[RequestOutput], request_id: str, index: int = 0) -> list[int]:
    return [t for o in outputs if (o.request_id, o.index) == (request_id, index) for t in o.token_ids]


def rows(plan: SchedulerOutput) -> list[tuple[int, int]]:
    return [(item.start, item.num_tokens) for item in plan.sequences]


def test_prefill_chunks_and_decode_tokens_share_one_budget() -> None:
    scheduler, executor, _ = make_scheduler(budget=10)
    add(executor, make_request("short", [1, 2, 3], max_tokens=5))
    assert rows(step(scheduler, executor)[0]) == [(0, 3)]
    add(executor, make_request("long", list(range(25)), max_tokens=2))
    seen = []
    while scheduler.has_work():
        plan, _ = step(scheduler, executor)
        assert plan.num_tokens <= 10
        seen.append(rows(plan))
    # The stream is first in every step, and the prompt uses the rest.
    assert seen == [[(3, 1), (0, 9)], [(4, 1), (9, 9)], [(5, 1), (18, 7)], [(6, 1), (25, 1)]]


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 50])
def test_tokens_are_independent_of_the_budget(budget: int) -> None:
    scheduler, executor, _ = make_scheduler(budget=budget)
    requests = [make_request(f"r{i}", range(i + 1), max_tokens=3 + i) for i in range(5)]
    for request in requests:
        add(executor, request)
    outputs = finish(scheduler, executor)
    for request in requests:
        expected, _, _ = oracle(request, executor.rotations[request.request_id], 0, 200)
        assert tokens_of(outputs, request.request_id) == expected


def test_no_starvation_with_a_budget_below_the_running_set() -> None:
    scheduler, executor, _ = make_scheduler(budget=5, max_num_seqs=5)
    for i in range(5):
        add(executor, make_request(f"r{i}", [i], max_tokens=40))
    step(scheduler, executor)
    assert scheduler.num_running == 5
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=2)
    gaps = dict.fromkeys(range(5), 0)
    for _ in range(30):
        plan, _ = step(scheduler, executor)
        served = {item.seq_id for item in plan.sequences}
        assert len(served) == 2
        gaps = {seq_id: 0 if seq_id in served else gap + 1 for seq_id, gap in gaps.items()}
        assert max(gaps.values()) <= 2


def test_waiting_requests_start_by_priority_then_arrival() -> None:
    scheduler, executor, _ = make_scheduler(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        add(executor, make_request(name, [1], max_tokens=1, priority=priority))
    assert [o.request_id for o in finish(scheduler, executor)] == ["b", "d", "a", "c"]


def test_short_prompt_does_not_wait_for_a_long_one() -> None:
    scheduler, executor, _ = make_scheduler(budget=8, prefix_caching=False)
    add(executor, make_request("long", [1] * 100, max_tokens=1))
    step(scheduler, executor)
    add(executor, make_request("short", [2] * 6, max_tokens=1))
    outputs = step(scheduler, executor)[1] + step(scheduler, executor)[1]
    assert [o.request_id for o in outputs] == ["short"]


def test_deal_prefill_tokens() -> None:
    assert split_prefill_budget([], 5) == []
    assert split_prefill_budget([100], 9) == [9]
    assert split_prefill_budget([100, 50, 3], 10) == [5, 2, 3]
    assert split_prefill_budget([2, 50, 50], 10) == [2, 8, 0]
    assert split_prefill_budget([100, 1], 1) == [1, 0]
    assert split_prefill_budget([3, 4], 99) == [3, 4]


def test_step_does_not_copy_or_hash_the_context() -> None:
    scheduler, executor, _ = make_scheduler(groups=[(2000, None)], max_model_len=6000, budget=5000)
    add(executor, make_request("r", [0] * 4000, max_tokens=100))
    plan = scheduler.schedule()
    (seq,) = scheduler.live_sequences()
    scheduler.update(plan, [StepResult(seq.seq_id, (1,))])
    sizes = []

    class Counting(list[int]):
        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            value = super().__getitem__(key)
            sizes.append(len(value) if isinstance(key, slice) else 1)
            return value

        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("iterated over all tokens")

    seq.token_ids = Counting(seq.token_ids)
    for _ in range(40):
        plan = scheduler.schedule()
        assert plan.sequences[0].token_ids == (1,) and plan.sequences[0].num_known_tokens == seq.num_tokens
        scheduler.update(plan, [StepResult(seq.seq_id, (1,))])
    # Each new token was put into one plan, and ten new blocks of four were hashed, each token once.
    assert sum(sizes) == 40 + 40


def test_plan_without_work() -> None:
    scheduler, executor, _ = make_scheduler(max_num_seqs=500)
    choose, asked = scheduler._choose_waiting, []
    scheduler._choose_waiting = lambda: asked.append(1) or choose()  # type: ignore[method-assign, func-returns-value]
    assert not scheduler.schedule().sequences
    assert len(asked) == 1
    add(executor, make_request("r", range(10), max_tokens=1))
    assert scheduler.schedule().sequences


def ended_early(when: str, index: int) -> tuple[Scheduler, list[RequestOutput], list[RequestOutput]]:
    """Three samples, of which one is ended: while the prompt is computed, while the fork is in flight, or later.

    Returns the outputs before and after it.
    """
    scheduler, executor, _ = make_scheduler(budget=4)
    add(executor, make_request("r", range(10), max_tokens=6, n=3))
    before = []
    for _ in range({"prompt": 1, "fork": 2, "later": 4}[when]):
        before += step(scheduler, executor)[1]
    if when == "fork":
        plan = scheduler.schedule()
        results = executor.execute(plan)
        used = scheduler.blocks.num_used_blocks
        scheduler.end_sample("r", index)
        assert scheduler.blocks.num_used_blocks == used  # the fork has no blocks yet, and sample 0 is still needed
        after = scheduler.update(plan, results)
    else:
        used = scheduler.blocks.num_used_blocks
        scheduler.end_sample("r", index)
        assert (scheduler.blocks.num_used_blocks < used) == (when == "later")
        after = []
    return scheduler, before, after + finish(scheduler, executor)


@pytest.mark.parametrize("when", ["prompt", "fork", "later"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_ending_one_sample_does_not_affect_others(when: str, index: int) -> None:
    scheduler, before, after = ended_early(when, index)
    assert index not in {output.index for output in after}
    assert bool(before) == (when == "later")
    request = make_request("r", range(10), max_tokens=6, n=3)
    for other in {0, 1, 2} - {index}:
        assert tokens_of(before + after, "r", other) == oracle(request, FakeRotation(), other, 200)[0]
    assert {output.index for output in after if output.finish_reason} == {0, 1, 2} - {index}
    assert_balanced(scheduler.blocks)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_last_sample_ends_the_request(steps: int) -> None:
    scheduler, executor, _ = make_scheduler(budget=4)
    add(executor, make_request("r", range(10), max_tokens=6, n=2))
    for _ in range(steps):
        step(scheduler, executor)
    scheduler.end_sample("r", 2)
    scheduler.end_sample("r", -1)
    scheduler.end_sample("other", 0)
    scheduler.end_sample("r", 1)
    assert scheduler.has_work()
    scheduler.end_sample("r", 1)
    assert scheduler.has_work()
    scheduler.end_sample("r", 0)
    assert not scheduler.has_work() and (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert_balanced(scheduler.blocks)
    add(executor, make_request("r", range(10), max_tokens=1))  # the id is free again
    assert len(finish(scheduler, executor)) == 1


def test_samples_without_tokens_end() -> None:
    scheduler, executor, _ = make_scheduler(budget=4)
    add(executor, make_request("r", range(10), max_tokens=0, n=3, prompt_logprobs=0))
    step(scheduler, executor)
    scheduler.end_sample("r", 0)
    outputs = finish(scheduler, executor)
    assert [(output.index, output.prompt_logprobs) for output in outputs] == [(1, None), (2, None)]


def test_requests_that_cannot_fit_are_refused() -> None:
    scheduler, executor, _ = make_scheduler(groups=[(5, None), (2, 4)], max_model_len=30)
    for prompt, max_tokens, code in ((0, 1, "empty_prompt"), (31, 0, "context_length_exceeded")):
        with pytest.raises(RequestError) as refused:
            add(executor, make_request("x", [0] * prompt, max_tokens=max_tokens))
        assert refused.value.code == code
    with pytest.raises(RequestError, match="need 6 KV blocks and the cache has 5"):
        add(executor, make_request("x", [0] * 10, max_tokens=12))
    add(executor, make_request("x", [0] * 10, max_tokens=11))  # 20 positions: the last token is never computed
    assert len(tokens_of(finish(scheduler, executor), "x")) == 11


def test_window_pool_may_be_smaller_than_the_prompt() -> None:
    scheduler, executor, _ = make_scheduler(groups=[(50, None), (3, 8)], budget=64, max_model_len=150)
    request = make_request("x", [i % 3 for i in range(100)], max_tokens=20)
    add(executor, request)
    assert tokens_of(finish(scheduler, executor), "x") == oracle(request, executor.rotations["x"], 0, 150)[0]
    assert scheduler.counters.recomputed_tokens == dict.fromkeys(
        ("preemption", "full_prefix_hit", "rope_update", "cache_reuse"), 0
    )


def test_full_queue_and_duplicate_id_are_refused() -> None:
    scheduler, executor, _ = make_scheduler(max_waiting=2, max_num_seqs=1)
    add(executor, make_request("a", [1]))
    with pytest.raises(RequestError, match="in use"):
        add(executor, make_request("a", [1]))
    add(executor, make_request("b", [1]))
    with pytest.raises(QueueFullError):
        add(executor, make_request("c", [1]))
    step(scheduler, executor)
    add(executor, make_request("c", [1]))
    finish(scheduler, executor)
    add(executor, make_request("a", [1]))  # an ended request's id is free again


def test_large_waiting_request_is_not_overtaken() -> None:
    scheduler, executor, _ = make_scheduler(groups=[(10, None)], prefix_caching=False)
    add(executor, make_request("first", [0] * 20, max_tokens=8))
    step(scheduler, executor)
    add(executor, make_request("large", [1] * 30, max_tokens=2))
    add(executor, make_request("small", [2], max_tokens=1))
    outputs = finish(scheduler, executor)
    ends = [o.request_id for o in outputs if o.finish_reason]
    assert ends[0] == "first" and scheduler.counters.num_preemptions == 0
    assert outputs.index(next(o for o in outputs if o.request_id == "small")) > ends.index("first")


def test_second_request_reuses_the_prefix() -> None:
    scheduler, executor, _ = make_scheduler()
    add(executor, make_request("a", range(11)))
    finish(scheduler, executor)
    add(executor, make_request("b", range(11)))
    plan, outputs = step(scheduler, executor)
    assert rows(plan) == [(8, 3)]
    assert outputs[0].cached_tokens == 8
    finish(scheduler, executor)
    add(executor, make_request("salted", range(11), cache_salt="s"))
    add(executor, make_request("scaled", range(11)), rotation=FakeRotation("yarn"))
    add(executor, make_request("scored", range(11), prompt_logprobs=0))
    assert rows(step(scheduler, executor)[0]) == [(0, 11)] * 3
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (44, 8)
    assert stats.prompt_tokens == 55


def test_progress_of_a_prompt() -> None:
    """After every step before the first token, from the cached tokens on, and only if requested."""
    scheduler, executor, _ = make_scheduler(budget=10)
    add(executor, make_request("a", range(8), max_tokens=1))
    assert all(output.prompt_computed is None for output in finish(scheduler, executor))
    add(executor, replace(make_request("b", range(35), max_tokens=3), reports_progress=True))
    outputs = finish(scheduler, executor)
    assert [o.prompt_computed for o in outputs] == [18, 28, None, None, None]
    assert {o.cached_tokens for o in outputs} == {8} and not any(o.token_ids for o in outputs[:2])
    assert [len(o.token_ids) for o in outputs[2:]] == [1, 1, 1]


def test_full_hit_recomputes_its_last_block() -> None:
    scheduler, executor, _ = make_scheduler()
    for name in ("a", "b"):
        add(executor, make_request(name, range(8), max_tokens=1))
        outputs = finish(scheduler, executor)
    assert outputs[0].cached_tokens == 4
    assert scheduler.counters.recomputed_tokens == {**NONE, "full_prefix_hit": 4}
    assert scheduler.counters.prompt_tokens == 16


def test_finished_output_is_a_prefix_of_the_next_turn() -> None:
    scheduler, executor, _ = make_scheduler()
    add(executor, make_request("a", range(6), max_tokens=7))
    answer = tokens_of(finish(scheduler, executor), "a")
    add(executor, make_request("b", [*range(6), *answer, 1]))
    assert step(scheduler, executor)[1][0].cached_tokens == 12  # 13 tokens, the last of which was never computed


def test_requests_that_arrive_together_compute_their_common_prompt_once() -> None:
    scheduler, executor, _ = make_scheduler(budget=16)
    for i in range(4):
        add(executor, make_request(f"r{i}", [*[1] * 40, 10 + i], max_tokens=2))
    finish(scheduler, executor)
    # 41 tokens once, then one token of prompt each; plus one computed output token each.
    assert executor.num_computed == 41 + 3 + 4


def test_request_does_not_wait_for_the_prefix_of_a_lower_ranked_one() -> None:
    scheduler, executor, _ = make_scheduler(budget=8)
    add(executor, make_request("slow", [1] * 40, priority=1))
    step(scheduler, executor)
    add(executor, make_request("urgent", [1] * 40))
    step(scheduler, executor)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 0)
    finish(scheduler, executor)


def test_no_waiting_for_an_evicted_prefix() -> None:
    scheduler, executor, _ = make_scheduler(groups=[(60, None), (8, 5)], budget=8)
    add(executor, make_request("long", [1] * 100))
    for _ in range(8):
        step(scheduler, executor)
    add(executor, make_request("short", [*[1] * 20, 2, 3]))  # of the window group, only the last 8 blocks are left
    plan, _ = step(scheduler, executor)
    assert (0, 8) not in rows(plan) and scheduler.num_waiting == 0
    finish(scheduler, executor)


def test_blocks_that_leave_the_window_within_a_chunk_are_cached() -> None:
    scheduler, executor, _ = make_scheduler(groups=[(20, None), (20, 5)])
    add(executor, make_request("a", range(24)))
    finish(scheduler, executor)
    add(executor, make_request("b", range(13)))
    assert step(scheduler, executor)[1][0].cached_tokens == 12


def test_waiting_for_a_prefix_ends_with_its_source() -> None:
    scheduler, executor, _ = make_scheduler(budget=8)
    add(executor, make_request("a", [1] * 40))
    add(executor, make_request("b", [1] * 40))
    step(scheduler, executor)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    scheduler.abort("a")
    assert tokens_of(finish(scheduler, executor), "b")


def test_lowest_ranked_sequence_is_preempted() -> None:
    scheduler, executor, _ = make_scheduler(groups=[(6, None)], prefix_caching=False)
    requests = [
        make_request("late", [2] * 7, max_tokens=12, priority=1),
        make_request("good", [1] * 7, max_tokens=12),
    ]
    for request in requests:
        add(executor, request)
    outputs = finish(scheduler, executor)
    for request in requests:
        assert tokens_of(outputs, request.request_id) == oracle(request, executor.rotations["good"], 0, 200)[0]
    ends = [o.request_id for o in outputs if o.finish_reason]
    assert ends == ["good", "late"]
    counters = scheduler.counters
    # Both fill three blocks; the fourth of "good" comes from "late", which had computed 12 tokens.
    assert counters.num_preemptions == 1
    assert counters.recomputed_tokens["preemption"] == executor.num_recomputed == 12
    assert counters.prompt_tokens == 14 and counters.generation_tokens == 24


def test_preempted_sequence_reuses_its_free_blocks() -> None:
    scheduler, executor, _ = make_scheduler(groups=[(6, None)])
    add(executor, make_request("good", [1] * 7, max_tokens=9))
    add(executor, make_request("late", [2] * 7, max_tokens=9))
    finish(scheduler, executor)
    assert scheduler.counters.num_preemptions == 1
    # Of its 12 tokens, the tail block was taken; the two head blocks were still cached.
    assert scheduler.counters.recomputed_tokens["preemption"] == 4


def test_every_accepted_request_ends() -> None:
    scheduler, executor, _ = make_scheduler(groups=[(8, None), (4, 6)], budget=7, prefix_caching=False)
    requests = [make_request(f"r{i}", [i] * (1 + 5 * (i % 4)), max_tokens=14, n=1 + i % 2) for i in range(12)]
    for request in requests:
        add(executor, request)
    outputs = finish(scheduler, executor)
    assert scheduler.counters.num_preemptions > 0
    for request in requests:
        for index in range(request.sampling.n):
            expected, _, _ = oracle(request, executor.rotations["r0"], index, 200)
            assert tokens_of(outputs, request.request_id, index) == expected


def test_step_is_never_empty() -> None:
    # One token per step for three samples that share two blocks; one block is left for the first to ask, index 1.
    scheduler, executor, _ = make_scheduler(groups=[(3, None)], budget=1)
    add(executor, make_request("r", range(8), n=3, max_tokens=5))
    outputs = []
    for _ in range(9):
        outputs += step(scheduler, executor)[1]
    assert scheduler.num_running == 3
    # Index 2 is due next, finds nothing, and may take nothing from the better-ranked ones: the step goes to index 0,
    # which takes the block from index 1.
    plan, more = step(scheduler, executor)
    assert [o.index for o in more] == [0] and scheduler.counters.num_preemptions == 2
    outputs += more
    while scheduler.has_work():
        plan, more = step(scheduler, executor)
        assert plan.sequences
        outputs += more
    for index in range(3):
        assert len(tokens_of(outputs, "r", index)) == 5
    assert_balanced(scheduler.blocks)


def test_samples_share_the_prefill_and_its_blocks() -> None:
    scheduler, executor, _ = make_scheduler()
    request = make_request("r", range(10), n=3, max_tokens=5)
    add(executor, request)
    plan, outputs = step(scheduler, executor)
    assert rows(plan) == [(0, 10)] and len(plan.sequences[0].samples) == 3
    slots = [executor.sequences.by_id[seq_id].slot for seq_id in plan.sequences[0].samples]
    assert [(s.index, s.seed) for s in slots] == [(0, 0), (1, 0), (2, 0)]
    assert [o.index for o in outputs] == [0, 1, 2]
    assert scheduler.blocks.num_used_blocks == 3
    plan, more = step(scheduler, executor)
    assert rows(plan) == [(10, 1)] * 3 and len(plan.copies) == 2
    outputs += more + finish(scheduler, executor)
    for index in range(3):
        assert tokens_of(outputs, "r", index) == oracle(request, executor.rotations["r"], index, 200)[0]
    assert executor.num_computed == 10 + 3 * 4


def test_queued_samples_reuse_the_prefix() -> None:
    scheduler, executor, _ = make_scheduler(max_num_seqs=2)
    request = make_request("r", range(10), n=4, max_tokens=5)
    add(executor, request)
    outputs = step(scheduler, executor)[1]
    assert len(outputs) == 4 and (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    outputs += finish(scheduler, executor)
    for index in range(4):
        assert tokens_of(outputs, "r", index) == oracle(request, executor.rotations["r"], index, 200)[0]
    # Each of the two computes the prompt's last two tokens again, which shared no full block.
    assert scheduler.counters.recomputed_tokens["preemption"] == executor.num_recomputed == 4


def test_abort_and_error_end_all_samples() -> None:
    scheduler, executor, _ = make_scheduler()
    add(executor, make_request("r", range(10), n=3))
    add(executor, make_request("other", range(3)))
    plan = scheduler.schedule()
    results = executor.execute(plan)
    scheduler.abort("r")
    assert {o.request_id for o in scheduler.update(plan, results)} == {"other"}
    assert {seq.request.request_id for seq in scheduler.live_sequences()} == {"other"}
    error = ValueError("logits are not finite")
    assert scheduler.fail("other", error) == [RequestOutput("other", error=error)]
    assert scheduler.fail("other", error) == []
    assert not scheduler.has_work()
    assert_balanced(scheduler.blocks)
    assert not executor.rotary.counts


def test_random_seed_by_default() -> None:
    scheduler, executor, _ = make_scheduler()
    add(executor, make_request("r", [1], seed=None))
    add(executor, make_request("s", [1], seed=7))
    assert [new.seed for new in scheduler.schedule().new] == [12345, 7]


def ends(tokens: tuple[int, ...], prompt_len: int = 3, **sampling: object) -> RequestOutput:
    """The output after one step that drew `tokens`."""
    scheduler, executor, _ = make_scheduler(max_model_len=10)
    add(executor, make_request("r", range(prompt_len), **sampling))
    plan = scheduler.schedule()
    (output,) = scheduler.update(plan, [StepResult(plan.sequences[0].seq_id, tokens)])
    return output


def test_end_conditions() -> None:
    def short(output: RequestOutput) -> tuple[object, ...]:
        return output.token_ids, output.finish_reason, output.stop_token_id

    assert short(ends((1,))) == ((1,), None, None)
    assert short(ends((1,), max_tokens=1)) == ((1,), "length", None)
    assert short(ends((1, 2, 3, 0, 1), max_tokens=3)) == ((1, 2, 3), "length", None)
    assert short(ends((EOS,), ignore_eos=False)) == ((EOS,), "stop", EOS)
    assert short(ends((EOS,))) == ((EOS,), None, None)
    assert short(ends((1, 4, 2), stop_token_ids=(4,))) == ((1, 4), "stop", 4)
    assert short(ends((4, 1, 4), stop_token_ids=(4,), min_tokens=1)) == ((4, 1, 4), "stop", 4)
    assert short(ends((EOS,), ignore_eos=False, max_tokens=1)) == ((EOS,), "stop", EOS)
    assert short(ends((1, 2), prompt_len=9, max_tokens=50)) == ((1,), "length", None)


def test_scoring_computes_the_prompt_only() -> None:
    scheduler, executor, _ = make_scheduler(budget=4)
    add(executor, make_request("r", range(10), max_tokens=0, prompt_logprobs=0, n=2))
    plans = []
    outputs = []
    while scheduler.has_work():
        plan, more = step(scheduler, executor)
        plans.append(plan)
        outputs += more
    assert [rows(plan) for plan in plans] == [[(0, 4)], [(4, 4)], [(8, 2)]]
    assert not any(item.samples for plan in plans for item in plan.sequences)
    assert [(o.index, o.token_ids, o.finish_reason) for o in outputs] == [(0, (), "length"), (1, (), "length")]
    assert outputs[0].prompt_logprobs is not None and outputs[1].prompt_logprobs is None
    assert [e and e.token_id for e in outputs[0].prompt_logprobs] == [None, *range(1, 10)]


def test_prompt_logprobs_after_a_preemption_within_the_prompt() -> None:
    scheduler, executor, _ = make_scheduler(groups=[(7, None)], budget=6, prefix_caching=False)
    add(executor, make_request("good", [1] * 3, max_tokens=20))
    add(executor, make_request("scored", range(14), max_tokens=2, prompt_logprobs=0, priority=1))
    for _ in range(2):
        step(scheduler, executor)
    (victim,) = [s for s in scheduler.live_sequences() if s.request.request_id == "scored"]
    assert 0 < victim.cache.num_computed_tokens < 14
    scheduler._queues.preempt(victim)
    outputs = finish(scheduler, executor)
    (given,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert [e and e.token_id for e in given] == [None, *range(1, 14)]
    right = keys_of(victim.request, executor.rotations["scored"], list(range(14)))
    assert [e.logprob for e in given if e] == [float(key % 1000) for key in right[:13]]


def test_deadline_ends_waiting_and_running_requests() -> None:
    scheduler, executor, clock = make_scheduler(max_num_seqs=1)
    add(executor, make_request("running", [1], deadline=5.0, max_tokens=100))
    add(executor, make_request("waiting", [1], deadline=4.0))
    add(executor, make_request("patient", [1]))
    step(scheduler, executor)
    assert scheduler.expire(3.9) == []
    outputs = scheduler.expire(5.0)
    assert [o.request_id for o in outputs] == ["waiting", "running"]
    assert all(isinstance(o.error, DeadlineError) and o.finish_reason == "timeout" for o in outputs)
    add(executor, make_request("running", [1]))  # the id again, with no deadline now
    assert scheduler.expire(100.0) == []
    assert {o.request_id for o in finish(scheduler, executor)} == {"patient", "running"}
    assert clock.now == 0.0


def test_missing_result_is_an_error() -> None:
    scheduler, executor, _ = make_scheduler()
    add(executor, make_request("r", [1]))
    plan = scheduler.schedule()
    with pytest.raises(RuntimeError, match="no result"):
        scheduler.update(plan, [])
    scheduler, executor, _ = make_scheduler()
    add(executor, make_request("r", [1]))
    plan = scheduler.schedule()
    with pytest.raises(RuntimeError, match="no token"):
        scheduler.update(plan, [StepResult(plan.sequences[0].seq_id)])


def test_stats_have_gauges_and_each_duration_once() -> None:
    scheduler, executor, clock = make_scheduler(groups=[(10, None), (20, 4)], max_num_seqs=1)
    add(executor, make_request("a", range(6), max_tokens=3))
    add(executor, make_request("b", range(6), max_tokens=3))
    for now in (1.0, 2.0, 3.0):
        clock.now = now
        plan = scheduler.schedule()
        clock.now += 0.5
        if now == 2.0:
            stats = scheduler.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 1, 2)
            assert (stats.kv_blocks_total, stats.kv_blocks_used, stats.kv_cache_usage) == (30, 4, 0.2)
            assert (stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds) == ((1.0,), (0.5,), ())
        scheduler.update(plan, executor.execute(plan))
    stats = scheduler.stats()
    assert (stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds) == ((), (), (2.0,))
    assert (stats.prompt_tokens, stats.generation_tokens) == (6, 3)


def settle(step_limiter: StepLimiter, seconds_of: object, decodes: int, steps: int = 30) -> list[tuple[int, float]]:
    """Feed the timer steps that take all it allows; returns (limit, seconds) of each that may prefill."""
    assert callable(seconds_of)
    history: list[tuple[int, float]] = []
    while len(history) < steps:
        limit = step_limiter.limit(decodes)
        seconds = seconds_of(limit, decodes)
        if limit:
            history.append((limit, seconds))
        step_limiter.observe(limit + decodes, decodes, seconds)
    return history


@pytest.mark.parametrize("per_token", [1e-5, 1e-3, 5e-3])
@pytest.mark.parametrize("decodes", [0, 4])
def test_prefill_limit_converges_to_the_target_time(per_token: float, decodes: int) -> None:
    step_limiter = StepLimiter(0.25, 2048)
    history = settle(step_limiter, lambda p, d: 0.02 + per_token * (p + d), decodes)
    target = 0.25 if decodes else 1.0
    limits = [limit for limit, _ in history]
    for before, after in itertools.pairwise(limits):
        assert before / 2 - 1 <= after <= 2 * before
    limit, seconds = history[-1]
    assert seconds <= target * 1.01
    assert limit == 2048 or seconds * (limit + 1) / limit >= 0.8 * target  # exactly the target


def test_prefill_limit_bounds() -> None:
    step_limiter = StepLimiter(0.25, 2048)
    settle(step_limiter, lambda p, d: 100.0 if p else 0.01, 3)
    assert step_limiter.limit(3) == 4
    settle(step_limiter, lambda p, d: 1e-6, 3)
    assert step_limiter.limit(3) == 2048
    small = StepLimiter(0.25, 3)  # a ceiling below the floor
    settle(small, lambda p, d: 100.0, 0)
    assert small.limit(0) == 3
    free = StepLimiter(0.0, 2048)
    free.observe(2048, 0, 100.0)
    assert free.limit(5) == 2048


@pytest.mark.parametrize("known", [True, False])
def test_prompts_advance_next_to_streams_that_need_the_target_time_alone(known: bool) -> None:
    step_limiter = StepLimiter(0.25, 2048)
    if known:
        step_limiter.observe(64, 64, 0.32)  # decode only
    history = settle(step_limiter, lambda p, d: 0.005 * (p + d), 64)
    limit, seconds = history[-1]
    assert limit >= 24 and 0.4 <= seconds <= 1.5 * 0.32 + 1e-9


def test_some_steps_only_decode_while_prompts_wait() -> None:
    """They show how long the streams take, also after their number has changed."""
    step_limiter = StepLimiter(0.25, 2048)
    found = []
    for step in range(200):  # each of the steps is measured
        decodes = 8 if step < 100 else 40
        limit = step_limiter.limit(decodes)
        found.append(limit == 0)
        step_limiter.observe(limit + decodes, decodes, 0.02 + 1e-3 * (limit + decodes))
    assert [step for step, probes in enumerate(found) if probes][:3] == [4, 37, 70]
    assert 100 <= found.index(True, 100) <= 104 and 4 <= sum(found[100:]) <= 5
    assert all(step_limiter.limit(0) for _ in range(100)), "without streams there is nothing to measure"
    # A step that is not measured is not repeated at once.
    found = [step_limiter.limit(300) for _ in range(9) if step_limiter.observe(310, 300, 0.3) is None]
    assert found.count(0) == 2


def test_prompts_fill_steps_that_few_rows_do_not_shorten() -> None:
    """Weights take a fixed time to unpack for a matrix unit, so that a smaller chunk saves nothing."""
    step_limiter = StepLimiter(0.25, 2048)
    limit, seconds = settle(step_limiter, lambda p, d: 0.2 + 0.0015 * (p + d), 30)[-1]
    assert limit >= 30 and 0.25 < seconds <= 1.5 * 0.245 + 1e-9  # 0.8 of the bound


def test_a_long_prompt_does_not_count_as_slow_decoding() -> None:
    step_limiter = StepLimiter(0.25, 2048)
    step_limiter.observe(64, 64, 0.3)  # decode only
    _, seconds = settle(step_limiter, lambda p, d: 0.3 + 0.03 * p, 64)[-1]
    assert seconds <= 1.5 * 0.3 + 1e-9


def test_uninformative_steps_do_not_change_the_limit() -> None:
    step_limiter = StepLimiter(0.25, 2048)
    settle(step_limiter, lambda p, d: 1e-3 * p, 1)
    limit = step_limiter.limit(1)
    step_limiter.observe(8, 8, 3.0)  # decode only
    step_limiter.observe(10, 8, 0.2)  # a two-token prompt in a slow but allowed step
    step_limiter.observe(10, 8, 0.0)
    assert step_limiter.limit(1) == limit


def test_prefill_is_limited_next_to_streams() -> None:
    scheduler, executor, _ = make_scheduler(
        budget=512, target_step_seconds=0.25, groups=[(300, None)], max_model_len=900
    )
    add(executor, make_request("stream", [1], max_tokens=60))
    step(scheduler, executor)
    add(executor, make_request("long", [2] * 800, max_tokens=1))
    seconds, measuring = [], 0
    while any(s.request.request_id == "long" for s in scheduler.live_sequences()):
        plan = scheduler.schedule()
        assert plan.sequences[0].num_tokens == 1 and len(plan.sequences) <= 2
        measuring += len(plan.sequences) == 1
        seconds.append(0.005 * plan.num_tokens)  # about 50 tokens fit
        scheduler.observe(plan, seconds[-1])
        scheduler.update(plan, executor.execute(plan))
    assert seconds[0] < 0.33
    assert max(seconds[1:]) <= 0.26 and len(seconds) < 25
    assert measuring == 1, "all other steps advance the prompt"
