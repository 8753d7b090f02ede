"""The entire server on a simulated operating system: many seeds, reproducible runs, and planted defects that are detected.

The message of a failing seed has the command that runs it again: `SIMULATION_SEED=N pytest tests/api/simulation -k replay`.
With `SIMULATION_SEEDS=FIRST-LAST` the longest form uses other seeds.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from simulation.world import Report, simulate

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.block_pool import BlockPool
from windlass.engine.client.process_client import ProcessClient
from windlass.engine.client.replicated_client import ReplicatedClient
from windlass.engine.client.request_router import RequestRouter
from windlass.engine.core.messages import Message, StepDone
from windlass.engine.errors import EngineDeadError
from windlass.engine.scheduling.request_queue import Deadlines, SchedulerQueues
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.server.http.http_protocol import HttpProtocol
from windlass.server.serving.streaming import Exchange
from windlass.server.text.workers.pool import FairLimiter

FIRST_LONG = 1_000  # first seed of the long forms


def describe(report: Report) -> str:
    """Violations of a seed, its last faults, and the command that runs it again."""
    lines = [
        f"seed {report.seed} has {len(report.violations)} violations",
        *(f"  {violation[:1000]}" for violation in report.violations[:8]),
        f"  faults: {[f'{at:.3f} {kind} {of}'.strip() for at, kind, of in report.faults.log[-20:]]}",
        f"to run it again: SIMULATION_SEED={report.seed} SIMULATION_REPLICAS={report.replicas} "
        ".venv/bin/pytest tests/api/simulation -k replay",
    ]
    return "\n".join(lines)


def run_seeds(seeds: range, replicas: int = 1) -> list[Report]:
    """Run seeds until one fails."""
    reports = []
    for seed in seeds:
        report = simulate(seed, replicas)
        assert not report.violations, describe(report)
        reports.append(report)
    return reports


def test_first_seeds_have_no_violations() -> None:
    run_seeds(range(10))
    run_seeds(range(10), replicas=2)


@pytest.mark.slow
def test_seeds_have_no_violations() -> None:
    reports = run_seeds(range(60))
    # The seeds must cover most faults and outcomes.
    outcomes = Counter(record.status for report in reports for record in report.records)
    codes = {code for report in reports for record in report.records for code in record.codes}
    assert outcomes[200] > 150, outcomes
    assert codes >= {"deadline_exceeded", "engine_unavailable", "internal", "queue_full"}, codes
    assert sum(report.engines > 1 for report in reports) > 5
    happened = {kind for report in reports for _, kind, _ in report.faults.log}
    assert len(happened) > 10, happened


@pytest.mark.slow
def test_seeds_with_two_engines_have_no_violations() -> None:
    """A death fails only the started requests of the engine, if another engine is ready."""
    reports = run_seeds(range(40), replicas=2)
    codes = {code for report in reports for record in report.records for code in record.codes}
    assert "engine_unavailable" in codes
    assert sum(report.engines > 2 for report in reports) > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_further_seeds_have_no_violations() -> None:
    run_seeds(range(FIRST_LONG, FIRST_LONG + 100))
    run_seeds(range(FIRST_LONG, FIRST_LONG + 60), replicas=2)


@pytest.mark.soak
@pytest.mark.timeout(8 * 3600)
def test_ten_thousand_seeds_have_no_violations() -> None:
    first, _, last = os.environ.get("SIMULATION_SEEDS", "").partition("-")
    seeds = range(int(first), int(last) + 1) if first and last else range(2 * FIRST_LONG, 2 * FIRST_LONG + 10_000)
    run_seeds(seeds)


@pytest.mark.slow
def test_runs_of_a_seed_are_equal() -> None:
    for seed in (3, 7, 11, 20):
        first, second = simulate(seed), simulate(seed)
        assert first.digest == second.digest and first.seconds == second.seconds
        assert first.faults.log == second.faults.log
    assert simulate(3).digest != simulate(7).digest


@pytest.mark.skipif("SIMULATION_SEED" not in os.environ, reason="runs one seed: set SIMULATION_SEED")
def test_replay() -> None:
    report = simulate(int(os.environ["SIMULATION_SEED"]), int(os.environ.get("SIMULATION_REPLICAS", "1")))
    for record in report.records:
        print(record.ask.request_id, record.ask.path, record.status, record.codes, record.broken, record.finishes)
    print(*(f"{at:.3f} {kind} {of}" for at, kind, of in report.faults.log), sep="\n")
    assert not report.violations, describe(report)


# ---- planted defects -----------------------------------------------------------------------------------------------------
ENOUGH = 80  # seeds that detect every planted defect
# Seeds that detect a defect early, other than the first. Under others some requests preempt each other for a simulated hour.
DETECTED_BY = {
    "blocks_of_a_cancelled_request_stay_held": 2,
    "preempted_request_loses_a_token": 18,
    "engine_is_not_watched": 23,
    "slow_reader_counts_as_load_of_the_engine": 64,
    "every_death_is_reported": 38,
    "started_request_starts_again": 30,
    "requests_of_a_dead_engine_are_forgotten": 7,
}
Planted = dict[str, Callable[[], AbstractContextManager[Any]]]
DEFECTS: Planted = {}
REPLICA_DEFECTS: Planted = {}


def defect(owner: type, name: str, defects: Planted = DEFECTS) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that replaces a method. It gets the method before its arguments."""

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def plant() -> Iterator[None]:
            original = getattr(owner, name)

            def patched(*args: Any, **options: Any) -> Any:
                return replacement(original, *args, **options)

            with mock.patch.object(owner, name, patched):
                yield

        defects[replacement.__name__] = plant
        return replacement

    return register


@defect(Scheduler, "abort")
def blocks_of_a_cancelled_request_stay_held(abort: Any, self: Scheduler, request_id: str) -> None:
    with mock.patch.object(BlockManager, "free", lambda self, handle: None):
        abort(self, request_id)


@defect(Scheduler, "_append")
def last_token_is_dropped(append: Any, *args: Any, **options: Any) -> Any:
    output = append(*args, **options)
    return replace(output, token_ids=output.token_ids[:-1]) if output.finish_reason == "length" else output


@defect(RequestRouter, "deliver")
def output_is_delivered_to_another_stream(deliver: Any, self: RequestRouter, message: Message) -> bool:
    if isinstance(message, StepDone) and len(message.outputs) > 1:
        first, second, *rest = message.outputs
        if first.error is second.error is first.finish_reason is second.finish_reason is None:
            exchanged = replace(first, request_id=second.request_id), replace(second, request_id=first.request_id)
            first, second = exchanged
        message = replace(message, outputs=(first, second, *rest))
    return bool(deliver(self, message))


@defect(Exchange, "_send_error")
async def error_does_not_release_its_caller(send_error: Any, self: Exchange, error: Any) -> None:
    callers, caller = self._state.callers, self._scope.get("windlass.caller") or ""
    callers._in_flight[callers.key_of(caller).name] += 1
    await send_error(self, error)


@defect(RequestRouter, "deliver")
def message_is_delivered_twice(deliver: Any, self: RequestRouter, message: Message) -> bool:
    count = self.__dict__["delivered"] = self.__dict__.get("delivered", 0) + isinstance(message, StepDone)
    if count % 7 == 0:
        deliver(self, message)
    return bool(deliver(self, message))


@defect(SchedulerQueues, "preempt")
def preempted_request_loses_a_token(preempt: Any, self: SchedulerQueues, seq: Any) -> None:
    preempt(self, seq)
    if seq.num_output_tokens > 1:
        seq.token_ids.pop()


@defect(ProcessClient, "_watch")
async def engine_is_not_watched(watch: Any, self: ProcessClient, *args: Any) -> None:
    pass


@defect(HttpProtocol, "pause_writing")
def writers_never_pause(pause: Any, self: HttpProtocol) -> None:
    pass


@defect(BlockPool, "take")
def evicted_block_is_still_found(take: Any, self: BlockPool, private: bool = False) -> int:
    before = dict(self.cached)
    block: int = take(self, private)
    self.cached.update(before)
    return block


@defect(RequestRouter, "fail_all")
def requests_of_a_dead_engine_are_forgotten(fail_all: Any, self: RequestRouter, make_error: Any) -> None:
    self._streams.clear()


@defect(FairLimiter, "_release")
def place_in_a_lane_is_lost(release: Any, self: FairLimiter) -> None:
    if self._queues:
        release(self)


@defect(RequestRouter, "generate")
async def request_continues_after_its_client_left(
    generate: Any, self: RequestRouter, request: Any
) -> AsyncGenerator[Any, None]:
    outputs = generate(self, request)
    leaked = self.__dict__.setdefault("leaked", [])
    async for output in outputs:
        leaked.append(outputs)  # never closed
        yield output


@contextmanager
def deadlines_are_ignored() -> Iterator[None]:
    init = Exchange.__init__

    def patched(self: Exchange, *args: Any, deadline: float | None = None, **options: Any) -> None:
        init(self, *args, **options)

    with (
        mock.patch.object(Exchange, "__init__", patched),
        mock.patch.object(Deadlines, "add", lambda *args: None),
    ):
        yield


def slow_reader_counts_as_load_of_the_engine() -> AbstractContextManager[Any]:
    all_streams = property(lambda self: len(self._streams) + len(self._aborting))
    return mock.patch.object(RequestRouter, "in_flight", all_streams)


DEFECTS |= {plant.__name__: plant for plant in (deadlines_are_ignored, slow_reader_counts_as_load_of_the_engine)}


@defect(ReplicatedClient, "_has_alternative", REPLICA_DEFECTS)
def every_death_is_reported(has_alternative: Any, self: ReplicatedClient, tried: Any) -> bool:
    """Also to requests that another engine could compute."""
    return False


@defect(ReplicatedClient, "generate", REPLICA_DEFECTS)
async def started_request_starts_again(
    generate: Any, self: ReplicatedClient, request: Any
) -> AsyncGenerator[Any, None]:
    while True:
        try:
            async for output in generate(self, request):
                yield output
            return
        except EngineDeadError:
            if self.state != "ready":
                raise


@defect(ReplicatedClient, "_choose", REPLICA_DEFECTS)
def replica_stays_charged(choose: Any, self: ReplicatedClient, digests: Any, tried: Any) -> Any:
    replica = choose(self, digests, tried)
    replica.in_flight += bool(tried)
    return replica


def seeds_for(defect: str, count: int) -> list[int]:
    first = DETECTED_BY.get(defect, 0)
    return [*range(first, count), *range(first)]


@pytest.mark.parametrize("defect", REPLICA_DEFECTS)
def test_planted_defects_of_two_engines_are_detected(defect: str) -> None:
    for seed in seeds_for(defect, 3 * ENOUGH):
        with REPLICA_DEFECTS[defect]():
            if simulate(seed, replicas=2).violations:
                return
    raise AssertionError(f"{defect}: none of {3 * ENOUGH} seeds detects it")


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_detected(defect: str) -> None:
    for seed in seeds_for(defect, ENOUGH):
        with DEFECTS[defect]():
            if simulate(seed).violations:
                return
    raise AssertionError(f"{defect}: none of {ENOUGH} seeds detects it")
