"""What a request costs as its context grows, as a client sees it: TTFT and ITL from 1,024 to 16,384 tokens of input.

    python benchmarks/long_context_study.py [--models bundled 1b] [--lengths 1024 … 16384] [--num-prompts 5]
        [--quantization int8] [--max-minutes 60] [--resume] [--out work/long_context.json]

Starts `windlass serve` for each model, without prefix caching, and `windlass bench serve` with one client for each length, the
shortest first. `bundled` is the demonstration model stretched by YaRN, far beyond what it was trained for: its speed means
something, its text does not. `1b` is a random Llama of 1B shape, `small` a tiny one to try the script with.

After each length the JSON with all runs, the report (HTML) and the picture (PNG) are written anew: an interruption loses the
length it falls into, and --resume measures what is missing, and lengths whose requests all failed once more. Nothing else may
run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import abc
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.long_context import (
    FORMAT,
    Forecast,
    forecast,
    load_study,
    runs_of,
    save_study,
    seconds_per_request,
    text_table,
)
from harness.machine import cpu_clock, describe
from harness.places import Places
from harness.serving import SERVE, serving
from harness.shape import SHAPES
from harness.worker import WorkerError
from prepare_peers import prepare_windlass

from windlass.clients.loadtest.results import RunResult

LENGTHS = [1024, 2048, 4096, 8192, 16384]
BUNDLED = Path(__file__).resolve().parents[1] / "models" / "demo"

Serve = abc.Callable[[Path, list[str]], AbstractContextManager[str]]
Bench = abc.Callable[[str, int, int], RunResult]


@dataclass(slots=True)
class Budget:
    """Stops a study before a length that would not fit. minutes: None for no bound; started: by the monotonic clock."""

    minutes: float | None
    started: float

    def allows(self, next_length: Forecast) -> bool:
        spent = time.monotonic() - self.started
        return self.minutes is None or spent + next_length.high <= self.minutes * 60


def server_options(model: str, trained: int, longest: int, quantization: str) -> list[str]:
    """Of `windlass serve`, for contexts of `longest` tokens."""
    options = ["--max-model-len", str(longest), "--no-prefix-caching"]
    if quantization != "none":
        options += ["--quantization", quantization]
    if longest > trained:
        scaling = {"rope_type": "yarn", "factor": float(math.ceil(longest / trained))}
        options += ["--rope-scaling", json.dumps(scaling)]
    if model in SHAPES:
        room = SHAPES[model].kv_bytes_per_token("float32") * (longest + 1024)
        options += ["--kv-cache-memory", f"{math.ceil(room / 2**20)}MiB"]
    return options


def find_model(model: str, work: Path) -> tuple[Path, int]:
    """(directory, trained length); made where it is missing."""
    if model == "bundled":
        path = BUNDLED
    else:
        places = Places(work.resolve(), model)
        prepare_windlass(places, model)
        path = places.model
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return path, int(config["max_position_embeddings"])


def run_bench(url: str, length: int, prompts: int, output: int, timeout: float) -> RunResult:
    """One run of the load test's command. Raises WorkerError with its last line where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, "-c", SERVE, "bench", "serve", "--url", url, "--input-len", str(length)]
        command += ["--output-len", str(output), "--concurrency", "1", "--num-prompts", str(prompts)]
        command += ["--timeout", str(timeout), "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not path.exists():
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise WorkerError(f"windlass bench serve failed with {done.returncode}: {said}")
        return RunResult.from_dict(json.loads(path.read_text(encoding="utf-8")))


def measure_model(
    study: dict[str, Any],
    name: str,
    lengths: list[int],
    prompts: int,
    url: str,
    bench: Bench,
    out: Path,
    budget: Budget,
) -> bool:
    """All lengths that were not measured yet, each saved as soon as it is there; False where the budget ended it."""
    entries = study["models"][name]["lengths"]
    measured = {
        entry["length"]: seconds_per_request(RunResult.from_dict(entry["run"]))
        for entry in entries
        if entry["run"]["completed"]
    }
    wanted = [length for length in lengths if length not in measured]
    if not wanted:
        return True
    first = bench(url, lengths[0], 1)  # thrown away: it warms the server up
    known = dict(measured) or {lengths[0]: seconds_per_request(first)}
    total = sum((forecast(known, length, prompts) for length in wanted), Forecast(0.0, 0.0))
    print(f"{name}: {prompts} x {', '.join(f'{length:,}' for length in wanted)} tokens, about {total}", flush=True)
    for length in wanted:
        expected = forecast(measured or known, length, prompts)
        if not budget.allows(expected):
            print(f"  stopped before {length:,} tokens: it would take {expected}, more than --max-minutes leaves")
            return False
        print(f"  {length:,} tokens, about {expected} …", flush=True)
        before = cpu_clock()
        run = bench(url, length, prompts)
        after = cpu_clock()
        share = after.foreign_share(before, os.cpu_count() or 1) if before and after else None
        entries[:] = [entry for entry in entries if entry["length"] != length]  # one whose requests all failed
        entries.append({"length": length, "foreign_share": share, "run": run.to_dict()})
        entries.sort(key=lambda entry: entry["length"])
        save_study(study, out)
        if run.completed:
            measured[length] = seconds_per_request(run)
        if run.errors:
            print(f"    failed: {run.errors}", flush=True)
        if share is not None and share > 0.05:
            print(f"    others used {share:.0%} of the machine: repeat it when it is quiet", flush=True)
    return True


def make_study(options: argparse.Namespace, serve: Serve, bench: Bench) -> dict[str, Any]:
    """The study, as far as it came; it has been saved already."""
    if options.resume and options.out.exists():
        study = load_study(options.out)
    else:
        study = {"format": FORMAT, "date": time.strftime("%Y-%m-%d %H:%M"), "machine": describe(), "models": {}}
    budget = Budget(options.max_minutes, time.monotonic())
    for model in options.models:
        path, trained = find_model(model, options.work)
        longest = max(options.lengths) + options.output_len + 16
        server = server_options(model, trained, longest, options.quantization)
        name = model if options.quantization == "none" else f"{model}, {options.quantization}"
        known = study["models"].setdefault(name, {"options": server, "lengths": []})
        if set(options.lengths) <= {entry["length"] for entry in known["lengths"] if entry["run"]["completed"]}:
            continue
        with serve(path, server) as url:
            if not measure_model(study, name, options.lengths, options.num_prompts, url, bench, options.out, budget):
                break
    return study


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["bundled", *SHAPES], default=["bundled", "1b"])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of input")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of output (32)")
    parser.add_argument("--num-prompts", type=int, default=5, help="requests per length, one after the other (5)")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none", help="of the weights")
    parser.add_argument("--max-minutes", type=float, help="stop before a length that may take longer than what is left")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one request (3600)")
    parser.add_argument("--resume", action="store_true", help="go on with the study in --out")
    parser.add_argument("--work", type=Path, default=Path("work"))
    parser.add_argument("--out", type=Path, help="default: WORK/long_context.json; .html and .png stand beside it")
    options = parser.parse_args(arguments)
    options.out = options.out or options.work / "long_context.json"
    options.lengths = sorted(set(options.lengths))
    if options.lengths[0] < 1 or options.num_prompts < 1 or options.output_len < 2:
        parser.error("--lengths and --num-prompts begin at 1, --output-len at 2")
    if options.out.suffix != ".json":
        parser.error("--out names a .json file")
    return options


def main() -> None:
    options = parse_arguments()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    log = options.work / "long_context.log"
    try:
        study = make_study(
            options,
            lambda path, server: serving(path, server, log, {}),
            lambda url, length, prompts: run_bench(url, length, prompts, options.output_len, options.timeout),
        )
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted: {options.out} holds the lengths measured so far; --resume goes on") from None
    except (WorkerError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    if runs_of(study):
        print("\n" + text_table(study), end="")
        print(f"\nwrote {options.out}, {options.out.with_suffix('.html')}")


if __name__ == "__main__":
    main()
