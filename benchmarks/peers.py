"""Windlass and the installed peers, interleaved in one run, on a random Llama of 1B shape or a small real model.

    python benchmarks/peers.py prepare [--shape 135m --model DIRECTORY --metadata ORIGINAL.gguf]
    python benchmarks/peers.py run [--shape 135m] [--only decode prefill depth startup] [--contestants int8 q8_0] [--rounds 5]
    python benchmarks/peers.py quality TEXT        # perplexity and KL divergence of each peer's quantization
    python benchmarks/peers.py reorder MODEL OUT   # the same model with its features permuted

prepare creates the models of all contestants. Each contestant runs in its own process, in turns (A B A B). A sample that other
processes disturbed is repeated. The machine's rates are measured before and after each sample; bounds are computed from them.
A call adds one run to the report, which is saved after each measure. Ratios and pictures stay within a run.
benchmarks/README.md describes how to install the peers.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import time
from collections import abc
from pathlib import Path
from typing import Any, TypeVar

from harness import charts, peers_quality, prepare_peers, reordered_model
from harness.contestants import STARTUP_KV_BYTES, Contestant, contestants_for
from harness.machine import describe
from harness.measures import GROUPS, MOST_STREAMS, Measure, measures_of
from harness.places import Places
from harness.prepare_peers import prepare_real, prepare_windlass
from harness.quiet import quiet
from harness.rates import Rates
from harness.report import (
    GOALS,
    REAL_GOALS,
    SCHEMA,
    add_bound,
    attention_rate,
    by_contestant,
    check,
    rate_of_kind,
    ratios,
    sample_rates,
    spread,
    table,
)
from harness.shape import REAL, SHAPES
from harness.subcommands import run_subcommand
from harness.worker import WorkerError

_CORES = os.cpu_count() or 1
_Value = TypeVar("_Value")


class Run:
    """One run of some groups of measures, with its samples and results."""

    def __init__(self, options: argparse.Namespace, keep: abc.Callable[[Run], None] = lambda run: None) -> None:
        """keep: called when results were added."""
        self.options, self._keep = options, keep
        self._before = os.getloadavg()[0]
        self.places = Places(options.work.resolve(), options.shape)
        self.shape = SHAPES[options.shape]
        self.results: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []
        self.versions: dict[str, str] = {}
        self.rates: dict[str, list[float]] = {}

    def carry_out(self) -> dict[str, Any]:
        self.measure_rates()
        for kind in self.options.only:
            self._group(kind)
            self.measure_rates()  # again, so that their spread shows changes of the machine
        return self.so_far()

    def so_far(self) -> dict[str, Any]:
        """The run as the report stores it, with the results so far."""
        run = {
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "machine": describe(),
            "threads": self.options.threads,
            "rounds": self.options.rounds,
            "max_foreign": self.options.max_foreign,
            "rates": {name: spread(samples) for name, samples in self.rates.items()},
            "load": {"before": self._before, "after": os.getloadavg()[0]},
            "versions": self.versions,
            "results": self.results,
            "left_out": self.left_out,
        }
        if self.places.quality.exists():  # written by `peers.py quality`
            run["quality"] = json.loads(self.places.quality.read_text("utf-8"))["contestants"]
        goals = {"1b": GOALS, **dict.fromkeys(REAL, REAL_GOALS)}.get(self.options.shape, ())
        run["ratios"] = ratios(run, goals)
        run["derived"] = self._derived()
        return run

    def measure_rates(self) -> None:
        for name, samples in self._machine.samples().items():
            self.rates.setdefault(name, []).extend(samples)

    @functools.cached_property
    def _machine(self) -> Rates:
        return Rates(self.options.threads)

    def _group(self, kind: str) -> None:
        wanted = [name.lower() for name in self.options.contestants]
        contestants = contestants_for(
            kind, self.places, self.options.threads, self.shape.vocab, self.options.kv_gb, self.options.kv_dtypes
        )
        started: list[Contestant] = []
        try:
            for contestant in contestants:
                if wanted and not any(part in contestant.name.lower() for part in wanted):
                    continue
                if contestant.slow and not wanted:
                    self._leave_out(contestant, "takes minutes to start: name it with --contestants")
                    continue
                try:
                    if kind != "startup":
                        print(f"starting {contestant.name}", flush=True)
                        contestant.start()
                    started.append(contestant)
                except WorkerError as error:
                    self._leave_out(contestant, str(error))
            if kind == "startup":
                self._startups(started)
            else:
                for measure in measures_of(  # type: ignore[arg-type]
                    kind, tuple(self.options.depths), self.shape.pace, tuple(self.options.streams)
                ):
                    self._measure(measure, started)
        finally:
            for contestant in started:
                contestant.close()

    def _measure(self, measure: Measure, contestants: list[Contestant]) -> None:
        samples: dict[str, list[float]] = {c.name: [] for c in contestants}
        foreign: dict[str, list[float]] = {c.name: [] for c in contestants}
        around: dict[str, list[tuple[float, float]]] = {c.name: [] for c in contestants}
        rate = rate_of_kind(measure.kind)
        discarded = dict.fromkeys(samples, 0)
        failed: set[str] = set()
        rounds = self.options.rounds
        for index in range(rounds):
            # Every other round runs backwards, so that the predecessor of a contestant varies.
            for contestant in contestants if index % 2 == 0 else reversed(contestants):
                name = contestant.name
                if name in failed or len(samples[name]) >= rounds:
                    continue
                try:
                    (values, pair), share, repeats = self._quiet(
                        lambda c=contestant: self._machine.around(rate, lambda p: c.measure(measure, rounds, p))
                    )
                except (WorkerError, ValueError) as error:
                    self._leave_out(contestant, f"{measure.name}: {error}")
                    failed.add(name)
                    continue
                samples[name] += values
                around[name] += [pair] * len(values)  # one command may return several values
                foreign[name].append(share)
                discarded[name] += repeats
                shown = ", ".join(f"{value:.2f}" for value in values)
                print(
                    f"  {measure.name}, round {index + 1}/{rounds}: {name}: {shown} tokens/s "
                    f"({rate} {pair[0]:.1f}, then {pair[1]:.1f})",
                    flush=True,
                )
        for contestant in contestants:
            if samples[contestant.name]:
                self.versions[contestant.program] = contestant.version()
                result = self._add(contestant, measure.name, "tokens/s", samples[contestant.name])
                result.update(kind=measure.kind, streams=measure.streams, prompt=measure.prompt)
                result.update(foreign=foreign[contestant.name], discarded=discarded[contestant.name])
                result["weight_bytes"] = contestant.weight_bytes()
                if cache := contestant.cache():
                    result["kv_cache_dtype"], result["kv_bytes_per_token"] = cache
                result["rates"] = {rate: around[contestant.name]}
                add_bound(result, self.shape)
        self._keep(self)

    def _startups(self, contestants: list[Contestant]) -> None:
        seconds: dict[str, list[float]] = {}
        peaks: dict[str, list[float]] = {}
        foreign: dict[str, list[float]] = {}
        discarded: dict[str, int] = {}
        failed: set[str] = set()
        for index in range(self.options.rounds):
            for contestant in contestants:
                if contestant.name in failed:
                    continue
                try:
                    found, share, repeats = self._quiet(contestant.startup)
                except WorkerError as error:
                    self._leave_out(contestant, f"startup: {error}")
                    failed.add(contestant.name)
                    continue
                if found is None:
                    failed.add(contestant.name)  # a contestant without a start-up
                    continue
                seconds.setdefault(contestant.name, []).append(found[0])
                peaks.setdefault(contestant.name, []).append(found[1] / 1e9)
                foreign.setdefault(contestant.name, []).append(share)
                discarded[contestant.name] = discarded.get(contestant.name, 0) + repeats
                print(
                    f"  startup, round {index + 1}: {contestant.name}: {found[0]:.2f} s, {found[1] / 1e9:.2f} GB",
                    flush=True,
                )
        for contestant in contestants:
            if contestant.name in seconds:
                ready = self._add(contestant, "time to ready", "s", seconds[contestant.name])
                ready.update(foreign=foreign[contestant.name], discarded=discarded[contestant.name])
                memory = self._add(contestant, "peak memory", "GB", peaks[contestant.name])
                memory.update(foreign=foreign[contestant.name], discarded=discarded[contestant.name])
                if contestant.program == "Windlass":
                    allowed = self.shape.weight_bytes(contestant.weights) + STARTUP_KV_BYTES + 400e6
                    memory["allowed_gb"] = allowed / 1e9
        self._keep(self)

    def _add(self, contestant: Contestant, measure: str, unit: str, samples: list[float]) -> dict[str, Any]:
        result: dict[str, Any] = {
            "measure": measure,
            "contestant": contestant.name,
            "program": contestant.program,
            "weights": contestant.weights,
            "kv_dtype": contestant.kv_dtype,
            "unit": unit,
            "samples": samples,
            "foreign": [],
            "discarded": 0,
            **spread(samples),
        }
        self.results.append(result)
        return result

    def _quiet(self, work: abc.Callable[[], _Value]) -> tuple[_Value, float, int]:
        return quiet(work, self.options.max_foreign, self.options.retries, self.options.pause)

    def _leave_out(self, contestant: Contestant, reason: str) -> None:
        print(f"left out: {contestant.name}: {reason}", flush=True)
        self.left_out.append({"contestant": contestant.name, "reason": reason})

    def _derived(self) -> dict[str, float]:
        """Figures derived from two measures of one contestant."""
        by_name = {(r["measure"], r["contestant"]): r for r in self.results}
        derived: dict[str, float] = {}
        for (measure, name), short in by_name.items():
            long = by_name.get(("prefill 4,096", name))
            if measure == "prefill 512" and long:
                rate = attention_rate(short, long, self.shape, (512, 4096))
                if math.isfinite(rate):
                    derived[f"prefill attention, {name}, Gflop/s"] = rate
                    products = statistics.median(sample_rates(long, "fp32_gflop_s"))
                    derived[f"prefill attention, {name}, over the float32 matrix rate"] = rate / products
        return derived


def parse_arguments(arguments: abc.Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the installed contestants.")
    parser.add_argument(
        "--only", nargs="+", choices=GROUPS, default=["decode", "prefill", "startup"], help="groups to run"
    )
    parser.add_argument(
        "--contestants", nargs="+", default=[], metavar="PART", help="only names that contain one of these"
    )
    parser.add_argument(
        "--depths", nargs="+", type=int, help="for the group depth (default 4096 8192, of a real model 512 4096)"
    )
    parser.add_argument(
        "--streams", nargs="+", type=int, default=[1, 8], help="for the group decode: how many at once, up to 64 (1 8)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=_CORES)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--kv-gb", type=float, default=2.5, help="Windlass's KV cache in GiB (default 2.5)")
    parser.add_argument(
        "--kv-dtypes", nargs="+", default=["int8", "auto"], help="Windlass's KV dtypes in the group depth"
    )
    parser.add_argument(
        "--max-foreign", type=float, default=0.05, help="share of the machine that others may use (0.05)"
    )
    parser.add_argument("--retries", type=int, default=3, help="how often a disturbed sample is taken again")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds to wait before that")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder of models and peers (default: work)")
    parser.add_argument("--out", type=Path, help="report to write or add to (default: WORK/peers.json)")
    parser.add_argument("--picture", type=Path, help="bar chart to draw (default: the report's name with .png)")
    options = parser.parse_args(arguments)
    options.depths = options.depths or ([512, 4096] if options.shape in REAL else [4096, 8192])
    if min(options.rounds, options.threads, *options.depths, *options.streams) < 1:
        parser.error("--rounds, --threads, --depths and --streams must be at least 1")
    if max(options.streams) > MOST_STREAMS:
        parser.error(f"--streams must be at most {MOST_STREAMS}")
    if max(options.depths) + 1024 > SHAPES[options.shape].context:
        parser.error(f"--depths must stay below {SHAPES[options.shape].context - 1024}")
    options.out = options.out or options.work / (
        "peers.json" if options.shape == "1b" else f"peers_{options.shape}.json"
    )
    return options


def main() -> None:
    options = parse_arguments()
    places = Places(options.work.resolve(), options.shape)
    if options.shape in REAL:
        prepare_real(places, None, None)
    else:
        prepare_windlass(places, options.shape)
    report: dict[str, Any] = {"schema": SCHEMA, "model": options.shape, "runs": []}
    if options.out.exists():
        report = json.loads(options.out.read_text(encoding="utf-8"))
        check(report)
        if report["model"] != options.shape:
            raise SystemExit(f"error: {options.out} is about the {report['model']} shape: name another file with --out")
    earlier = report["runs"]

    def keep(run: dict[str, Any]) -> None:
        report["runs"] = [*earlier, run]
        check(report)
        partial = options.out.with_name(options.out.name + ".partial")
        partial.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(options.out)

    run = Run(options, lambda run: keep(run.so_far())).carry_out()
    keep(run)
    print("\n" + table(run) + "\n\n" + by_contestant(run))
    picture = options.picture or options.out.with_suffix(".png")
    try:
        if len(options.streams) > 2 and "decode" in options.only:
            charts.save(lambda: charts.draw_streams(run), picture)
        else:
            charts.save(lambda: charts.draw_bars(report), picture)
        print(f"\nwrote {options.out} and {picture}")
    except ImportError:
        print(f"\nwrote {options.out}; no picture, matplotlib is not installed")


if __name__ == "__main__":
    commands = {
        "prepare": prepare_peers.main,
        "run": main,
        "quality": peers_quality.main,
        "reorder": reordered_model.main,
    }
    run_subcommand(__doc__, commands)
