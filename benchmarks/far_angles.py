"""What angles of less precision do far out: a text read from position 0 on and from far positions on, on one model.

    python benchmarks/far_angles.py MODEL --text FILE [--tokens 512] [--positions 10000 100000 1000000] [--out FILE.json]

MODEL: what `windlass serve` takes. Rotation must not see where a text begins: what its log-probabilities change by between both
readings is the error of the angles, and of nothing else. It is measured of the angles that are served with (formed in float64,
their cosines and sines rounded to float32) and of less precise ones, which replace them here. Nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from long_text_report import publish

from windlass.engine.rotary.rotary_tables import RotaryTables, TokenRotations
from windlass.lab.scoring import Scorer
from windlass.server.startup.model_files import resolve_model
from windlass.server.text.tokenizer import Tokenizer

# (frequencies [G, T, D/2], positions [T]) -> the angles' cosines and sines, before they are rounded to float32
Angles = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _in_float32(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None] * frequencies.float()
    return angles.cos(), angles.sin()


def _in_bfloat16(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = (positions.bfloat16()[:, None] * frequencies.bfloat16()).double()
    return angles.cos(), angles.sin()


def _rounded_after(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.double()[:, None] * frequencies
    return angles.cos().bfloat16(), angles.sin().bfloat16()


KINDS: dict[str, Angles | None] = {
    "as served": None,
    "angles in float32": _in_float32,
    "angles in bfloat16": _in_bfloat16,
    "cosines and sines in bfloat16": _rounded_after,
}


@contextlib.contextmanager
def rotated_by(kind: Angles | None, first: int) -> Iterator[None]:
    """All texts stand at positions from `first` on, and their angles are of this kind."""
    own = RotaryTables.cos_sin

    def cos_sin(tables: RotaryTables, rotary_ids: Tensor, positions: Tensor) -> TokenRotations:
        found = own(tables, rotary_ids, positions + first)
        if kind is None:
            return found
        cos, sin = kind(tables.inv_freq.index_select(1, rotary_ids), positions + first)
        return found._replace(cos=cos.float().contiguous(), sin=sin.float().contiguous())

    RotaryTables.cos_sin = cos_sin  # type: ignore[method-assign]
    try:
        yield
    finally:
        RotaryTables.cos_sin = own  # type: ignore[method-assign]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = resolve_model(str(options.model))
    ids = Tokenizer.from_directory(model).encode(options.text.read_text(encoding="utf-8"))[: options.tokens + 1]
    scorer = Scorer.load(model, device="cpu", dtype="float32", kv_cache_dtype="float32")
    plan, rows = scorer.plan(len(ids)), []
    for name, kind in KINDS.items():
        read = []
        for first in (0, *options.positions):
            with rotated_by(kind, first):
                read.append(scorer.logprobs(ids, plan).double())
        for first, logprobs in zip(options.positions, read[1:], strict=True):
            apart = (logprobs - read[0]).abs()
            found = {
                "mean": float(apart.mean()),
                "largest": float(apart.max()),
                "bias": float((read[0] - logprobs).mean()),
            }
            rows.append({"angles": name, "first_position": first, "nats": found})
    return {
        "date": datetime.date.today().isoformat(),
        "model": str(options.model),
        "text": options.text.name,
        "tokens": len(ids) - 1,
        "rows": rows,
    }


def table(report: dict[str, Any]) -> str:
    """Markdown: a row for each kind of angles, a column for each first position; mean and largest change of a log-probability."""
    firsts = list(dict.fromkeys(row["first_position"] for row in report["rows"]))
    lines = ["| nats | " + " | ".join(f"from position {first:,}" for first in firsts) + " |"]
    lines.append("|---" + "|--:" * len(firsts) + "|")
    for name in dict.fromkeys(row["angles"] for row in report["rows"]):
        own = [row["nats"] for row in report["rows"] if row["angles"] == name]
        cells = [f"{nats['mean']:.2g}, at most {nats['largest']:.2g}" for nats in own]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="what `windlass serve` takes")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text, whose first tokens are read")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--positions", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--out", type=Path, help="write every number as JSON")
    options = parser.parse_args()
    publish(measure(options), options.out, table)


if __name__ == "__main__":
    main()
