"""Reads the files of load tests, single runs and sweeps alike, and refuses what later arithmetic would trip over.

Knows the JSON only: no figures, no pages. `results.py` owns the format of a run; a sweep is several of them with what
was searched for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.clients.loadtest.results import FORMAT, RequestRecord, RunResult

SWEEP_FORMAT = "windlass-bench-sweep/2"
_OLDER_SWEEP = "windlass-bench-sweep/1"  # its highest rate was one whose answers were in time, kept up with or not

_Number = int | float
_MOST = 2**63  # whole numbers in a file have no bound, and beyond that of a float arithmetic fails


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """A run and what a reader calls it. series: runs of one series share a line in charts; by default each has its own."""

    name: str
    result: RunResult
    series: str | None = None

    @property
    def line(self) -> str:
        """The series it belongs to."""
        return self.name if self.series is None else self.series


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The contents of one file. sweep: whether it is one; highest_rate: the highest rate in requests per second that
    met `slo` (limits in ms by measure), None where none did or none was searched for."""

    runs: tuple[NamedRun, ...]
    sweep: bool = False
    slo: Mapping[str, float] = field(default_factory=dict)
    highest_rate: float | None = None


def read_file(path: Path) -> Measured:
    """A run, named after the file, or a sweep, its runs named after their rates.

    Raises OSError, or ValueError whose one line says what is wrong, without the file's name.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not a JSON file: it is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON file: {error}") from None
    if isinstance(data, Mapping) and data.get("format") in (SWEEP_FORMAT, _OLDER_SWEEP):
        return _read_sweep(data)
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError(
            f"not the JSON of a load test: its `format` should be {FORMAT!r}, or {SWEEP_FORMAT!r} for a sweep"
        )
    result = read_run(data)
    return Measured(runs=(NamedRun(name=path.stem, result=result),), slo=result.slo)


def read_run(data: Mapping[str, Any]) -> RunResult:
    """RunResult.from_dict, and a look at every type, so that arithmetic on it cannot fail. Raises ValueError."""
    result = RunResult.from_dict(data)
    _check_run(result)
    return result


def _read_sweep(data: Mapping[str, Any]) -> Measured:
    runs = data.get("runs")
    if not isinstance(runs, Sequence) or isinstance(runs, str) or not runs:
        raise ValueError("this sweep holds no `runs`")
    highest = data.get("highest_rate") if data["format"] == SWEEP_FORMAT else None
    slo = data.get("slo") or {}
    if not _is_number(highest, optional=True):
        raise ValueError("the sweep's `highest_rate` is not a number")
    _check_numbers("slo", slo)
    results = [read_run(run) for run in runs]
    names = unique(_rate(result, index) for index, result in enumerate(results, 1))
    return Measured(
        runs=tuple(NamedRun(name=name, result=result) for name, result in zip(names, results, strict=True)),
        sweep=True,
        slo=slo,
        highest_rate=highest,
    )


def _rate(result: RunResult, index: int) -> str:
    return f"run {index}" if result.offered_rate is None else f"{result.offered_rate:.4g} req/s"


def unique(names: Iterable[str]) -> list[str]:
    """The names, those that repeat with a number behind them."""
    found: list[str] = []
    for name in names:
        candidate, number = name, 2
        while candidate in found:
            candidate, number = f"{name} ({number})", number + 1
        found.append(candidate)
    return found


def _check_run(run: RunResult) -> None:
    if not _is_number(run.duration_s) or run.duration_s < 0:
        raise ValueError("the run's `duration_s` is not a length of time")
    if not _is_number(run.offered_rate, optional=True):
        raise ValueError("the run's `offered_rate` is not a number")
    for name in ("settings", "server", "generator"):
        if not isinstance(getattr(run, name), Mapping):
            raise ValueError(f"the run's `{name}` is not an object")
    _check_numbers("slo", run.slo)
    _check_numbers("server_metrics", run.server_metrics)
    for place, record in enumerate(run.records):
        fault = _fault(record)
        if fault:
            raise ValueError(f"request {place} of the run has a wrong `{fault}`")


def _fault(record: RequestRecord) -> str | None:
    """The first field that is not what it should be."""
    if not _is_number(record.intended):
        return "intended"
    for name in ("sent", "ended"):
        if not _is_number(getattr(record, name), optional=True):
            return name
    if not all(map(_is_number, record.chunks)):
        return "chunks"
    if any(later < earlier for earlier, later in zip(record.chunks, record.chunks[1:], strict=False)):
        return "chunks"
    for name in ("index", "input_tokens", "output_tokens"):
        if not _is_count(getattr(record, name)):
            return name
    for name in ("cached_tokens", "reused_tokens", "asked_tokens"):
        if not (getattr(record, name) is None or _is_count(getattr(record, name))):
            return name
    for name in ("message", "label"):
        if not isinstance(getattr(record, name), str | None):
            return name
    return None if isinstance(record.outcome, str) else "outcome"


def _check_numbers(name: str, values: object) -> None:
    if not isinstance(values, Mapping) or not all(_is_number(value) for value in values.values()):
        raise ValueError(f"the run's `{name}` is not an object of numbers")


def _is_number(value: object, *, optional: bool = False) -> bool:
    if value is None:
        return optional
    if isinstance(value, bool) or not isinstance(value, _Number):
        return False
    return abs(value) < _MOST if isinstance(value, int) else math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST
