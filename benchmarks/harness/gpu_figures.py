"""Figures of a GPU, the bounds measured in the same run, and the report that collects both."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured time, its bound and its goal.

    bound: the shortest possible time, or None. wanted: the smallest accepted share of the bound, or without a bound the largest
    accepted value; None: no goal. plain: the values are not seconds. note: why nothing was measured.
    """

    name: str
    seconds: float | None
    bound: float | None = None
    wanted: float | None = None
    plain: bool = False
    note: str = ""

    @property
    def share(self) -> float | None:
        """The bound over the measured time."""
        return self.bound / self.seconds if self.seconds and self.bound else None

    @property
    def verdict(self) -> str:
        """ "met", "missed", "not measured", or nothing where nothing is asked."""
        if self.seconds is None:
            return "not measured"
        if self.wanted is None:
            return ""
        share = self.share
        met = self.seconds <= self.wanted if share is None else share >= self.wanted
        return "met" if met else "missed"

    def line(self) -> str:
        """A row of the table: name, measured, bound, share, wanted, verdict."""
        if self.seconds is None:
            return f"| {self.name} | {self.note} | | | | {self.verdict} |"
        share = self.share
        limit = "" if self.wanted is None else self._shown(self.wanted) if share is None else f"{self.wanted:.0%}"
        cells = (
            self.name,
            self._shown(self.seconds),
            "" if self.bound is None else self._shown(self.bound),
            "" if share is None else f"{share:.0%}",
            limit,
            self.verdict,
        )
        return f"| {' | '.join(cells)} |"

    def _shown(self, number: float) -> str:
        if self.plain:
            return f"{number:.4g}"
        return f"{number * 1e3:.3f} ms" if number < 1 else f"{number:.2f} s"

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "name": self.name,
            "measured": self.seconds,
            "bound": self.bound,
            "share": self.share,
            "wanted": self.wanted,
            "verdict": self.verdict,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Bounds:
    """bandwidth: bytes per second, read and written, of a copy. matrix: operations per second of a large product."""

    device: torch.device
    dtype: torch.dtype
    bandwidth: float
    matrix: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Bounds:
        """Of a copy of a gibibyte and a product of 8,192 rows and columns; tiny: of less."""
        source = torch.zeros((1 << 22 if tiny else 1 << 30) // 4, device=device)
        target = torch.empty_like(source)
        copied = fastest(lambda: target.copy_(source), device, 10, captured=False)  # captured it is not one, and slower
        size = 256 if tiny else 8192
        left, right = torch.randn(2, size, size, device=device).to(dtype)
        multiplied = fastest(lambda: torch.mm(left, right), device, 10)
        return cls(device, dtype, 2 * source.nbytes / copied, 2 * size**3 / multiplied)


def reason_of(error: BaseException) -> str:
    """One line for a table: the type of an error and the first line of its message, if it has one."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]]).replace("|", "/")


def wait(device: torch.device) -> None:
    """Until the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fastest(
    work: Callable[[], object], device: torch.device, repeats: int, each: int = 8, *, captured: bool = True
) -> float:
    """Seconds of one call: the least of some rounds of a few calls, captured on a GPU, so that asking for them does not count."""
    work()
    wait(device)
    again = _together(work, each, device if captured else torch.device("cpu"))
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        again()
        wait(device)
        best = min(best, (time.perf_counter() - begin) / each)
    return best


def _together(work: Callable[[], object], each: int, device: torch.device) -> Callable[[], object]:
    def calls() -> None:
        for _ in range(each):
            work()

    if device.type != "cuda":
        return calls
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    again: Callable[[], object] = graph.replay
    return again


class Growing:
    """A report that is saved after every figure. data: its content. failed: names of measurements that failed."""

    def __init__(self, head: dict[str, Any], out: Path | None) -> None:
        self.data: dict[str, Any] = head | {"figures": []}
        self.failed: list[str] = []
        self._out = out
        self._write()  # fails early where the file cannot be written

    def add(self, figures: Iterable[Figure]) -> None:
        """Print and save each figure as soon as it is measured."""
        for figure in figures:
            print(figure.line(), flush=True)
            self.data["figures"].append(figure.as_dict())
            self._write()

    def agreed(self, case: dict[str, Any]) -> None:
        """Print and save a case of agreement()."""
        nats = "" if case["nats"] is None else f"{case['nats']:.2g} nats"
        cells = f"{case['name']}: as on the CPU | {nats} | {case['bound']:g} | {case['verdict']} | {case['note']}"
        print(f"| {cells} |", flush=True)
        self.data.setdefault("agreement", []).append(case)
        if case["nats"] is None:
            self.failed.append(case["name"])
        self._write()

    def grew(self, row: dict[str, Any]) -> None:
        """Print and save a row of growth()."""
        name = f"growth: {row['streams']} stream(s) behind {row['context']:,} tokens, a token"
        print(Figure(name, row["seconds"], row["bound"]).line(), flush=True)
        self.data.setdefault("growth", []).append(row)
        self._write()

    @contextlib.contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """Record an exception as a figure of this name that was not measured, and continue."""
        try:
            yield
        except Exception as error:
            self.failed.append(name)
            self.add([Figure(name, None, note=reason_of(error))])

    def missed(self) -> list[str]:
        """Names of the figures that missed their goal."""
        found = [*self.data.get("agreement", []), *self.data["figures"]]
        return [one["name"] for one in found if one["verdict"] == "missed"]

    def _write(self) -> None:
        if self._out is not None:
            partial = self._out.with_name(self._out.name + ".partial")
            partial.write_text(json.dumps(self.data, indent=2) + "\n", encoding="utf-8")
            partial.replace(self._out)  # complete, even if the run is interrupted
