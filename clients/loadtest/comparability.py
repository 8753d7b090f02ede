"""What makes load tests hard to compare: settings that differ, and runs that a reader should doubt.

Knows runs on two sides, no figures' intervals and no verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from windlass.clients.loadtest import words
from windlass.clients.loadtest.results import RunResult

Side = Sequence[RunResult]

_OWN = {"seed"}  # settings that runs of one side are free to differ in


def differing(first: Side, second: Side) -> dict[str, tuple[str, str]]:
    """Settings and facts of the server but its address that are not the same on both sides, absent ones as –."""
    sides = [[_flat(run) for run in side] for side in (first, second)]
    found = {}
    for name in dict.fromkeys(name for side in sides for flat in side for name in flat):
        values = [list(dict.fromkeys(flat.get(name, "–") for flat in side)) for side in sides]
        if sorted(values[0]) != sorted(values[1]):
            found[name] = (", ".join(values[0]), ", ".join(values[1]))
    return found


def cautions(first: Side, second: Side) -> Iterator[str]:
    """What a reader should know first, a line each."""
    runs = [*_named("first", first), *_named("second", second)]
    for name, run in runs:
        if run.interrupted:
            yield f"the {name} was interrupted"
        if run.generator.get("limited"):
            yield f"in the {name} the load generator, not the server, was the limit"
        failed = sum(run.errors.values())
        if failed:
            yield f"{failed:,} of {len(run.records):,} requests of the {name} failed; latencies leave them out"
        if run.duration_s <= 0:
            yield f"the {name} took no time: its rates cannot be told"
    for name, side in (("first", first), ("second", second)):
        flats = [_flat(run) for run in side]
        unequal = [key for key in flats[0] if key not in _OWN and any(flat.get(key) != flats[0][key] for flat in flats)]
        if unequal:
            yield f"the runs of the {name} side differ among themselves in {', '.join(unequal)}"
    if any(run.slo != first[0].slo for run in (*first, *second)):
        yield "the runs had different limits: their goodput is not compared"
    for name, run in runs:
        if _drifts(run):
            yield f"time to first token kept growing during the {name}: its figures depend on how long it lasted"


def _named(side: str, runs: Side) -> list[tuple[str, RunResult]]:
    if len(runs) == 1:
        return [(f"{side} run", runs[0])]
    return [(f"{side} side's run {number}", run) for number, run in enumerate(runs, 1)]


def _flat(run: RunResult) -> dict[str, str]:
    flat = {**dict(words.flat(run.settings)), **dict(words.flat(run.server, "server."))}
    return {name: value for name, value in flat.items() if name != "server.url"}


def _drifts(run: RunResult) -> bool:
    """Whether each fifth of the requests waited longer for its first token than the one before, the last twice the first."""
    ordered = sorted(run.records, key=lambda record: (record.intended, record.index))
    waits = [record.ttft_ms for record in ordered if record.completed and record.ttft_ms is not None]
    size = len(waits) // 5
    if size < 10:
        return False
    fifths = [math.fsum(waits[k * size : (k + 1) * size]) / size for k in range(5)]
    return all(later > earlier for earlier, later in pairwise(fifths)) and fifths[-1] > 2 * fifths[0]
