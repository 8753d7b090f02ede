"""What the checks found, as a table for the terminal, Markdown and JSON. Asks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from windlass.clients.conformance.suite import CheckResult


def to_json(server: str, model: str, results: Sequence[CheckResult], seed: int) -> dict[str, Any]:
    return {"server": server, "model": model, "seed": seed, "checks": [asdict(result) for result in results]}


def to_lines(results: Sequence[CheckResult]) -> list[str]:
    """One or two lines a check: the verdict with its figures, then what was asked or why nothing was."""
    lines = []
    for result in results:
        lines.append(f"{result.name:<10} {result.verdict:<12} {_figures(result)}".rstrip())
        lines.append(f"{'':<10} {result.question} {result.detail}")
    return lines


def to_markdown(server: str, model: str, results: Sequence[CheckResult]) -> str:
    lines = [
        f"# Rotary positions of `{model}` at {server}",
        "",
        "Distances are the largest change of a token's log-probability, in nats.",
        "",
        "| check | verdict | distance | repeated request | allowed | what was asked |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        figures = " | ".join("–" if value is None else f"{value:.4f}" for value in (one.effect, one.noise, one.bound))
        detail = " ".join(f"{one.question} {one.detail}".replace("|", "\\|").split())
        lines.append(f"| {one.name} | {one.verdict} | {figures} | {detail} |")
    return "\n".join(lines) + "\n"


def exit_status(results: Sequence[CheckResult]) -> int:
    """0: something holds and nothing differs; 1: something differs; 2: nothing was shown."""
    if any(result.verdict == "differs" for result in results):
        return 1
    return 0 if any(result.verdict == "holds" for result in results) else 2


def _figures(result: CheckResult) -> str:
    if result.effect is None or result.noise is None or result.bound is None:
        return ""
    return f"{result.effect:.4f} nats (repeated request {result.noise:.4f}, allowed {result.bound:.4f})"
