"""llama.cpp and ik_llama.cpp by their own tools and llama_depth.cpp: their commands and the parsers of their output."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.measures import Measure


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the tools of a program want to be asked. always: options of every command."""

    program: str
    output: str
    no_warmup: tuple[str, ...]
    always: tuple[str, ...] = ()


_WARMED = 512  # longest prompt that is computed once before it is timed; of a longer one the first pages hardly count
_SPEED_COLUMN = 7  # S_TG of llama-batched-bench's table

# With -rtr ik_llama.cpp rearranges weights for its fastest products.
DIALECTS = {
    "llama.cpp": Dialect("llama.cpp", "jsonl", ("--no-warmup",)),
    "ik_llama.cpp": Dialect("ik_llama.cpp", "json", ("-w", "0"), ("-rtr", "1")),
}


def bench_command(
    tool: Path, model: Path, measure: Measure, threads: int, repeats: int, dialect: Dialect = DIALECTS["llama.cpp"]
) -> list[str]:
    """llama-bench for one stream. A depth computes its prompt once per command, so all repeats go into one."""
    command = [str(tool), "-m", str(model), "-t", str(threads), "-o", dialect.output, "-r", str(repeats)]
    command += dialect.always
    if measure.kind == "prefill":
        cold = dialect.no_warmup if measure.prompt > _WARMED else ()
        return [*command, "-p", str(measure.prompt), "-n", "0", *cold]
    if measure.kind != "depth":
        return [*command, "-p", "0", "-n", str(measure.steps)]
    cache = ["-ctk", "q8_0", "-ctv", "q8_0", "-fa", "1"]
    if dialect.program == "ik_llama.cpp":
        return [*command, "-p", "0", "-n", "0", "-gp", f"{measure.prompt},{measure.steps}", *cache]
    return [*command, "-p", "0", "-n", str(measure.steps), "-d", str(measure.prompt), *cache]


def perplexity_command(tool: Path, model: Path, text: Path, window: int, base: Path, *, compare: bool) -> list[str]:
    """llama-perplexity over windows of a text, the second half of each. base: logits to write, or to compare with."""
    command = [str(tool), "-m", str(model), "-f", str(text), "-c", str(window), "-b", str(window)]
    return [*command, "--kl-divergence-base", str(base), *(["--kl-divergence"] if compare else [])]


def parse_perplexity(output: str) -> dict[str, float]:
    """perplexity, and where it was compared divergence (nats) and same_first (share). Raises ValueError for none."""
    patterns = {
        "perplexity": (r"Final estimate: PPL.*= *([0-9.]+) *\+/-", r"Mean PPL\(Q\)\s*:\s*([0-9.]+)"),
        "divergence": (r"Mean +KLD: +([0-9.e-]+)",),
        "same_first": (r"Same top p: +([0-9.]+)",),
    }
    found: dict[str, float] = {}
    for name, several in patterns.items():
        for pattern in several:
            if match := re.search(pattern, output):
                found[name] = float(match[1]) / (100 if name == "same_first" else 1)
    if "perplexity" not in found:
        raise ValueError(f"no perplexity in the output: {output[-300:]!r}")
    return found


def depth_command(tool: Path, model: Path, measure: Measure, threads: int) -> list[str]:
    """Our llama-depth (llama_depth.cpp), a worker that fills its cache instead of computing it."""
    return [str(tool), str(model), str(threads), str(measure.prompt), str(measure.steps)]


def batched_bench_command(
    tool: Path, model: Path, measure: Measure, threads: int, dialect: Dialect = DIALECTS["llama.cpp"]
) -> list[str]:
    """llama-batched-bench for several streams with prompts of their own.

    The tool gives each stream a multiple of 256 cells and silently skips what does not fit the context asked for.
    """
    context = measure.streams * -(-(measure.prompt + measure.steps) // 256) * 256
    shape = ["-npp", str(measure.prompt), "-ntg", str(measure.steps), "-npl", str(measure.streams)]
    command = [str(tool), "-m", str(model), "-c", str(context), *shape, "-t", str(threads), "--output-format", "jsonl"]
    return command + [word for word in dialect.always if word != "1"]  # a switch here


def parse_bench(output: str) -> list[float]:
    """Tokens per second of each repeat. Raises ValueError where the output holds none."""
    rows = _json_lines(output)
    samples = [float(value) for row in rows for value in row.get("samples_ts", ())]
    return _usable(samples, output)


def parse_batched_bench(output: str) -> list[float]:
    """Tokens per second of all streams together, from lines of JSON or a table. Raises ValueError where there are none."""
    reported = [float(row["speed_tg"]) for row in _json_lines(output) if "speed_tg" in row]
    rows = (line.strip("| ").split("|") for line in output.splitlines() if re.match(r"\| *\d", line))
    return _usable(reported or [float(columns[_SPEED_COLUMN]) for columns in rows], output)


def parse_version(output: str) -> str:
    """The build, from the same rows."""
    return next((f"build {row['build_commit']}" for row in _json_lines(output) if "build_commit" in row), "unknown")


def _json_lines(output: str) -> list[dict[str, Any]]:
    """Objects of their own lines, or of one array."""
    if output.lstrip().startswith("["):
        rows: list[dict[str, Any]] = json.loads(output)
        return rows
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def _usable(samples: list[float], output: str) -> list[float]:
    if not samples or not all(math.isfinite(value) and value > 0 for value in samples):
        raise ValueError(f"no tokens per second in the output: {output[-300:]!r}")
    return samples
