"""Windlass next to ik_llama.cpp, llama.cpp and OpenVINO GenAI on one GGUF file, and the waiting time and memory of its server.

    python benchmarks/peers.py speed [--only decode-1 prompt-512 ...] [--contestants windlass ik] [--model FILE.gguf]
    python benchmarks/peers.py server [--only start chat http busy lookup draft] [--draft FILE.gguf]

The file is by default that of `windlass pull qwen2.5-coder-1.5b`, which all programs read as it is. Contestants take turns, round
by round. Right before each sample the read bandwidth of the machine is measured, and before prompts the rate of torch's bfloat16
`linear` on the model's layers. A sample that other processes disturbed is repeated. The report is saved after every row. Programs
that are not installed are left out; benchmarks/README.md has the commands that install them.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import abc
from pathlib import Path
from typing import Any, TypeVar

from harness import charts
from harness.contestants import CONTESTANTS, ROWS, Contestant, Row, Windlass
from harness.gguf_model import GGUFModel, open_model
from harness.machine import describe
from harness.quiet import quiet
from harness.rates import Rates
from harness.report import save, spread, three_digits
from harness.server_rows import ServerRows
from harness.subcommands import run_subcommand
from harness.worker import WorkerError

from windlass.clients import APIError
from windlass.engine.errors import LoadError

_Value = TypeVar("_Value")
Result = dict[str, Any]
Ratio = dict[str, Any]


class Run(ABC):
    """A run of either command with its report, which is saved after each row."""

    def __init__(self, options: argparse.Namespace, model: GGUFModel) -> None:
        self.options, self.model = options, model
        self.report: dict[str, Any] = {
            "command": shlex.join(["python", "benchmarks/peers.py", *_words()]),
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "machine": describe(),
            "threads": options.threads,
            "rounds": options.rounds,
            "model": {
                "file": model.file.name,
                "bytes": model.file.stat().st_size,
                "weight_bytes_per_token": model.weight_bytes,
            },
            "versions": {},
            "results": [],
            "ratios": [],
            "left_out": [],
        }

    def quiet(self, work: abc.Callable[[], _Value]) -> tuple[_Value, float, int]:
        return quiet(work, self.options.max_foreign, self.options.retries, self.options.pause)

    def leave_out(self, name: str, reason: str) -> None:
        found = {"name": name, "reason": reason}
        if found not in self.report["left_out"]:
            print(f"left out: {name}: {reason}", flush=True)
            self.report["left_out"].append(found)
            self.save()

    def add(self, results: abc.Iterable[Result]) -> None:
        """Add the results of a row, with their statistics."""
        self.report["results"] += [result | spread(result["samples"]) for result in results]
        self.save()

    def save(self) -> None:
        self.report["ratios"] = self.ratios(self.report["results"])
        save(self.report, self.options.out)

    @abstractmethod
    def ratios(self, results: list[Result]) -> list[Ratio]: ...


class SpeedRun(Run):
    """The rows of all contestants in turns."""

    def carry_out(self) -> None:
        for cache in ("f16", "q8_0"):
            rows = [row for row in ROWS.values() if row.name in self.options.only and row.cache == cache]
            started: list[Contestant] = []
            try:
                for kind in CONTESTANTS if rows else ():
                    name = kind.program.lower()
                    if any(name.startswith(part.lower()) for part in self.options.contestants or [name]):
                        self._start(kind(self.model, self.options.threads, self.options.work), cache, started)
                for row in rows:
                    self._measure(row, started)
            finally:
                for contestant in started:
                    contestant.close()

    def _start(self, contestant: Contestant, cache: str, started: list[Contestant]) -> None:
        print(f"starting {contestant.program}", flush=True)
        try:
            contestant.start(cache)
            started.append(contestant)
        except WorkerError as error:
            self.leave_out(contestant.program, str(error))

    @functools.cached_property
    def _machine(self) -> Rates:
        machine = Rates(self.options.threads)
        for row in ROWS.values():
            if row.kind == "prompt" and row.name in self.options.only:
                machine.add_linear(row.name, self.model.layer_shapes, row.tokens)
        return machine

    def _sample(self, contestant: Contestant, row: Row) -> dict[str, float]:
        """Tokens per second, and the machine's rates right before."""
        rates: dict[str, float] = {}

        def measure_rates() -> None:
            rates["read_gb_s"] = self._machine.now("read_gb_s")
            if row.kind == "prompt":
                rates["linear_gflop_s"] = self._machine.now(row.name)

        return {"samples": contestant.measure(row, measure_rates)} | rates

    def _measure(self, row: Row, contestants: list[Contestant]) -> None:
        results: dict[str, Result] = {}
        failed: set[str] = set()
        for index in range(self.options.rounds):
            # Every other round runs backwards, so that the predecessor of a contestant varies.
            for contestant in contestants if index % 2 == 0 else reversed(contestants):
                program = contestant.program
                if program in failed:
                    continue
                try:
                    found, share, discarded = self.quiet(lambda c=contestant: self._sample(c, row))  # type: ignore[misc]
                except WorkerError as error:
                    self.leave_out(program, f"{row.title}: {error}")
                    failed.add(program)
                    continue
                command = shlex.join(contestant.command(row))
                result = results.setdefault(program, _result(row.name, program, "tokens/s", command))
                _add(result, found, share, discarded)
                self.report["versions"][program] = contestant.version
                rates = ", ".join(f"{name} {three_digits(value)}" for name, value in found.items() if name != "samples")
                print(
                    f"  {row.title}, round {index + 1}: {program}: {three_digits(found['samples'])} tokens/s ({rates})",
                    flush=True,
                )
        self.add(results.values())

    def ratios(self, results: list[Result]) -> list[Ratio]:
        return speed_ratios(results, self.model)


def _result(row: str, program: str, unit: str, command: str) -> Result:
    return {"row": row, "program": program, "unit": unit, "command": command}


def _add(result: Result, found: dict[str, float], share: float, discarded: int) -> None:
    for name, value in (found | {"foreign": share}).items():
        result.setdefault(name, []).append(value)
    result["discarded"] = result.get("discarded", 0) + discarded


def speed_ratios(results: list[Result], model: GGUFModel) -> list[Ratio]:
    """Figures without a unit, each with its program: shares of what the machine allows, and quotients of medians."""
    by_name = {(result["row"], result["program"]): result for result in results}
    ratios: list[Ratio] = []

    def add(name: str, program: str, value: float, **more: str) -> None:
        ratios.append({"name": name, "program": program, "value": value, **more})

    for (name, program), result in by_name.items():
        row = ROWS[name]
        if row.kind == "decode" and row.streams == 1:
            # The context grows by a token per step.
            step_bytes = model.step_bytes(1, row.tokens + row.steps // 2, row.cache)
            shares = _quotients(result, "read_gb_s", step_bytes / 1e9)
            add(f"{row.title}: bytes read / read bandwidth", program, statistics.median(shares))
        if row.kind == "prompt":
            shares = _quotients(result, "linear_gflop_s", model.prompt_flop(row.tokens) / row.tokens / 1e9)
            add(f"{row.title}: operations / bfloat16 linear", program, statistics.median(shares))
        for more, fewer in (("decode-8", "decode-1"), ("decode-32", "decode-8")):
            if name == more and (base := by_name.get((fewer, program))):
                title = f"{ROWS[more].streams} streams / {ROWS[fewer].streams}"
                add(title, program, result["median"] / base["median"])
        others = [one for (row_name, other), one in by_name.items() if row_name == name and other != Windlass.program]
        if program == Windlass.program and others:
            best = max(others, key=lambda one: one["median"])
            add(f"{row.title}: over the best other", program, result["median"] / best["median"], over=best["program"])
    return ratios


def _quotients(result: Result, rate: str, per_token: float) -> list[float]:
    return [sample * per_token / found for sample, found in zip(result["samples"], result[rate], strict=True)]


class ServerRun(Run):
    """The rows of the server, each in all rounds."""

    def carry_out(self) -> None:
        rows = ServerRows(self.model, self.options).rows
        self.report["versions"][Windlass.program] = _version()
        for name in self.options.only:
            if name not in rows:
                self.leave_out(name, "needs a draft model: name one with --draft FILE.gguf")
                continue
            results: dict[str, Result] = {}
            print(f"row {name}", flush=True)
            try:
                for index in range(self.options.rounds):
                    figures, share, discarded = self.quiet(rows[name])
                    for figure, (value, unit) in figures.items():
                        result = results.setdefault(
                            figure, _result(figure, Windlass.program, unit, self.report["command"])
                        )
                        _add(result, {"samples": value}, share, discarded)
                        print(f"  round {index + 1}: {figure}: {three_digits(value)} {unit}", flush=True)
            except (WorkerError, APIError, LoadError, subprocess.SubprocessError) as error:
                self.leave_out(name, str(error))
            self.add(results.values())

    def ratios(self, results: list[Result]) -> list[Ratio]:
        return [
            {"name": one["row"], "program": one["program"], "value": one["median"]}
            for one in results
            if one["unit"] in ("ratio", "decode steps")
        ]


def _version() -> str:
    import torch

    import windlass

    return f"{windlass.__version__}, torch {torch.__version__}"


def table(report: dict[str, Any]) -> str:
    """A report in Markdown."""
    lines = [
        f"{report['date']}, {report['machine']['cpu']}, {report['threads']} threads, {report['model']['file']}",
        "",
    ]
    lines += ["| row | program | median | minimum to maximum | foreign processor time |", "|---|---|--:|--:|--:|"]
    lines += [
        f"| {ROWS[r['row']].title if r['row'] in ROWS else r['row']} | {r['program']} | {three_digits(r['median'])} {r['unit']} "
        f"| {three_digits(r['min'])} to {three_digits(r['max'])} | {max(r['foreign']):.0%} |"
        for r in report["results"]
    ]
    lines += ["", "| ratio | program | value |", "|---|---|--:|"]
    for ratio in report["ratios"]:
        over = f" ({ratio['over']})" if "over" in ratio else ""
        lines.append(f"| {ratio['name']}{over} | {ratio['program']} | {ratio['value']:.2f} |")
    return "\n".join([*lines, "", *(f"left out: {one['name']}: {one['reason']}" for one in report["left_out"])])


def parse_arguments(name: str, rows: abc.Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Options of `peers.py {name}`.")
    parser.add_argument("--model", type=Path, help="GGUF file (default: that of `windlass pull qwen2.5-coder-1.5b`)")
    parser.add_argument("--only", nargs="+", choices=rows, default=rows, help="rows to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: all cores; of servers their own default")
    parser.add_argument(
        "--max-foreign", type=float, default=0.05, help="share of the machine that others may use (default 0.05)"
    )
    parser.add_argument(
        "--retries", type=int, default=3, help="how often a disturbed sample is taken again (default 3)"
    )
    parser.add_argument("--pause", type=float, default=5.0, help="seconds to wait before that (default 5)")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder of the programs (default: work)")
    parser.add_argument("--out", type=Path, help=f"report to write (default: WORK/peers_{name}.json)")
    if name == "speed":
        parser.add_argument("--contestants", nargs="+", metavar="NAME", help="beginnings of names (default: all)")
    else:
        parser.add_argument("--draft", type=Path, help="GGUF file of a draft model, for the row `draft`")
    options = parser.parse_args()
    options.serve = ["--threads", str(options.threads)] if options.threads else []
    options.threads = options.threads or os.cpu_count() or 1
    if min(options.rounds, options.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    options.work = options.work.resolve()
    options.out = options.out or options.work / f"peers_{name}.json"
    return options


def _words() -> list[str]:
    """The arguments of this program, the subcommand included."""
    return [*sys.argv[0].split()[1:], *sys.argv[1:]]


def speed() -> None:
    options = parse_arguments("speed", list(ROWS))
    run = SpeedRun(options, open_model(options.model))
    run.carry_out()
    print("\n" + table(run.report))
    if not run.report["results"]:
        raise SystemExit("error: nothing was measured")
    try:
        charts.save(lambda: charts.draw_programs(run.report, ROWS), options.out.with_suffix(".png"))
        print(f"\nwrote {options.out} and a picture of the same name")
    except ImportError:
        print(f"\nwrote {options.out}; no picture, matplotlib is not installed")


def server() -> None:
    options = parse_arguments("server", ["start", "chat", "http", "busy", "lookup", "draft"])
    run = ServerRun(options, open_model(options.model))
    run.carry_out()
    print("\n" + table(run.report) + f"\n\nwrote {options.out}")


if __name__ == "__main__":
    run_subcommand(__doc__, {"speed": speed, "server": server})
