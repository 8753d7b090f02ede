"""Fair queueing of callers by tokens, alone and in the scheduler."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from engine_helpers.fake_executor import FakeExecutor, add, make_request, make_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.engine.errors import QueueFullError
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.scheduling.fairness import FairQueue, FairQueueEntry
from windlass.engine.scheduling.scheduler import Scheduler


def step(scheduler: Scheduler, executor: FakeExecutor) -> list[RequestOutput]:
    plan = scheduler.schedule()
    return scheduler.update(plan, executor.execute(plan))


def ends_of(scheduler: Scheduler, executor: FakeExecutor) -> list[str]:
    """Run to the end; ids in the order in which they finish."""
    ends = []
    while scheduler.has_work():
        ends += [output.request_id for output in step(scheduler, executor) if output.finish_reason]
    return ends


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    lengths=st.fixed_dictionaries({name: st.lists(st.integers(1, 50), min_size=30, max_size=30) for name in "ab"}),
    shares=st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 3.0]) for name in "ab"}),
)
def test_backlogged_callers_are_served_by_their_shares(lengths: dict[str, list[int]], shares: dict[str, float]) -> None:
    """The paper's bound: served tokens over shares differ by at most one request of each while both are backlogged."""
    fair_queue = FairQueue()
    waiting = [
        (fair_queue.enqueue(name, tokens, shares[name]), i, name, tokens)
        for name in "ab"
        for i, tokens in enumerate(lengths[name])
    ]
    bound = sum(max(lengths[name]) / shares[name] for name in "ab")
    served: dict[str, float] = defaultdict(float)
    while waiting:
        chosen = min(waiting, key=lambda one: (one[0].start, *one[1:]))
        waiting.remove(chosen)
        queue_entry, _, name, tokens = chosen
        fair_queue.start_service(queue_entry)
        served[name] += tokens / shares[name]
        if {one[2] for one in waiting} == {"a", "b"}:
            assert abs(served["a"] - served["b"]) <= bound + 1e-9


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100), st.booleans()), min_size=1, max_size=40))
def test_order_of_one_caller_is_unaffected_by_refunds(requests: list[tuple[int, int, bool]]) -> None:
    """Both for waiting and for running requests."""
    fair_queue, taken, begun = FairQueue(), list[FairQueueEntry](), 0
    for tokens, spared, served in requests:
        taken.append(fair_queue.enqueue("a", tokens))
        if served:
            fair_queue.start_service(taken[begun])
            begun += 1
        # Of an earlier, possibly much longer request.
        fair_queue.refund("a", taken[max(0, begun - 1)], spared)
        starts = [queue_entry.start for queue_entry in taken]
        assert starts == sorted(starts)


def test_late_caller_is_ranked_before_the_backlog() -> None:
    fair_queue = FairQueue()
    starts = [fair_queue.enqueue("many", 10) for _ in range(100)]
    for start in starts[:4]:
        fair_queue.start_service(start)
    late = fair_queue.enqueue("one", 10)
    assert starts[3].start <= late.start < starts[4].start
    # Idle time gives no credit to a returning caller.
    assert fair_queue.enqueue("away", 10).start == late.start


def test_unused_tokens_are_not_counted() -> None:
    fair_queue = FairQueue()
    queue_entry = fair_queue.enqueue("a", 1000)
    fair_queue.start_service(queue_entry)
    fair_queue.refund("a", queue_entry, 990)
    assert fair_queue.enqueue("a", 1).start == 10
    fair_queue.refund("nobody", queue_entry, 5)  # removed


def test_waiting_requests_start_earlier_after_refunds() -> None:
    """All equally and not before now, so that tokens of other callers in the meantime are not lost."""
    fair_queue = FairQueue()
    served, soon, later = (fair_queue.enqueue("a", tokens) for tokens in (1000, 500, 10))
    fair_queue.start_service(served)
    for start in (0, 300):
        queue_entry = fair_queue.enqueue("b", 300)
        assert queue_entry.start == start
        fair_queue.start_service(queue_entry)
    assert (soon.start, later.start) == (1000, 1500)
    fair_queue.refund("a", served, 600)
    assert (soon.start, later.start) == (400, 900) and fair_queue.order_changed() and not fair_queue.order_changed()
    assert fair_queue.enqueue("a", 5).start == 910
    fair_queue.refund("a", served, 300)
    assert (soon.start, later.start) == (300, 800)
    assert served.start == 0, "what is served keeps its place"
    assert fair_queue.enqueue("a", 1).start == 815


def test_cancelled_waiting_request_does_not_advance_others() -> None:
    fair_queue = FairQueue()
    fair_queue.start_service(fair_queue.enqueue("b", 10))
    first, _, last = (fair_queue.enqueue("a", 100) for _ in range(3))
    fair_queue.refund("a", last, 100)
    assert first.start == 0 and fair_queue.enqueue("a", 1).start == 200


def test_irrelevant_callers_are_removed() -> None:
    fair_queue = FairQueue()
    for i in range(10_000):
        fair_queue.start_service(fair_queue.enqueue(f"caller {i}", 5))
        fair_queue.start_service(fair_queue.enqueue("regular", 5))
    assert len(fair_queue) < 200


@pytest.mark.parametrize("always_there", [0, 3])
def test_single_request_callers_are_removed(always_there: int) -> None:
    """Callers are addresses, of which a client may have many. always_there: callers that keep the queue busy."""
    fair_queue = FairQueue()
    for i in range(always_there):
        fair_queue.enqueue(f"there {i}", 1 << 30)
    most = 0
    for i in range(10_000):
        fair_queue.start_service(fair_queue.enqueue(f"address {i}", 5))
        fair_queue.advance(5 * (i + 1))
        fair_queue.request_ended(f"address {i}")
        most = max(most, len(fair_queue))
    assert most < 300 and len(fair_queue) <= (always_there and most)


@pytest.mark.parametrize("others", [["n0", "n1", "n2"], [f"n{i}" for i in range(3, 1000)]])
def test_earlier_tokens_delay_a_caller_by_the_share_of_others(others: list[str]) -> None:
    """One caller had 1,000 tokens while others were active; three are active at any time, the same or new ones."""
    fair_queue = FairQueue()
    fair_queue.enqueue("busy", 1 << 30)
    fair_queue.start_service(fair_queue.enqueue("a", 1000))
    fair_queue.advance(1000)
    fair_queue.request_ended("a")
    waiting = [(fair_queue.enqueue(name, 10), name) for name in others[:3]]
    waiting.append((fair_queue.enqueue("a", 10), "a"))
    served = 1000
    for name in [*others[3:], *others * 1000]:
        waiting.sort(key=lambda one: (one[0].start, one[1]))
        queue_entry, first = waiting.pop(0)
        if first == "a":
            break
        fair_queue.start_service(queue_entry)
        served += 10
        fair_queue.advance(served)
        fair_queue.request_ended(first)
        waiting.append((fair_queue.enqueue(name if len(others) > 3 else first, 10), name if len(others) > 3 else first))
    # `busy`, the three and `a` are active: 1,000 for `a` are 1,000 for each of four, of whom `busy` was not served.
    assert 1000 < served <= 5000


def test_end_of_a_long_request_does_not_advance_the_backlog() -> None:
    """Computed tokens count at the time of the computation, not all at once for those who are active at its end."""
    fair_queue = FairQueue()
    fair_queue.start_service(long := fair_queue.enqueue("long", 100_000))
    for computed in range(100, 100_001, 100):
        fair_queue.advance(computed)
    backlog = [fair_queue.enqueue("backlog", 1000) for _ in range(100)]
    fair_queue.refund("long", long, 0)
    fair_queue.request_ended("long")
    assert backlog[0].start <= fair_queue.enqueue("new", 1000).start < backlog[1].start


@pytest.mark.parametrize("spared", [0, 90])
def test_concurrent_requests_of_one_caller_count_once(spared: int) -> None:
    """A request that starts advances the time, and its computed tokens do not advance it again."""
    fair_queue = FairQueue()
    starts = [fair_queue.enqueue("many", 100) for _ in range(192)]
    computed = 0
    for first in (0, 64):
        for start in starts[first : first + 64]:
            fair_queue.start_service(start)
        for start in starts[first : first + 64]:
            computed += 100 - spared
            fair_queue.advance(computed)
            fair_queue.refund("many", start, spared)
            fair_queue.request_ended("many")
        # After a refund the first waiting request starts now, and has waited for longer.
        assert (
            starts[first + 63].start <= fair_queue.enqueue("new", 100).start <= starts[first + 64 + (spared > 0)].start
        )
        fair_queue.request_ended("new")


def test_tokens_without_competition_do_not_count() -> None:
    scheduler, executor, _ = make_scheduler(max_num_seqs=1, prefix_caching=False)
    add(executor, replace(make_request("before", [1] * 50, max_tokens=100), caller="a"))
    ends_of(scheduler, executor)  # alone, and idle since then
    for i in range(3):
        add(executor, replace(make_request(f"new-{i}", [2], max_tokens=3), caller=f"new {i}"))
    step(scheduler, executor)
    add(executor, replace(make_request("again", [1], max_tokens=3), caller="a"))
    ends = []
    while "again" not in ends:
        for output in step(scheduler, executor):
            if output.finish_reason:
                ends.append(output.request_id)
                add(executor, replace(make_request(f"more-{len(ends)}", [2], max_tokens=3), caller=f"more {len(ends)}"))
    assert len(ends) <= 5


def test_scheduler_serves_callers_in_turn() -> None:
    scheduler, executor, _ = make_scheduler(max_num_seqs=1, prefix_caching=False)
    for i in range(6):
        add(executor, replace(make_request(f"many-{i}", [i], max_tokens=3), caller="many"))
    first = step(scheduler, executor)
    for i in range(2):
        add(executor, replace(make_request(f"late-{i}", [i], max_tokens=3), caller="late"))
    assert not any(output.finish_reason for output in first)
    assert ends_of(scheduler, executor) == [
        "many-0",
        "late-0",
        "many-1",
        "late-1",
        "many-2",
        "many-3",
        "many-4",
        "many-5",
    ]


def test_priority_precedes_fairness() -> None:
    scheduler, executor, _ = make_scheduler(max_num_seqs=1, prefix_caching=False)
    for i in range(3):
        add(executor, replace(make_request(f"a-{i}", [i], max_tokens=1, priority=-1), caller="a"))
    add(executor, replace(make_request("b-0", [1], max_tokens=1), caller="b"))
    assert ends_of(scheduler, executor) == ["a-0", "a-1", "a-2", "b-0"]


def test_short_responses_count_their_actual_length() -> None:
    """A caller whose requests end early is not delayed by their maximum lengths."""
    scheduler, executor, _ = make_scheduler(max_num_seqs=1, prefix_caching=False)
    last = make_request("last", [1], max_tokens=1, priority=1)  # one request always waits
    add(executor, replace(last, caller="patient"))
    for i in range(3):
        request_id = f"short-{i}"
        add(executor, replace(make_request(request_id, [i], max_tokens=150), caller="short"))
        step(scheduler, executor)
        scheduler.abort(request_id)
    add(executor, replace(make_request("short", [1], max_tokens=1), caller="short"))
    for name in ("other-0", "other-1"):
        add(executor, replace(make_request(name, [2] * 40, max_tokens=1), caller="other"))
    assert ends_of(scheduler, executor) == ["other-0", "short", "other-1", "last"]


def test_waiting_request_is_not_delayed_by_unused_tokens_of_an_earlier_one() -> None:
    """It is ranked as if it had arrived after the end of the other."""
    scheduler, executor, _ = make_scheduler(max_num_seqs=1, prefix_caching=False)
    add(executor, replace(make_request("a-0", [1], max_tokens=190), caller="a"))
    step(scheduler, executor)
    add(executor, replace(make_request("a-1", [2], max_tokens=2), caller="a"))
    add(executor, replace(make_request("new-0", [3], max_tokens=5), caller="new 0"))
    step(scheduler, executor)
    scheduler.abort("a-0")
    ends: list[str] = []
    while "a-1" not in ends:
        for output in step(scheduler, executor):
            if output.finish_reason:
                ends.append(output.request_id)
                add(executor, replace(make_request(f"new-{len(ends)}", [3], max_tokens=5), caller=f"new {len(ends)}"))
    assert len(ends) <= 3


def test_total_tokens_of_waiting_requests_are_limited() -> None:
    scheduler, executor, _ = make_scheduler(max_num_seqs=1, max_waiting_tokens=100)
    add(executor, make_request("running", [1], max_tokens=4))
    step(scheduler, executor)
    add(executor, make_request("long", [1] * 120, max_tokens=4))  # alone it may fill the context
    with pytest.raises(QueueFullError, match="120 prompt tokens are already waiting"):
        add(executor, make_request("more", [1], max_tokens=4))
    ends_of(scheduler, executor)
    add(executor, make_request("more", [1], max_tokens=4))
