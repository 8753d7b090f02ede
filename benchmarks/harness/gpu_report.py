"""The report of a run on a GPU, which grows figure by figure and lies whole in its file after each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.gpu_figures import Figure, reason_of


class Growing:
    """data: what is in the file. failed: names of what was to be measured and failed. out: None for no file."""

    def __init__(self, head: dict[str, Any], out: Path | None) -> None:
        self.data: dict[str, Any] = head | {"figures": []}
        self.failed: list[str] = []
        self._out = out
        self._write()  # a place that cannot be written to is known before anything takes time

    def add(self, figures: Iterable[Figure]) -> None:
        """Print and keep each as soon as it is there."""
        for figure in figures:
            print(figure.line(), flush=True)
            self.data["figures"].append(figure.as_dict())
            self._write()

    def agreed(self, case: dict[str, Any]) -> None:
        """A case of agreement()."""
        nats = "" if case["nats"] is None else f"{case['nats']:.2g} nats"
        cells = f"{case['name']}: as on the CPU | {nats} | {case['bound']:g} | {case['verdict']} | {case['note']}"
        print(f"| {cells} |", flush=True)
        self.data.setdefault("agreement", []).append(case)
        if case["nats"] is None:
            self.failed.append(case["name"])
        self._write()

    def grew(self, row: dict[str, Any]) -> None:
        """A row of growth()."""
        name = f"growth: {row['streams']} stream(s) behind {row['context']:,} tokens, a token"
        print(Figure(name, row["seconds"], row["bound"]).line(), flush=True)
        self.data.setdefault("growth", []).append(row)
        self._write()

    @contextlib.contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """What fails within is a figure of this name that was not measured, and why. The run goes on."""
        try:
            yield
        except Exception as error:
            self.failed.append(name)
            self.add([Figure(name, None, note=reason_of(error))])

    def missed(self) -> list[str]:
        """The names of what was missed."""
        found = [*self.data.get("agreement", []), *self.data["figures"]]
        return [one["name"] for one in found if one["verdict"] == "missed"]

    def _write(self) -> None:
        if self._out is not None:
            partial = self._out.with_name(self._out.name + ".partial")
            partial.write_text(json.dumps(self.data, indent=2) + "\n", encoding="utf-8")
            partial.replace(self._out)  # whole, whenever the run is cut short
