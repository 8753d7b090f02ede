"""The search for the highest rate, over servers whose limit is known."""

from __future__ import annotations

import asyncio
import json

import pytest
from helpers.scripted_llm import scripted_llm, stream

from windlass.clients.loadtest.errors import LoadTestError
from windlass.clients.loadtest.export import write_csv, write_sweep
from windlass.clients.loadtest.lengths import Lengths
from windlass.clients.loadtest.results import RequestRecord, RunResult
from windlass.clients.loadtest.runner import LoadPlan, prepare, sweep_load
from windlass.clients.loadtest.schedule import Arrivals
from windlass.clients.loadtest.sweep import SweepSpec, attainment, find_highest_rate
from windlass.clients.loadtest.target import Control, Target
from windlass.clients.loadtest.workload import WorkloadSpec

SLO = {"ttft": 100.0}


def result(rate: float, good: int = 100, bad: int = 0, outcome: str = "completed", **fields) -> RunResult:
    """A run of so many requests inside the SLO and so many that are not."""
    records = [
        RequestRecord(index=n, intended=0.0, sent=0.0, chunks=(0.05 if n < good else 0.5,), ended=1.0, output_tokens=1)
        for n in range(good + (bad if outcome == "completed" else 0))
    ]
    if outcome != "completed":
        records += [RequestRecord(index=good + n, intended=0.0, outcome=outcome) for n in range(bad)]
    return RunResult(records=tuple(records), duration_s=1.0, offered_rate=rate, slo=SLO, **fields)


class Server:
    """Meets the SLOs up to `capacity` requests per second."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.rates: list[float] = []
        self.numbers: list[int] = []

    async def run(self, rate: float, number: int) -> RunResult:
        self.rates.append(rate)
        self.numbers.append(number)
        return result(rate) if rate <= self.capacity else result(rate, good=50, bad=50)


def search(run, slo=SLO, **fields):
    return asyncio.run(find_highest_rate(run, SweepSpec(**fields), slo))


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.3, 100.0])
def test_the_highest_rate_is_found_within_the_precision(capacity):
    server = Server(capacity)
    found = search(server.run, most_runs=40)
    assert found.ended == "found"
    assert found.highest_rate <= capacity < found.highest_rate * 1.05 * (1 + 1e-9)
    assert found.highest_rate in server.rates and server.numbers == list(range(len(server.rates)))
    if capacity >= 2:
        assert server.rates[:3] == [1, 2, 4]  # doubling first


def test_the_number_of_runs_is_bounded_and_the_best_so_far_counts():
    server = Server(7.3)
    found = search(server.run, most_runs=5)
    assert server.rates == [1, 2, 4, 8, 6] and found.highest_rate == 6 and found.ended == "runs"
    never = search(Server(0.0).run, most_runs=3)
    assert never.highest_rate is None and len(never.runs) == 3
    assert search(Server(1e9).run, most_runs=4).highest_rate == 8


def test_a_server_that_stops_answering_ends_the_search():
    async def run(rate: float, number: int) -> RunResult:
        return result(rate) if number < 2 else result(rate, good=0, bad=10, outcome="connection")

    found = search(run)
    assert (found.ended, found.highest_rate, len(found.runs)) == ("failed", 2, 3)


def test_a_server_that_refuses_too_much_has_only_missed_the_slo():
    async def run(rate: float, number: int) -> RunResult:
        return result(rate) if rate <= 3 else result(rate, good=0, bad=10, outcome="http_429")

    found = search(run, most_runs=30)
    assert found.ended == "found" and 2.85 < found.highest_rate <= 3


def test_an_interrupted_run_ends_the_search_and_proves_nothing():
    async def run(rate: float, number: int) -> RunResult:
        return result(rate, interrupted=number == 2)

    found = search(run)
    assert found.interrupted and found.highest_rate == 2 and len(found.runs) == 3


def test_a_run_that_cannot_begin():
    async def first(rate: float, number: int) -> RunResult:
        raise LoadTestError("no server")

    with pytest.raises(LoadTestError, match="no server"):
        search(first)

    async def later(rate: float, number: int) -> RunResult:
        if number:
            raise LoadTestError("no server")
        return result(rate)

    found = search(later)
    assert (found.ended, found.highest_rate) == ("failed", 1)


def test_failures_miss_the_slo_and_clients_that_left_do_not_count():
    assert attainment(result(1.0, good=3, bad=1, outcome="http_500")) == 0.75
    assert attainment(result(1.0, good=3, bad=1, outcome="disconnected")) == 1.0
    assert attainment(result(1.0, good=0)) == 0.0


@pytest.mark.parametrize("fields", [{"start": 0.0}, {"share": 0.0}, {"share": 1.1}, {"most_runs": 0}])
def test_what_makes_no_sweep_is_refused(fields):
    with pytest.raises(LoadTestError):
        SweepSpec(**fields)


def test_a_sweep_needs_an_slo():
    with pytest.raises(LoadTestError, match="--slo"):
        search(Server(1).run, slo={})


def test_each_run_draws_prompts_of_its_own_and_the_files_hold_all_runs(tmp_path):
    spec = WorkloadSpec(input_len=Lengths.fixed(6), output_len=Lengths.fixed(2))

    async def sweep(url):
        plan = LoadPlan(
            target=Target(url=url),
            workload=spec,
            schedule=Arrivals(50.0),
            concurrency=None,
            count=3,
            slo={"e2el": 60_000.0},
            vocab_size=900,
        )
        async with Control(plan.target) as control:
            server, workload = await prepare(plan, control)
        told = []
        found = await sweep_load(
            plan,
            SweepSpec(start=50.0, most_runs=3),
            Arrivals,
            workload=workload,
            server=server,
            told=lambda *seen: told.append((seen[0], seen[2])),
        )
        assert told == [(50, True), (100, True), (200, True)]
        return found

    with scripted_llm(stream(0.001, 0.001)) as llm:
        found = asyncio.run(sweep(llm.url))
    assert len({tuple(body["prompt"]) for body in llm.bodies}) == len(llm.bodies) == 9
    assert found.highest_rate == 200
    write_sweep(found, tmp_path / "sweep.json")
    data = json.loads((tmp_path / "sweep.json").read_text())
    assert data == json.loads(json.dumps(found.to_dict()))
    assert (data["format"], data["slo"], data["highest_rate"]) == ("windlass-bench-sweep/1", {"e2el": 60000}, 200)
    assert [RunResult.from_dict(run).offered_rate for run in data["runs"]] == [50, 100, 200]
    write_csv(found, tmp_path / "sweep.csv")
    rows = (tmp_path / "sweep.csv").read_text().splitlines()
    assert len(rows) == 10 and rows[-1].startswith("2,200")
