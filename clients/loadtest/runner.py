"""Execution of load tests: sends the requests of a workload by a schedule, records the responses, and sweeps rates.

A sweep searches the highest request rate within the SLOs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import math
import selectors
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.clients.loadtest.load_plan import Arrivals, LoadPlan, intended_times
from windlass.clients.loadtest.results import (
    ABANDONED,
    Judgement,
    RequestRecord,
    RunResult,
    Summary,
    SweepResult,
    Verdict,
    percentile,
)
from windlass.clients.loadtest.target import ControlClient, LoadTestError, metric_changes
from windlass.clients.loadtest.timed_requests import Pool, RequestSender
from windlass.clients.loadtest.workload import Conversation, PreparedRequest, Workload, find_vocabulary

MIN_ACHIEVED_SHARE = 0.95  # of the offered rate, where a server keeps up
MIN_REQUESTS = 10
MIN_LATENCIES = (
    5.0  # shortest time of sending, in median latencies: a queue shows only once requests wait for responses
)

_DURATION_TOLERANCE = 0.9  # random gaps may end a run of a given duration a little early

Run = Callable[[float, int, float], Awaitable[RunResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """Parameters of the search.

    start: the first rate, in requests per second. share: of the requests that must meet every SLO. max_runs: limit of the
    search. precision: relative distance of the bounds at which it ends. min_seconds: shortest time of sending of a run.
    Raises LoadTestError for values out of range.
    """

    start: float = 1.0
    share: float = 0.99
    max_runs: int = 12
    precision: float = 0.05
    min_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise LoadTestError(f"the share of requests that meet the SLOs must be in (0, 1], got {self.share:g}")
        if self.max_runs < 1:
            raise LoadTestError(f"a sweep needs at least 1 run, got {self.max_runs}")
        if not 0 < self.min_seconds < math.inf:
            raise LoadTestError(f"a run of a sweep must send for more than 0 seconds, got {self.min_seconds:g}")
        if not 0 < self.start < math.inf:
            raise LoadTestError(f"a sweep must start at a finite rate above 0, got {self.start:g}")


async def find_highest_rate(
    run: Run, spec: SweepSpec, slo: Mapping[str, float], on_run: Callable[[Judgement, RunResult], None] | None = None
) -> SweepResult:
    """Find the highest rate whose run meets the SLOs: doubling or halving first, then bisection.

    run: makes one run for (rate, number of the run, shortest time of sending in seconds). The number lets each run draw
    prompts of its own, since a server that caches prompts would respond to the second run faster. on_run: called after each.
    A run that is too short to show a queue (see `judge_run`) is repeated with a longer time of sending, and ends the sweep
    where it cannot be longer. Raises LoadTestError without an SLO, and where the first run raises it; a later one ends the
    sweep.
    """
    if not slo:
        raise LoadTestError("a sweep needs an SLO to meet: give --slo, such as --slo ttft:500")
    runs: list[RunResult] = []
    judgements: list[Judgement] = []
    low: float | None = None  # met
    high: float | None = None  # not met
    rate, ended, seconds = spec.start, "found", spec.min_seconds
    while True:
        if len(runs) == spec.max_runs:
            ended = "runs"
            break
        try:
            result = await run(rate, len(runs), seconds)
        except LoadTestError:
            if not runs:
                raise
            ended = "failed"
            break
        judgement = judge_run(result, spec.share, spec.min_seconds)
        runs.append(result)
        judgements.append(judgement)
        if result.interrupted:
            ended = "interrupted"
            break
        if on_run is not None:
            on_run(judgement, result)
        if not result.completed and not result.abandoned and set(result.errors) <= {"connection"}:
            ended = "failed"  # a rate that is too high does not refuse every connection
            break
        if judgement.verdict is None:
            ended = "generator"
            break
        if judgement.verdict == "short":
            if judgement.sending_s < seconds * _DURATION_TOLERANCE:
                ended = "short"
                break
            seconds = max(judgement.needed_s, 2 * judgement.sending_s)
            continue
        low, high = (rate, high) if judgement.verdict == "met" else (low, rate)
        if low is None:
            assert high is not None
            rate = high / 2
        elif high is None:
            rate = low * 2
        elif high - low <= spec.precision * low:
            break
        else:
            rate = (low + high) / 2
    return SweepResult(
        runs=tuple(runs), judgements=tuple(judgements), highest_rate=low, slo=dict(slo), share=spec.share, ended=ended
    )


def judge_run(run: RunResult, share: float, min_seconds: float) -> Judgement:
    """Judge a run at an offered rate.

    share: of the requests that must meet every SLO. min_seconds: shortest time of sending. Raises ValueError for a run
    without an offered rate.
    """
    if run.offered_rate is None:
        raise ValueError("a run without an offered rate cannot be judged")
    intended = sorted(record.intended for record in run.records if record.scheduled)
    count = len(intended)
    # By the number of requests or by the clock: with random gaps either may be longer.
    sending = max(count / run.offered_rate, (intended[-1] - intended[0]) * count / (count - 1)) if count > 1 else 0.0
    latency = Summary.of(run.values("e2el")).p50 or 0.0
    needed = max(min_seconds, MIN_REQUESTS / run.offered_rate, MIN_LATENCIES * latency / 1000)
    achieved, pace, attainment = run.achieved_rate, run.pace, run.attainment
    slow = achieved is not None and achieved < MIN_ACHIEVED_SHARE * run.offered_rate
    # A growing queue delays responses, so that a longer run does not help; it shows in a short run, too.
    certain = slow and pace is not None and pace.slope - 2 * pace.error > 1 / MIN_ACHIEVED_SHARE
    verdict: Verdict | None
    if run.interrupted or run.abandoned.get("unsent"):
        verdict = None
    elif attainment < share:
        verdict = "missed"
    elif certain or (slow and sending >= needed):
        verdict = "behind"
    elif sending < needed or achieved is None:
        verdict = "short"
    else:
        verdict = "met"
    return Judgement(
        offered=run.offered_rate,
        achieved=achieved,
        attainment=attainment,
        sending_s=sending,
        needed_s=needed,
        verdict=verdict,
    )


TICK_SECONDS = 0.02

# Beyond these limits the figures describe the generator rather than the server.
BUSY_LIMIT = 0.9
LAG_LIMIT_MS = 25.0
_PROGRESS_SECONDS = 0.5

# Requests prepared before the run, so that their preparation does not disturb it. Further ones are prepared during the run.
_PREPARED_REQUESTS = 4096
_PREPARED_BYTES = 256 * 2**20
_PREPARATION_SLICE_S = 0.02  # the event loop runs between slices

# Pause after a failed connection, doubled with each further one.
_INITIAL_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0


@dataclass(slots=True)
class RunProgress:
    """Progress of a run.

    phase: "preparing", "warm-up" or "running". total: number of conversations, None where unknown. chunks: of streams, None
    where a run does not count them.
    """

    phase: str = "preparing"
    total: int | None = None
    ended: int = 0
    failed: int = 0
    running: int = 0
    chunks: int | None = 0


Progress = Callable[[RunProgress], None]


def measure(plan: LoadPlan, progress: Progress | None = None) -> RunResult:
    """`run_load` for callers without an event loop. It uses a MeasuredLoop, so that the result has the generator's load."""
    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        return runner.run(run_load(plan, progress=progress))


async def run_load(
    plan: LoadPlan,
    *,
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
    workload: Workload | None = None,
) -> RunResult:
    """Run the test. Raises LoadTestError where the server cannot be tested with this plan; later failures are counted.

    progress: called about twice a second. stop: once set, the run ends immediately with `interrupted` in its result.
    workload: of an earlier run of the same plan, see `prepare`.
    """
    async with ControlClient(plan.target) as control:
        workload = workload or await prepare(plan, control)
        return await _Run(plan, control, workload, progress, stop or asyncio.Event()).run()


async def prepare(plan: LoadPlan, control: ControlClient) -> Workload:
    """Query the server and its tokenizer for the workload of a plan. Raises LoadTestError."""
    server = await control.discover(plan.ready_s)
    spec = plan.workload
    if spec.chat and plan.vocab_size is not None:
        raise LoadTestError("--vocab-size makes prompts of token ids, which chats do not accept: omit it")
    if server.ignores_scalings and (spec.scalings or any(entry.has_scaling for entry in spec.trace)):
        raise LoadTestError(
            f"{plan.target.base} ({server.owner}) does not support rotary scaling per request and would ignore it: omit "
            "--rope-scaling, and rope_scaling in the trace"
        )
    text = plan.text_prompts or (spec.turns > 1 and not server.supports_token_ids)
    vocabulary = await find_vocabulary(control, server, chat=spec.chat, text=text, size=plan.vocab_size)
    if spec.ignore_eos is None:
        spec = dataclasses.replace(spec, ignore_eos=server.supports_ignore_eos)
    return Workload(spec, server=server, vocabulary=vocabulary, seed=plan.seed)


async def sweep_load(
    plan: LoadPlan,
    spec: SweepSpec,
    workload: Workload,
    *,
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
    on_run: Callable[[Judgement, RunResult], None] | None = None,
) -> SweepResult:
    """Find the highest rate: one run of the plan per rate, with its Arrivals at that rate. Raises LoadTestError.

    workload: see `prepare`; each run draws other prompts. A run sends more requests than the plan's count if its rate needs
    more to show a queue, within the plan's duration.
    """
    arrivals = plan.schedule
    if not isinstance(arrivals, Arrivals):
        raise LoadTestError("a sweep needs arrivals at a rate")

    async def run(rate: float, number: int, seconds: float) -> RunResult:
        count = plan.count
        if count is not None or plan.duration_s is None:
            count = max(count or 0, math.ceil(rate * seconds))
        schedule, seed = dataclasses.replace(arrivals, rate=rate), plan.seed + number
        run_plan = dataclasses.replace(plan, schedule=schedule, seed=seed, count=count)
        return await run_load(run_plan, progress=progress, stop=stop, workload=workload.with_seed(seed))

    return await find_highest_rate(run, spec, plan.slo, on_run)


async def report_progress(progress: Progress | None, snapshot: Callable[[], RunProgress]) -> None:
    """Call `progress` about twice a second until cancelled."""
    while progress is not None:
        with contextlib.suppress(OSError):  # losing the terminal or the disk of the output must not end the run
            progress(snapshot())
        await asyncio.sleep(_PROGRESS_SECONDS)


async def run_until_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Run `work` until it ends or `stop` is set; whether it ended by itself."""
    if stop.is_set():
        work.close()
        return False
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        return False
    task.result()
    return True


class IdleSelector(selectors.DefaultSelector):
    """A selector that sums the seconds it waited. In the remaining time the loop was busy, or had no processor."""

    waited = 0.0

    def select(self, timeout: float | None = None) -> Any:
        begin = time.perf_counter()
        try:
            return super().select(timeout)
        finally:
            self.waited += time.perf_counter() - begin


class MeasuredLoop(asyncio.SelectorEventLoop):
    """An event loop with measured idle time."""

    def __init__(self) -> None:
        self.idle = IdleSelector()
        super().__init__(self.idle)


class GeneratorHealth:
    """Load and lag of the load generator between `start` and `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._selector = self._loop.idle if isinstance(self._loop, MeasuredLoop) else None
        self._lags: list[float] = []
        self._sends: list[float] = []
        self._timer: asyncio.TimerHandle | None = None
        self._begin = self._cpu = self._waited = 0.0
        self._taken: tuple[float, float, float] | None = None
        self._unsent = 0

    def start(self) -> None:
        self._begin, self._cpu = time.perf_counter(), time.process_time()
        self._waited = self._selector.waited if self._selector else 0.0
        self._schedule()

    def record_send(self, late_seconds: float) -> None:
        """Record the delay of a request that the generator caused."""
        self._sends.append(late_seconds)

    def record_unsent(self) -> None:
        """Record a request without a file for its connection."""
        self._unsent += 1

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waited = (self._selector.waited if self._selector else 0.0) - self._waited
        self._taken = (time.perf_counter() - self._begin, time.process_time() - self._cpu, waited)

    def _schedule(self) -> None:
        due = self._loop.time() + TICK_SECONDS
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self._lags.append(self._loop.time() - due)
        self._schedule()

    def report(self, chunks: int) -> dict[str, Any]:
        """The run's `generator`, after `stop`. chunks: number of received chunks."""
        assert self._taken is not None
        wall, cpu, waited = self._taken
        wall = max(wall, 1e-9)
        busy = 1 - waited / wall if self._selector else None
        lag, sends = _percentiles_ms(self._lags), _percentiles_ms(self._sends)
        reasons = []
        if self._unsent:
            reasons.append(f"it had no file left for {self._unsent} connections: lower the load, or raise `ulimit -Hn`")
        # The shares of a very short run are not meaningful.
        if max(cpu / wall, busy or 0.0) > BUSY_LIMIT and wall > 10 * TICK_SECONDS:
            reasons.append("its event loop was busy nearly all the time: lower the load, or run several generators")
        if lag["p99"] > LAG_LIMIT_MS:
            reasons.append("its event loop ran late, so arrival times are late, too: give it its own processor core")
        elif sends["p99"] > LAG_LIMIT_MS:
            reasons.append("it sent requests late: lower the load, or give it its own processor core")
        return {
            "limited": bool(reasons),
            "reasons": reasons,
            "cpu_share": cpu / wall,
            "busy_share": busy,
            "loop_lag_ms": lag,
            "send_lag_ms": sends,
            "chunks_per_second": chunks / wall,
        }


def _percentiles_ms(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum in milliseconds; zeros for nothing measured."""
    if not seconds:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(value * 1000 for value in seconds)
    return {"p50": percentile(ordered, 50), "p99": percentile(ordered, 99), "max": ordered[-1]}


class _Run:
    """The state of one run."""

    def __init__(
        self, plan: LoadPlan, control: ControlClient, workload: Workload, progress: Progress | None, stop: asyncio.Event
    ) -> None:
        self._plan, self._control, self._workload = plan, control, workload
        self._progress, self._stop = progress, stop
        self._snapshot = RunProgress(total=plan.count)
        self._health = GeneratorHealth()
        self._pool = Pool(plan.target.base, plan.target.all_headers(), plan.target.tls())
        keep = plan.keep_text or workload.spec.turns > 1
        self._sender = RequestSender(self._pool, plan.timeout_s, keep=keep)
        self._records: list[RequestRecord] = []
        self._numbers = itertools.count()
        self._slots: asyncio.Semaphore | None = None
        self._problem: LoadTestError | None = None
        self._start = time.perf_counter()

    async def run(self) -> RunResult:
        ticker = asyncio.create_task(report_progress(self._progress, self._progress_snapshot))
        try:
            return await self._measure()
        finally:
            ticker.cancel()
            self._pool.close()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker  # also gives the connections time to close

    async def _measure(self) -> RunResult:
        plan = self._plan
        times = None
        if plan.schedule is not None:
            times = intended_times(plan.schedule, plan.seed, plan.count, plan.duration_s)
            self._snapshot.total = len(times)
        elif plan.workload.trace:
            self._snapshot.total = min(len(plan.workload.trace), plan.count or len(plan.workload.trace))
        await run_until_stopped(self._pool.resolve_address(), self._stop)
        await run_until_stopped(self._warm_up(), self._stop)
        source = await self._prepared(self._snapshot.total)
        before = await self._control.metrics()
        started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._snapshot.phase = "running"
        self._start = time.perf_counter()
        self._health.start()
        finished = await run_until_stopped(
            self._closed_loop(source) if times is None else self._open_loop(source, times), self._stop
        )
        self._health.stop()
        ended = self._now()
        if self._problem is not None:
            raise self._problem
        metrics = metric_changes(before, await self._control.metrics())
        # Requests that an interrupted run did not reach were not offered to the server.
        due = [time for time in times or () if finished or time <= ended]
        return self._result(started_at, ended, due, not finished, metrics)

    def _result(
        self, started_at: str, ended: float, due: list[float], interrupted: bool, metrics: dict[str, float]
    ) -> RunResult:
        plan, vocabulary = self._plan, self._workload.vocabulary
        records = sorted(self._records, key=lambda record: record.index)
        chunks = sum(len(record.chunks) for record in records)
        if not plan.keep_text:
            records = [dataclasses.replace(record, text=None, token_ids=None) for record in records]
        begin = min((record.intended for record in records), default=0.0)
        if not interrupted:
            ended = max((record.ended for record in records if record.ended is not None), default=ended)
        prompts = "token ids" if vocabulary.ids else "text of known length" if vocabulary.exact else "text"
        return RunResult(
            records=tuple(records),
            duration_s=max(0.0, ended - begin),
            offered_rate=None if plan.schedule is None else plan.schedule.offered_rate(due),
            settings={**plan.settings, "prompts": prompts, "seed": plan.seed},
            server={"url": plan.target.base, **self._workload.server.to_dict()},
            server_metrics=metrics,
            slo=dict(plan.slo),
            generator={**self._health.report(chunks), "monotonic_start": self._start},
            interrupted=interrupted,
            started_at=started_at,
        )

    async def _warm_up(self) -> None:
        """Send requests with other prompts, so that the server has not cached those of the measured part."""
        plan, workload = self._plan, self._workload
        if not plan.warmup:
            return
        self._snapshot.phase = "warm-up"
        source = itertools.islice(workload.with_other_prompts().conversations(), plan.warmup)

        async def client() -> None:
            for conversation in source:
                await self._sender.send_request(conversation.request, lambda record: None)

        await _run_all(client() for _ in range(min(plan.warmup, plan.concurrency or plan.warmup)))

    async def _prepared(self, total: int | None) -> Iterator[Conversation]:
        """The conversations of the run, of which the first are prepared now."""
        self._snapshot.phase = "preparing"
        source = self._workload.conversations()
        ready: deque[Conversation] = deque()
        size, max_requests = 0, _PREPARED_REQUESTS if total is None else min(total, _PREPARED_REQUESTS)
        pause = time.perf_counter() + _PREPARATION_SLICE_S
        while len(ready) < max_requests and size < _PREPARED_BYTES and not self._stop.is_set():
            conversation = next(source, None)
            if conversation is None:
                break
            ready.append(conversation)
            size += len(conversation.request.body)
            if time.perf_counter() > pause:
                await asyncio.sleep(0)
                pause = time.perf_counter() + _PREPARATION_SLICE_S
        return _prepared_then(ready, source)

    async def _closed_loop(self, source: Iterator[Conversation]) -> None:
        plan = self._plan
        assert plan.concurrency is not None
        numbers = itertools.count()

        async def client() -> None:
            pause = 0.0
            while plan.duration_s is None or self._now() < plan.duration_s:
                if self._snapshot.total is not None and next(numbers) >= self._snapshot.total:
                    return
                intended = self._now()
                conversation = next(source, None)
                if conversation is None:
                    return
                failed = await self._converse(conversation, intended) in ("connection", "unsent")
                # Connections to an absent server fail at once and would be tried thousands of times a second.
                pause = min(_MAX_BACKOFF_S, 2 * pause or _INITIAL_BACKOFF_S) if failed else 0.0
                if pause and plan.duration_s is not None:  # a run limited by its count ends soon anyway
                    await asyncio.sleep(max(0.0, min(pause, plan.duration_s - self._now())))

        await _run_all(client() for _ in range(min(plan.concurrency, self._snapshot.total or plan.concurrency)))

    async def _open_loop(self, source: Iterator[Conversation], times: list[float]) -> None:
        if self._plan.concurrency is not None:
            self._slots = asyncio.Semaphore(self._plan.concurrency)
        async with asyncio.TaskGroup() as group:
            for intended in times:
                # Sleep even when late, so that responses are read.
                await asyncio.sleep(max(0.0, intended - self._now()))
                conversation = next(source, None)
                if conversation is None:
                    return
                group.create_task(self._converse(conversation, intended))

    async def _converse(self, conversation: Conversation, intended: float) -> str:
        """Send all turns of a conversation, the first at `intended`. Returns the outcome of the last."""
        while True:
            record = await self._request(conversation.request, intended)
            try:
                if not record.completed or not conversation.advance(record):
                    break
            except LoadTestError as error:
                self._problem = error
                self._stop.set()
                break
            assert record.ended is not None
            intended = record.ended + conversation.think_time
            await asyncio.sleep(max(0.0, intended - self._now()))
        self._snapshot.ended += 1
        return record.outcome

    async def _request(self, request: PreparedRequest, intended: float) -> RequestRecord:
        index = next(self._numbers)
        full = self._slots is not None and self._slots.locked()
        async with self._slots or contextlib.nullcontext():
            # Waiting for a slot is intended. Only other delays are due to the generator.
            self._health.record_send(0.0 if full else max(0.0, self._now() - intended))
            self._snapshot.running += 1
            try:
                return await self._sender.send_request(
                    request, self._record, index=index, intended=intended, start=self._start
                )
            finally:
                self._snapshot.running -= 1

    def _record(self, record: RequestRecord) -> None:
        self._records.append(record)
        self._snapshot.failed += not record.completed and record.outcome not in ABANDONED
        if record.outcome == "unsent":
            self._health.record_unsent()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _progress_snapshot(self) -> RunProgress:
        self._snapshot.chunks = self._sender.chunks
        return self._snapshot


async def _run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for item in work:
            group.create_task(item)


def _prepared_then(ready: deque[Conversation], source: Iterator[Conversation]) -> Iterator[Conversation]:
    while ready:
        yield ready.popleft()
    yield from source
