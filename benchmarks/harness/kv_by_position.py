"""Loss by position with narrower KV caches, compared with a float32 cache.

    python benchmarks/real_model.py kv MODEL --text FILE_OR_DIR [--text …] [--max-len 8192] [--out FILE.json]

Reads the first --max-len tokens of each text with a float32 cache and with each of --dtypes; weights and everything else
are float32. Prints a Markdown table: perplexity by stretch, and the change of it in per cent with a 95 % interval (paired:
Student's t over texts). An interrupted run resumes from --keep. Nothing is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from harness.long_text_report import make_parser, publish

from windlass.clients.loadtest.intervals import mean_interval
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.candidates import SweepCandidate
from windlass.lab.perplexity_sweep import PerplexityRunner
from windlass.lab.result_log import PassLog
from windlass.lab.scoring import Scorer
from windlass.lab.sweep_progress import SweepProgress
from windlass.lab.sweep_texts import find_files, make_windows
from windlass.server.text.tokenizer import Tokenizer

CONFIDENCE = 0.95


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Losses by stretch and cache: means over texts, and what each cache adds to the float32 one's."""
    texts, windows = make_windows(options.model, find_files(options.text), options.max_len, 1, Tokenizer.from_directory)
    scaling = json.loads(options.scaling)
    RopeScaling.from_dict(scaling)
    kept, losses = PassLog(options.keep), {}
    with SweepProgress() as progress:
        for dtype in ("float32", *options.dtypes):
            scorer = Scorer.load(options.model, device="cpu", dtype="float32", kv_cache_dtype=dtype)
            measured = PerplexityRunner(scorer, texts, windows, options.stretch, kept, progress)
            candidate = SweepCandidate(f"{dtype} cache", "other", scaling, label=dtype)
            measured.announce([candidate])
            losses[dtype] = measured(candidate).nll  # [texts, rows]
    ends = [*range(0, options.max_len, options.stretch), options.max_len]
    spans = [*pairwise(ends), (0, options.max_len)]
    rows = []
    for low, high in spans:
        plain = losses["float32"][:, low:high].mean(axis=1)
        row: dict[str, Any] = {"from": low, "to": high, "float32": float(plain.mean())}
        for dtype in options.dtypes:
            mean, interval = mean_interval((losses[dtype][:, low:high].mean(axis=1) - plain).tolist(), CONFIDENCE)
            row[dtype] = {"nats": mean, "interval": None if interval is None else [interval.low, interval.high]}
        rows.append(row)
    return {
        "date": datetime.date.today().isoformat(),
        "model": options.model.name,
        "rope_scaling": scaling,
        "texts": [{"name": text.name, "sha256": text.digest} for text in texts],
        "rows": rows,
    }


def table(report: dict[str, Any]) -> str:
    """Markdown: a row per stretch, a column per cache."""
    rows = report["rows"]
    dtypes = [key for key in rows[0] if key not in ("from", "to", "float32")]
    lines = ["| positions | perplexity, float32 cache | " + " | ".join(f"{dtype}, %" for dtype in dtypes) + " |"]
    lines.append("|---" + "|--:" * (1 + len(dtypes)) + "|")
    for row in rows:
        cells = [f"{row['from']:,}–{row['to']:,}", f"{math.exp(row['float32']):.2f}"]
        for dtype in dtypes:
            found = row[dtype]
            around = found["interval"]
            cells.append(percent(found["nats"]) + (f" ({' to '.join(map(percent, around))})" if around else ""))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def percent(nats: float) -> str:
    return f"{100 * np.expm1(nats):+.2f}"


def main() -> None:
    parser = make_parser(__doc__, max_len=8192, stretch=2048)
    parser.add_argument("--dtypes", nargs="+", default=["int8", "bfloat16"], help="caches to compare")
    parser.add_argument("--scaling", default='{"rope_type": "default"}', help="rotary scaling, as JSON")
    parser.add_argument("--keep", type=Path, help="file of finished passes, which are not repeated")
    options = parser.parse_args()
    publish(measure(options), options.out, table)


if __name__ == "__main__":
    main()
