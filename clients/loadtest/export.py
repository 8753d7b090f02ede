"""Writes what a load test found to files beside its JSON: one row of CSV per request, and the JSON of a sweep."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from windlass.clients.loadtest.results import RequestRecord, RunResult, Summary, to_json
from windlass.clients.loadtest.sweep import SweepResult

_FIELDS = (
    "index",
    "label",
    "outcome",
    "message",
    "intended",
    "sent",
    "ended",
    "input_tokens",
    "output_tokens",
    "asked_tokens",
    "cached_tokens",
    "reused_tokens",
    "finish_reason",
    "request_id",
)
_MEASURES = ("ttft_ms", "ttft_actual_ms", "tpot_ms", "e2el_ms", "lag_ms")
COLUMNS = ("run", "rate", *_FIELDS, "chunks", *_MEASURES, "itl_mean_ms", "itl_p99_ms")


def write_csv(result: RunResult | SweepResult, path: Path) -> None:
    """One row per request under COLUMNS; times in seconds of their run, measures in ms, empty where there is none.

    run: 0, or the number of the run in its sweep. Raises OSError.
    """
    runs = result.runs if isinstance(result, SweepResult) else (result,)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for number, run in enumerate(runs):
            writer.writerows([number, run.offered_rate, *_row(record)] for record in run.records)


def write_sweep(result: SweepResult, path: Path) -> None:
    """The sweep as one JSON object. Raises OSError."""
    head = json.dumps(result.summary(), indent=1, allow_nan=False).removesuffix("\n}")
    path.write_text(head + ',\n "runs": [\n' + ",\n".join(map(to_json, result.runs)) + "\n ]\n}\n", encoding="utf-8")


def _row(record: RequestRecord) -> list[object]:
    gaps = Summary.of(record.gaps_ms)
    return [
        *(getattr(record, name) for name in _FIELDS),
        len(record.chunks),
        *(getattr(record, name) for name in _MEASURES),
        gaps.mean,
        gaps.p99,
    ]
