"""Fair queueing between callers by tokens, on its own and in the scheduler."""

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


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.fixed_dictionaries({name: st.lists(st.integers(1, 50), min_size=30, max_size=30) for name in "ab"}),
    shares=st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 3.0]) for name in "ab"}),
)
def test_two_backlogged_callers_are_served_as_their_shares_are(
    lengths: dict[str, list[int]], shares: dict[str, float]
) -> None:
    """The paper's bound: served tokens over shares differ by no more than one request of each, as long as both wait."""
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
def test_one_caller_keeps_its_order_whatever_is_given_back(requests: list[tuple[int, int, bool]]) -> None:
    """Whether they wait or are served."""
    fair_queue, taken, begun = FairQueue(), list[FairQueueEntry](), 0
    for tokens, spared, served in requests:
        taken.append(fair_queue.enqueue("a", tokens))
        if served:
            fair_queue.start_service(taken[begun])
            begun += 1
        # Of an earlier request, perhaps a much longer one.
        fair_queue.refund("a", taken[max(0, begun - 1)], spared)
        starts = [queue_entry.start for queue_entry in taken]
        assert starts == sorted(starts)


def test_who_comes_late_stands_behind_what_runs_and_before_the_backlog() -> None:
    fair_queue = FairQueue()
    starts = [fair_queue.enqueue("many", 10) for _ in range(100)]
    for start in starts[:4]:
        fair_queue.start_service(start)
    late = fair_queue.enqueue("one", 10)
    assert starts[3].start <= late.start < starts[4].start
    # Idle time is not saved up: a caller that returns does not get it all back at once.
    assert fair_queue.enqueue("away", 10).start == late.start


def test_tokens_that_were_not_needed_are_not_counted() -> None:
    fair_queue = FairQueue()
    queue_entry = fair_queue.enqueue("a", 1000)
    fair_queue.start_service(queue_entry)
    fair_queue.refund("a", queue_entry, 990)
    assert fair_queue.enqueue("a", 1).start == 10
    fair_queue.refund("nobody", queue_entry, 5)  # no longer remembered


def test_those_that_wait_start_earlier_by_what_others_were_spared() -> None:
    """All alike, and not before now: what other callers received in the meantime is not taken from them."""
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


def test_who_gives_up_waiting_moves_nobody_before_it() -> None:
    fair_queue = FairQueue()
    fair_queue.start_service(fair_queue.enqueue("b", 10))
    first, _, last = (fair_queue.enqueue("a", 100) for _ in range(3))
    fair_queue.refund("a", last, 100)
    assert first.start == 0 and fair_queue.enqueue("a", 1).start == 200


def test_callers_who_do_not_matter_any_more_are_forgotten() -> None:
    fair_queue = FairQueue()
    for i in range(10_000):
        fair_queue.start_service(fair_queue.enqueue(f"caller {i}", 5))
        fair_queue.start_service(fair_queue.enqueue("regular", 5))
    assert len(fair_queue) < 200


@pytest.mark.parametrize("always_there", [0, 3])
def test_callers_who_come_once_are_forgotten(always_there: int) -> None:
    """Callers are addresses, and a client may have many. `always_there`: callers that keep the queue busy."""
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
def test_who_asked_before_waits_no_longer_for_it_than_the_others_got(others: list[str]) -> None:
    """One caller had 1,000 tokens while others were there; three are there at any time, the same ones or ever new ones."""
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
    # `busy`, the three and `a` are there: 1,000 for `a` are 1,000 for each of four, of whom `busy` was not served.
    assert 1000 < served <= 5000


def test_a_long_request_that_ends_lets_no_backlog_stand_before_who_comes_then() -> None:
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
def test_many_of_one_caller_at_once_count_once(spared: int) -> None:
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


def test_nobody_owes_anything_where_nobody_waited() -> None:
    scheduler, executor, _ = make_scheduler(max_num_seqs=1, prefix_caching=False)
    add(executor, replace(make_request("before", [1] * 50, max_tokens=100), caller="a"))
    ends_of(scheduler, executor)  # alone, and idle since
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


def test_the_scheduler_serves_callers_in_turn() -> None:
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


def test_a_priority_counts_for_more_than_a_turn() -> None:
    scheduler, executor, _ = make_scheduler(max_num_seqs=1, prefix_caching=False)
    for i in range(3):
        add(executor, replace(make_request(f"a-{i}", [i], max_tokens=1, priority=-1), caller="a"))
    add(executor, replace(make_request("b-0", [1], max_tokens=1), caller="b"))
    assert ends_of(scheduler, executor) == ["a-0", "a-1", "a-2", "b-0"]


def test_answers_shorter_than_allowed_are_counted_as_long_as_they_were() -> None:
    """A caller whose requests end early is not set back by the lengths it allowed."""
    scheduler, executor, _ = make_scheduler(max_num_seqs=1, prefix_caching=False)
    last = make_request("last", [1], max_tokens=1, priority=1)  # one request waits all the time
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


def test_what_waits_is_not_set_back_by_what_an_earlier_one_was_allowed() -> None:
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


def test_waiting_requests_have_a_bound_on_their_tokens_together() -> None:
    scheduler, executor, _ = make_scheduler(max_num_seqs=1, max_waiting_tokens=100)
    add(executor, make_request("running", [1], max_tokens=4))
    step(scheduler, executor)
    add(executor, make_request("long", [1] * 120, max_tokens=4))  # alone it may be as long as the context allows
    with pytest.raises(QueueFullError, match="120 tokens are waiting"):
        add(executor, make_request("more", [1], max_tokens=4))
    ends_of(scheduler, executor)
    add(executor, make_request("more", [1], max_tokens=4))
