"""Non-prefix reuse: when passages are attached, how many, and their release at a preemption."""

from __future__ import annotations

import random

import pytest
from engine_helpers.fake_executor import FakeExecutor, FakeRotation, add, make_request, make_scheduler
from helpers.cache_invariants import assert_balanced, assert_consistent

from windlass.engine.cache.non_prefix_reuse import Passage
from windlass.engine.cache.sequence_cache import OPEN_END, SlotLayout, SlotRun
from windlass.engine.errors import RequestError
from windlass.engine.interface.context import ContextRule, ContextSizes, NonPrefixReuseParams
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.engine.scheduling.sequence import Sequence

RNG = random.Random(3)
FIRST, SECOND = ([RNG.randrange(2, 500) for _ in range(40)] for _ in range(2))
SOURCE = [0, 0, 0, *FIRST, 0, *SECOND, 1, 1, 1, 1]
TURNED = [1, *SECOND, 0, 1, *FIRST, 0]
ANY = NonPrefixReuseParams(32, scope="me")
OFFER = NonPrefixReuseParams(0, scope="me")


def step(scheduler: Scheduler, executor: FakeExecutor) -> list[RequestOutput]:
    plan = scheduler.schedule()
    return scheduler.update(plan, executor.execute(plan))


def finish(scheduler: Scheduler, executor: FakeExecutor) -> list[RequestOutput]:
    outputs = []
    for _ in range(500):
        if not scheduler.has_work():
            break
        outputs += step(scheduler, executor)
        assert_consistent(scheduler.blocks, (seq.cache for seq in scheduler.live_sequences()))
    assert not scheduler.has_work()
    assert_balanced(scheduler.blocks)
    return outputs


def with_source(**options: object) -> tuple[Scheduler, FakeExecutor]:
    scheduler, executor, _ = make_scheduler(**{"groups": [(100, None)], **options})  # type: ignore[arg-type]
    add(executor, make_request("source", SOURCE, max_tokens=1, reuse=OFFER))
    finish(scheduler, executor)
    return scheduler, executor


def only(scheduler: Scheduler) -> Sequence:
    (seq,) = scheduler.live_sequences()
    return seq


def test_computation_skips_a_passage() -> None:
    scheduler, executor = with_source()
    add(executor, make_request("a", TURNED, reuse=NonPrefixReuseParams(32, recompute=0.1, scope="me"), max_tokens=2))
    done = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        done += [(item.start, item.num_tokens) for item in plan.sequences]
        outputs = scheduler.update(plan, executor.execute(plan))
    # One token and four of the first passage's head; two and four of the second's; the last of the prompt; the first output.
    assert done == [(0, 5), (41, 6), (83, 1), (84, 1)]
    assert outputs[-1].cached_tokens == 72
    report = outputs[-1].context
    assert report is not None and (report.reused_passages, report.reused_tokens) == (2, 72)
    counters = scheduler.counters
    assert (counters.reused_passages, counters.reused_tokens) == (2, 72)
    assert counters.recomputed_tokens["cache_reuse"] == 8 and sum(counters.recomputed_tokens.values()) == 8


def test_preempted_sequence_releases_and_finds_passages_again() -> None:
    scheduler, executor = with_source(budget=3)
    held = scheduler.blocks.num_used_blocks
    assert held == 0
    add(executor, make_request("a", TURNED, reuse=ANY, max_tokens=6))
    step(scheduler, executor)
    seq = only(scheduler)
    assert seq.cache.num_reused_passages == 1 and len(seq.cache.passages) == 1
    scheduler._queues.preempt(seq)
    assert scheduler.blocks.num_used_blocks == 0 and seq.cache.layout.is_plain and not seq.cache.private
    outputs = finish(scheduler, executor)
    assert scheduler.counters.reused_passages == 3 and outputs[-1].context is not None
    assert outputs[-1].context.reused_passages == 2


def test_abort_releases_pending_passages() -> None:
    scheduler, executor = with_source(budget=3)
    add(executor, make_request("a", TURNED, reuse=ANY, max_tokens=6))
    step(scheduler, executor)
    assert only(scheduler).cache.passages
    scheduler.abort("a")
    assert_balanced(scheduler.blocks)


def test_passage_with_an_evicted_block_is_not_found() -> None:
    scheduler, executor = with_source(groups=[(30, None)])
    add(executor, make_request("other", [1] * 100, max_tokens=1, cache_salt="x"))
    finish(scheduler, executor)
    assert len(scheduler.blocks.passages) < 22
    add(executor, make_request("a", TURNED, reuse=ANY, max_tokens=1))
    assert finish(scheduler, executor)[-1].cached_tokens < 80  # without reading a wrong key


@pytest.mark.parametrize("window", [5, 30])
def test_passage_must_be_cached_in_every_group(window: int) -> None:
    scheduler, executor = with_source(groups=[(100, None), (100, window)])
    add(executor, make_request("a", TURNED, reuse=ANY, max_tokens=3))
    assert finish(scheduler, executor)[-1].cached_tokens == 80
    small = (window + 2) // 4 + 3  # blocks that were computed first are reused by later tokens
    scheduler, executor = with_source(groups=[(100, None), (small, window)], budget=4)
    add(executor, make_request("a", TURNED, reuse=ANY, max_tokens=3))
    assert finish(scheduler, executor)[-1].cached_tokens == 0


def test_passages_are_limited_by_the_pool() -> None:
    # 84 tokens are 21 blocks; each passage costs up to two more, half empty.
    scheduler, executor = with_source(groups=[(23, None)])
    add(executor, make_request("a", TURNED, reuse=ANY, max_tokens=1))
    outputs = finish(scheduler, executor)
    assert 0 < outputs[-1].cached_tokens <= 80
    scheduler, executor = with_source(groups=[(22, None)])
    add(executor, make_request("a", TURNED, reuse=ANY, max_tokens=1))
    finish(scheduler, executor)


def test_number_of_runs_is_limited_to_64() -> None:
    scheduler, executor = with_source(max_model_len=4000, groups=[(2000, None)], budget=5000)
    prompt = [token for _ in range(40) for token in (*FIRST, 1)]
    add(executor, make_request("a", prompt, reuse=ANY, max_tokens=1))
    outputs = finish(scheduler, executor)
    assert (
        outputs[-1].context is not None and outputs[-1].context.reused_passages == 32
    )  # one run each, and one after the last


def test_passage_excludes_the_last_token() -> None:
    scheduler, executor = with_source()
    add(executor, make_request("a", [1, *FIRST], reuse=ANY, max_tokens=5, n=3))
    outputs = finish(scheduler, executor)
    assert {(o.index, o.cached_tokens, o.context and o.context.reused_tokens) for o in outputs if o.finish_reason} == {
        (index, 39, 39) for index in range(3)
    }


@pytest.mark.parametrize(
    "options",
    [
        {"context": ContextRule(attention_window=20)},
        {"prompt_logprobs": 0},
        {"reuse": NonPrefixReuseParams(32, scope="another")},
        {"reuse": NonPrefixReuseParams(41, scope="me")},
        {"reuse": NonPrefixReuseParams(32, recompute=9, scope="me")},  # the remaining 31 are too few for a passage
        {"reuse": OFFER},
        {"reuse": None},
    ],
)
def test_no_passages_where_reuse_is_not_allowed(options: dict[str, object]) -> None:
    scheduler, executor = with_source()
    add(executor, make_request("a", TURNED, **{"reuse": ANY, "max_tokens": 2, **options}))  # type: ignore[arg-type]
    finish(scheduler, executor)
    assert scheduler.counters.reused_passages == 0


def test_no_passages_for_keys_that_will_be_rotated_again() -> None:
    scheduler, executor = with_source()
    rotation = FakeRotation("dynamic", "rotate", longest=10**6)
    add(executor, make_request("source", SOURCE[:20], max_tokens=1, reuse=OFFER), rotation)
    finish(scheduler, executor)
    add(
        executor,
        make_request("a", [1, *SOURCE[:20]], max_tokens=1, reuse=NonPrefixReuseParams(8, scope="me")),
        rotation,
    )
    finish(scheduler, executor)
    assert scheduler.counters.reused_passages == 0


def test_models_without_movable_keys_refuse_reuse() -> None:
    scheduler, executor, _ = make_scheduler()
    limits = ContextSizes(200, 4, 200, None, None, "this model learned its positions")
    scheduler.limits = limits
    with pytest.raises(RequestError, match="cache_reuse: this model learned its positions"):
        add(executor, make_request("a", TURNED, reuse=ANY))
    add(executor, make_request("b", TURNED, reuse=OFFER))


def test_slot_layout_with_a_passage() -> None:
    passage = Passage(10, 25, (b"",) * 5, offset=3, position=103)
    layout = SlotLayout.starting_at(0).with_passage(10, passage, 4)
    assert layout.runs == (SlotRun(0, 10, 0), SlotRun(15, 30, 103, -93), SlotRun(32, OPEN_END, 25))
    assert layout.slot_offset == 7 and layout.first_position == 0 and not layout.is_plain
    assert [layout.stored_position(slot) for slot in (0, 15, 29, 32)] == [0, 103, 117, 25]
    # Another passage follows directly, without a run between them.
    following = layout.with_passage(32, Passage(25, 29, (b"",), offset=0, position=0), 4)
    assert following.runs[2:] == (SlotRun(32, 36, 0, 25), SlotRun(36, OPEN_END, 29))
    assert following.slot_offset == 7
