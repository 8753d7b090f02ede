"""Search for the highest rate on simulated servers of known capacity."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import math
from random import Random

import pytest
from helpers.scripted_http import scripted_llm, stream
from rich.console import Console

from windlass.clients.loadtest import runner
from windlass.clients.loadtest.display import print_sweep
from windlass.clients.loadtest.load_plan import Arrivals, Lengths, LoadPlan, WorkloadSpec
from windlass.clients.loadtest.results import RequestRecord, RunResult, write_csv, write_json
from windlass.clients.loadtest.runner import SweepSpec, find_highest_rate, judge_run, prepare, sweep_load
from windlass.clients.loadtest.target import ControlClient, LoadTestError, Target
from windlass.clients.loadtest.target import Server as KnownServer
from windlass.clients.loadtest.workload import Vocabulary, Workload

SLO = {"ttft": 100.0}


def result(rate: float, good: int = 100, bad: int = 0, outcome: str = "completed", **fields) -> RunResult:
    """A run with `good` requests within the SLO and `bad` ones, which keep up with the rate."""
    records = [
        RequestRecord(
            index=n,
            intended=n / rate,
            sent=n / rate,
            chunks=(n / rate + (0.05 if n < good else 0.5),),
            ended=n / rate + 0.6,
            output_tokens=1,
        )
        for n in range(good + (bad if outcome == "completed" else 0))
    ]
    if outcome != "completed":
        ended = None if outcome == "connection" else 1.0
        records += [RequestRecord(index=good + n, intended=0.0, ended=ended, outcome=outcome) for n in range(bad)]
    return RunResult(records=tuple(records), duration_s=1.0, offered_rate=rate, slo=SLO, **fields)


class Server:
    """A server that meets the SLOs up to `capacity` requests per second."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.rates: list[float] = []
        self.numbers: list[int] = []

    async def run(self, rate: float, number: int, seconds: float) -> RunResult:
        self.rates.append(rate)
        self.numbers.append(number)
        count = max(100, math.ceil(rate * seconds))
        return result(rate, count) if rate <= self.capacity else result(rate, count // 2, bad=count // 2)


class Queue:
    """A server that handles one request after the other in 1/`capacity` seconds each, and adds a latency."""

    def __init__(self, capacity: float, latency: float = 0.01, count: int = 32, most_seconds: float = math.inf) -> None:
        self.capacity, self.latency, self.count, self.most_seconds = capacity, latency, count, most_seconds
        self.sent: list[tuple[float, int]] = []

    async def run(self, rate: float, number: int, seconds: float) -> RunResult:
        count = max(self.count, math.ceil(rate * min(seconds, self.most_seconds)))
        self.sent.append((rate, count))
        chance, free, now, records = Random(number), 0.0, 0.0, []
        for index in range(count):
            free = max(free, now) + 1 / self.capacity
            ended = free + self.latency * chance.uniform(0.7, 1.3)
            records.append(RequestRecord(index=index, intended=now, sent=now, chunks=(ended,), ended=ended))
            now += chance.expovariate(rate)
        return RunResult(records=tuple(records), duration_s=ended, offered_rate=rate, slo={"e2el": 60_000.0})


def search(run, slo=SLO, **fields):
    return asyncio.run(find_highest_rate(run, SweepSpec(**fields), slo))


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.3, 100.0])
def test_highest_rate_is_found_within_the_precision(capacity):
    server = Server(capacity)
    found = search(server.run, max_runs=40)
    assert found.ended == "found"
    assert found.highest_rate <= capacity < found.highest_rate * 1.05 * (1 + 1e-9)
    assert found.highest_rate in server.rates and server.numbers == list(range(len(server.rates)))
    if capacity >= 2:
        assert server.rates[:3] == [1, 2, 4]  # doubling first


def test_number_of_runs_is_limited():
    server = Server(7.3)
    found = search(server.run, max_runs=5)
    assert server.rates == [1, 2, 4, 8, 6] and found.highest_rate == 6 and found.ended == "runs"
    never = search(Server(0.0).run, max_runs=3)
    assert never.highest_rate is None and len(never.runs) == 3
    assert search(Server(1e9).run, max_runs=4).highest_rate == 8


def test_absent_server_ends_the_search():
    async def run(rate: float, number: int, seconds: float = 0.0) -> RunResult:
        return result(rate) if number < 2 else result(rate, good=0, bad=10, outcome="connection")

    found = search(run)
    assert (found.ended, found.highest_rate, len(found.runs)) == ("failed", 2, 3)


def test_refused_requests_miss_the_slo():
    async def run(rate: float, number: int, seconds: float = 0.0) -> RunResult:
        return result(rate) if rate <= 3 else result(rate, good=0, bad=10, outcome="http_429")

    found = search(run, max_runs=30)
    assert found.ended == "found" and 2.85 < found.highest_rate <= 3


def test_interrupted_run_ends_the_search():
    async def run(rate: float, number: int, seconds: float = 0.0) -> RunResult:
        return result(rate, interrupted=number == 2)

    found = search(run)
    assert found.interrupted and found.highest_rate == 2 and len(found.runs) == 3


def test_interrupted_run_gets_no_verdict():
    """The server completed the first ten of a hundred; ctrl-C interrupted the other ninety."""
    answered = result(10.0, good=10).records
    cut = [
        RequestRecord(index=n, intended=n / 10, sent=n / 10, ended=10.0, outcome="interrupted") for n in range(10, 100)
    ]
    run = RunResult(records=(*answered, *cut), duration_s=10.0, offered_rate=10.0, slo=SLO, interrupted=True)
    assert run.achieved_rate == pytest.approx(1.0) and run.pace.slope == pytest.approx(1.0)
    judged = judge_run(run, 0.99, 5.0)
    assert judged.verdict is None and judged.line() == "10 requests per second: 1 achieved, no verdict"
    left = tuple(dataclasses.replace(record, outcome="disconnected") for record in answered)
    assert dataclasses.replace(run, records=left).achieved_rate == pytest.approx(10.0)


def test_unsent_requests_end_the_search():
    async def run(rate: float, number: int, seconds: float) -> RunResult:
        count = max(100, math.ceil(rate * seconds))
        return result(rate, count) if number < 2 else result(rate, count, bad=5, outcome="unsent")

    found = search(run)
    assert (found.ended, found.highest_rate, len(found.runs)) == ("generator", 2, 3)
    assert found.judgements[-1].verdict is None
    console = Console(width=200, file=io.StringIO())
    print_sweep(found, console)
    assert "no file left for a connection" in console.file.getvalue()


@pytest.mark.parametrize(("count", "seconds", "sent"), [(100, 60.0, 250), (100, None, 250), (None, 60.0, None)])
def test_run_sends_as_many_requests_as_its_rate_needs(count, seconds, sent, monkeypatch):
    plans = []

    async def run_load(plan, **options):
        plans.append(plan)
        return result(50.0, 250)

    monkeypatch.setattr(runner, "run_load", run_load)
    spec = WorkloadSpec()
    target, schedule = Target(url="http://x"), Arrivals(1.0, 0.5)
    plan = LoadPlan(target=target, workload=spec, schedule=schedule, count=count, duration_s=seconds, slo=SLO)
    vocabulary = Vocabulary(pieces=[b"1"], ids=True, exact=True)
    workload = Workload(spec, server=KnownServer(model="m"), vocabulary=vocabulary)
    asyncio.run(sweep_load(plan, SweepSpec(start=50.0, max_runs=1, min_seconds=5.0), workload))
    assert [(plan.count, plan.duration_s, plan.schedule) for plan in plans] == [(sent, seconds, Arrivals(50.0, 0.5))]
    with pytest.raises(LoadTestError, match="arrivals"):
        asyncio.run(sweep_load(dataclasses.replace(plan, schedule=None), SweepSpec(), workload))


def test_run_that_cannot_start():
    async def first(rate: float, number: int, seconds: float) -> RunResult:
        raise LoadTestError("no server")

    with pytest.raises(LoadTestError, match="no server"):
        search(first)

    async def later(rate: float, number: int, seconds: float) -> RunResult:
        if number:
            raise LoadTestError("no server")
        return result(rate)

    found = search(later)
    assert (found.ended, found.highest_rate) == ("failed", 1)


def test_attainment_counts_failures_and_not_disconnects():
    assert result(1.0, good=3, bad=1, outcome="http_500").attainment == 0.75
    assert result(1.0, good=3, bad=1, outcome="disconnected").attainment == 1.0
    assert result(1.0, good=0).attainment == 0.0


@pytest.mark.parametrize(
    "fields",
    [{"start": 0.0}, {"start": math.inf}, {"share": 0.0}, {"share": 1.1}, {"max_runs": 0}, {"min_seconds": 0.0}],
)
def test_invalid_sweep_specs_are_refused(fields):
    with pytest.raises(LoadTestError):
        SweepSpec(**fields)


@pytest.mark.parametrize(("capacity", "latency"), [(20.0, 0.01), (20.0, 1.5), (3.0, 4.0)])
def test_rate_counts_only_if_the_server_keeps_up(capacity, latency):
    """With a high SLO, 32 requests at once meet it at any rate."""
    found = search(Queue(capacity, latency).run, max_runs=20)
    assert found.ended == "found" and 0.8 * capacity < found.highest_rate < 1.06 * capacity
    at = {judged.offered: judged for judged in found.judgements}
    assert at[found.highest_rate].verdict == "met" and at[found.highest_rate].achieved >= 0.95 * found.highest_rate
    behind = [judged for judged in found.judgements if judged.verdict == "behind"]
    assert behind and all(judged.achieved < 0.95 * judged.offered for judged in behind)
    assert any(judged.achieved == pytest.approx(capacity, rel=0.1) for judged in behind)
    assert "achieved, the server falls behind" in behind[0].line()


def test_runs_last_as_long_as_their_latencies_require():
    server = Queue(1000.0, latency=2.0)
    found = search(server.run, start=8.0, max_runs=3)
    assert [rate for rate, _ in server.sent] == [8, 8, 16]  # 5 s are too short for latencies of 2 s
    assert [judged.verdict for judged in found.judgements] == ["short", "met", "met"]
    assert server.sent[-1][1] >= 16 * 9 and found.highest_rate == 16


def test_run_that_cannot_be_long_enough_ends_the_search():
    found = search(Queue(1000.0, latency=2.0, count=1, most_seconds=5.0).run, start=8.0)
    assert (found.ended, found.highest_rate, len(found.runs)) == ("short", None, 2)
    console = Console(width=200, file=io.StringIO())
    print_sweep(found, console)
    text = console.file.getvalue()
    assert "no rate met ttft 100 ms; a longer run is needed to test 8: give --duration 1" in text
    assert "too short for these latencies" in text


def test_few_requests_at_an_excessive_rate_do_not_meet_it():
    """Thirty-two at once, all within the SLO: 20 per second were completed of the 2,048 that were offered."""
    run = asyncio.run(Queue(20.0, 0.01).run(2048.0, 0, 0.0))
    judged = judge_run(run, 0.99, 5.0)
    assert judged.attainment == 1.0 and judged.verdict == "behind" and 10 < judged.achieved < 40


def test_later_turns_do_not_count_for_the_achieved_rate():
    run = result(10.0, 60)
    later = [
        dataclasses.replace(r, index=100 + r.index, intended=5 * r.intended, ended=9 * r.intended, label="turn 2")
        for r in run.records
    ]
    both = dataclasses.replace(run, records=(*run.records, *later))
    assert both.achieved_rate == run.achieved_rate == pytest.approx(10.0)
    assert dataclasses.replace(run, offered_rate=None).achieved_rate is None


def test_a_sweep_needs_an_slo():
    with pytest.raises(LoadTestError, match="--slo"):
        search(Server(1).run, slo={})


@pytest.mark.slow
def test_runs_draw_different_prompts_and_files_contain_all_runs(tmp_path):
    spec = WorkloadSpec(input_len=Lengths.fixed(6), output_len=Lengths.fixed(2))

    async def sweep(url):
        plan = LoadPlan(
            target=Target(url=url),
            workload=spec,
            schedule=Arrivals(4.0),
            concurrency=None,
            count=3,
            slo={"e2el": 60_000.0},
            vocab_size=900,
        )
        async with ControlClient(plan.target) as control:
            workload = await prepare(plan, control)
        on_run = []
        found = await sweep_load(
            plan,
            SweepSpec(start=20.0, max_runs=2, min_seconds=0.5),
            workload,
            on_run=lambda judged, run: on_run.append(judged),
        )
        assert tuple(on_run) == found.judgements
        return found

    with scripted_llm(stream(0.001, 0.001)) as llm:
        found = asyncio.run(sweep(llm.url))
    assert len({tuple(body["prompt"]) for body in llm.bodies}) == len(llm.bodies)
    # The first run sends for half a second. The second rate depends on the load of the machine.
    assert found.runs[0].offered_rate == 20 and len(found.runs[0].records) == 10
    write_json(found, tmp_path / "sweep.json")
    data = json.loads((tmp_path / "sweep.json").read_text())
    assert data == json.loads(json.dumps(found.to_dict()))
    assert (data["format"], data["slo"]) == ("windlass-bench-sweep/2", {"e2el": 60000})
    assert [run["offered_rate"] for run in data["runs"]] == [rate["offered"] for rate in data["rates"]]
    assert data["highest_rate"] == max((r["offered"] for r in data["rates"] if r["verdict"] == "met"), default=None)
    assert all(rate["achieved"] == run["achieved_rate"] for rate, run in zip(data["rates"], data["runs"], strict=True))
    write_csv(found, tmp_path / "sweep.csv")
    rows = (tmp_path / "sweep.csv").read_text().splitlines()
    assert len(rows) == 1 + len(llm.bodies) and rows[-1].startswith(f"1,{found.judgements[1].offered:g}")
