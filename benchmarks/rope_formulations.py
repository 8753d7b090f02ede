"""Formulations of the rotary embedding beside one another: JAX, Equinox, torch, torch.compile and Windlass in one run.

Reproduces the comparison of real and complex formulations published while rotary embeddings were added to Equinox
(github.com/patrick-kidger/equinox, issue 566): x of shape (4096, 1024), float32, uniform, base 10000, cosines and sines
made inside the timed call. The published code negates the second half of x and does not swap the halves, which is no
rotation; every form is timed as written and as corrected.

Every result is checked against a float64 rotation, before the timing and after every turn. Turns are interleaved,
A B C … A B C …, each on fresh random inputs, one per call; a plain copy of the tensor runs along as the bound.

    python benchmarks/rope_formulations.py [--rounds 15] [--calls 5] [--threads N] [--json FILE]

Runs with what is installed of jax, equinox and a C++ compiler (for torch.compile), and says what is missing. Linux only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rope_variants import BASE, Variant, all_variants
from torch import Tensor

from windlass import kernels

SHAPE = (4096, 1024)
ROTATION_LIMIT = 2e-3  # a rotation changes no length and no score at one distance by more than this
# Seconds for 10,000 calls as written, which rotates nothing; the machine was not named.
PUBLISHED = {"without JIT": {"complex": 299.1, "real": 193.2}, "with JIT": {"complex": 71.4, "real": 83.8}}


# -- verification -------------------------------------------------------------------------------------------------------


def float64_form(x: Tensor, expects: str, rows: Tensor, heads: int = 1) -> Tensor:
    """What rows of x [T, D] should become, float64 [len(rows), D]; written apart from the forms above."""
    x = x[rows].double()
    if expects == "copy":
        return x
    first, second = x.view(len(rows), heads, 2, -1).unbind(2)  # [R, H, D/2H]
    half = first.shape[-1]
    theta = torch.tensor([BASE ** (-j / half) for j in range(half)], dtype=torch.float64)
    angle = (rows.double()[:, None] * theta)[:, None]
    if expects == "rotation":
        turned = torch.view_as_real(torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle))
        return turned.movedim(-1, 2).reshape(len(rows), -1)
    parts = first * (angle.cos() + angle.sin()), second * (angle.cos() - angle.sin())
    return torch.stack(parts, 2).reshape(len(rows), -1)


def deviation(variant: Variant, x: Tensor, result: Tensor, rows: Tensor) -> float:
    """Largest distance of the result's rows from the float64 form; NaN where an output was never written."""
    return float((result[rows].double() - float64_form(x, variant.expects, rows, variant.heads)).abs().max())


def pair_norm_change(x: Tensor, result: Tensor, heads: int) -> float:
    """Largest change of the length of a pair (j, j + D/2). A whole row would hide it: over many random pairs the changes
    of a form that rotates nothing cancel."""
    before, after = (t.double().view(len(t), heads, 2, -1).norm(dim=2) for t in (x, result))
    return float((after - before).abs().max())


def score_spread(variant: Variant, shape: tuple[int, int], distance: int) -> float:
    """How much the score of two fixed vectors `distance` apart varies with where they stand, over the product of norms.

    A rotation's score depends on the distance alone (RoFormer, section 3.2).
    """
    query, key = torch.randn(2, shape[1])
    at_query = variant.run(query.expand(shape).contiguous()).double()
    at_key = variant.run(key.expand(shape).contiguous()).double()
    scores = (at_query[distance:] * at_key[: shape[0] - distance]).sum(-1) / (query.norm() * key.norm())
    return float(scores.max() - scores.min())


def verify(variant: Variant, shape: tuple[int, int]) -> None:
    """Check a variant against float64 and against what a rotation is; fills `checks`, raises ValueError where it fails."""
    x = torch.rand(shape)
    result = variant.run(x)
    error = deviation(variant, x, result, torch.arange(shape[0]))
    variant.checks = {"largest_error": error}
    if not error <= variant.tolerance:
        raise ValueError(f"{variant.framework}, {variant.name}: off by {error} from its float64 form")
    if variant.expects == "copy":
        return
    norm, spread = pair_norm_change(x, result, variant.heads), score_spread(variant, shape, shape[0] // 4)
    variant.checks |= {"pair_norm_change": norm, "score_spread": spread}
    keeps_norms, keeps_scores = norm < ROTATION_LIMIT, spread < ROTATION_LIMIT
    if (keeps_norms, keeps_scores) != (variant.expects == "rotation",) * 2:
        raise ValueError(
            f"{variant.framework}, {variant.name}: expected {variant.expects}, but the lengths of pairs change by {norm} "
            f"and scores at one distance by {spread}"
        )


# -- timing -------------------------------------------------------------------------------------------------------------


def turn(variant: Variant, inputs: Sequence[Tensor], rows: Tensor) -> None:
    """Time one call per input but the first, which warms up, and check the last result."""
    own = [variant.own_input(x) for x in inputs]
    variant.poison()
    variant.finish(variant.call(own[0]))
    start = time.perf_counter()
    for x in own[1:]:
        result = variant.finish(variant.call(x))
    variant.milliseconds.append((time.perf_counter() - start) * 1e3 / (len(own) - 1))
    error = deviation(variant, inputs[-1], variant.read(result), rows)
    if not error <= variant.tolerance:
        raise ValueError(f"{variant.framework}, {variant.name}: a timed result is off by {error}")


def measure(variants: Sequence[Variant], shape: tuple[int, int], rounds: int, calls: int) -> None:
    rows = torch.linspace(0, shape[0] - 1, min(shape[0], 64)).long()
    for index in range(rounds):
        inputs = [torch.rand(shape) for _ in range(calls + 1)]
        for variant in variants:
            time.sleep(0.02)  # idle threads of the framework before spin for a while
            turn(variant, inputs, rows)
        print(f"round {index + 1} of {rounds}", file=sys.stderr, flush=True)


def processor_seconds() -> tuple[float, float]:
    """Busy seconds of all processors, and of this process."""
    ticks = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    own = os.times()
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), own.user + own.system


def machine() -> dict[str, Any]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    versions = {"python": platform.python_version()}
    for package in ("torch", "jax", "jaxlib", "equinox", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": names[0].split(":")[1].strip() if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "versions": versions,
        "windlass_kernels": kernels.select_backend("cpu").explain(),
    }


def summary(variants: Sequence[Variant], shape: tuple[int, int]) -> list[dict[str, Any]]:
    bound = statistics.median(variants[0].milliseconds)
    rows = []
    for variant in variants:
        median = statistics.median(variant.milliseconds)
        rows.append(
            {
                "framework": variant.framework,
                "form": variant.name,
                "tables": variant.tables,
                "kind": variant.expects,
                "median_ms": median,
                "min_ms": min(variant.milliseconds),
                "max_ms": max(variant.milliseconds),
                "over_copy": median / bound,
                "gb_per_s": 2 * math.prod(shape) * 4 / median / 1e6,  # x read, result written, tables not counted
                **variant.checks,
            }
        )
    return rows


def complex_over_real(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The published question: time of the complex form over the real one, tables made in the call."""
    ratios = {f"published, {mode}": {"as written": t["complex"] / t["real"]} for mode, t in PUBLISHED.items()}
    milliseconds = {(row["framework"], row["form"]): row["median_ms"] for row in rows if row["tables"] == "in the call"}
    for framework in dict.fromkeys(name for name, form in milliseconds if form.startswith("complex")):
        ratios[framework] = {
            suffix: milliseconds[framework, f"complex, {suffix}"] / milliseconds[framework, f"real, {suffix}"]
            for suffix in ("as written", "corrected")
        }
    return ratios


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print("| framework | form | tables | ms a call (min–max) | over a copy | largest error | scores vary by |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        spread = f"{row['score_spread']:.0e}" if "score_spread" in row else "–"
        print(
            f"| {row['framework']} | {row['form']} | {row['tables']} "
            f"| {row['median_ms']:.2f} ({row['min_ms']:.2f}–{row['max_ms']:.2f}) | {row['over_copy']:.2f} "
            f"| {row['largest_error']:.0e} | {spread} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of every variant (default 15)")
    parser.add_argument("--calls", type=int, default=5, help="timed calls a turn, 48 MB of inputs for each (default 5)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="processors to use (default all)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    args = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    if min(args.rounds, args.calls, args.threads) < 1 or args.threads > len(available):
        parser.error(f"--rounds and --calls are at least 1, --threads 1 to {len(available)}")
    # XLA takes as many threads as it may use processors, so JAX must come after this.
    os.sched_setaffinity(0, available[: args.threads])
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    report = machine()
    variants, missing = all_variants(SHAPE)
    for lack in missing:
        print(f"left out: {lack}", file=sys.stderr)
    for variant in variants:
        verify(variant, SHAPE)
    busy, own, start = *processor_seconds(), time.perf_counter()
    measure(variants, SHAPE, args.rounds, args.calls)
    wall = time.perf_counter() - start
    busy_after, own_after = processor_seconds()
    rows = summary(variants, SHAPE)
    report |= {
        "load_after": os.getloadavg()[0],
        "processors_busy_with_others": max(0.0, (busy_after - busy) - (own_after - own)) / wall,
        "left_out": missing,
        "shape": SHAPE,
        "rounds": args.rounds,
        "calls": args.calls,
        "published_seconds_for_10000_calls": PUBLISHED,
        "results": rows,
        "complex_over_real": complex_over_real(rows),
    }
    print(json.dumps({key: value for key, value in report.items() if key != "results"}, indent=2))
    print_table(report["results"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
