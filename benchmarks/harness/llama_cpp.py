"""llama.cpp by its own tools and llama_depth.cpp: the commands to run and how to read what they print. Starts nothing itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from harness.measures import Measure


def bench_command(tool: Path, model: Path, measure: Measure, threads: int, repeats: int) -> list[str]:
    """llama-bench for one stream. A depth computes its prompt once per command, so all repeats go into one."""
    command = [str(tool), "-m", str(model), "-t", str(threads), "-o", "jsonl", "-r", str(repeats)]
    if measure.kind == "prefill":
        return [*command, "-p", str(measure.prompt), "-n", "0", "--no-warmup"]
    command += ["-p", "0", "-n", str(measure.steps)]
    if measure.kind == "depth":
        command += ["-d", str(measure.prompt), "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "1"]
    return command


def depth_command(tool: Path, model: Path, measure: Measure, threads: int) -> list[str]:
    """Our llama-depth (llama_depth.cpp), a worker that fills its cache instead of computing it."""
    return [str(tool), str(model), str(threads), str(measure.prompt), str(measure.steps)]


def batched_bench_command(tool: Path, model: Path, measure: Measure, threads: int) -> list[str]:
    """llama-batched-bench for several streams with prompts of their own.

    The tool gives each stream a multiple of 256 cells and silently skips what does not fit the context asked for.
    """
    context = measure.streams * -(-(measure.prompt + measure.steps) // 256) * 256
    shape = ["-npp", str(measure.prompt), "-ntg", str(measure.steps), "-npl", str(measure.streams)]
    return [str(tool), "-m", str(model), "-c", str(context), *shape, "-t", str(threads), "--output-format", "jsonl"]


def parse_bench(output: str) -> list[float]:
    """Tokens per second of each repeat. Raises ValueError where the output holds none."""
    rows = _json_lines(output)
    samples = [float(value) for row in rows for value in row.get("samples_ts", ())]
    return _usable(samples, output)


def parse_batched_bench(output: str) -> list[float]:
    """Tokens per second of all streams together. Raises ValueError where the output holds none."""
    return _usable([float(row["speed_tg"]) for row in _json_lines(output) if "speed_tg" in row], output)


def parse_version(output: str) -> str:
    """The build, from the same rows."""
    return next((f"build {row['build_commit']}" for row in _json_lines(output) if "build_commit" in row), "unknown")


def _json_lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def _usable(samples: list[float], output: str) -> list[float]:
    if not samples or not all(math.isfinite(value) and value > 0 for value in samples):
        raise ValueError(f"no tokens per second in the output: {output[-300:]!r}")
    return samples
