"""What the measurements on long texts share: their options, and a report as JSON and as a Markdown table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = dict[str, Any]


def make_parser(description: str | None, *, max_len: int, stretch: int | None = None) -> argparse.ArgumentParser:
    """model, --text, --max-len and --out, and --stretch where there is one; numbers are the defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory")
    parser.add_argument("--text", type=Path, action="append", required=True, help="UTF-8 text, or a directory of *.txt")
    parser.add_argument("--max-len", type=int, default=max_len, help="tokens read of each text")
    if stretch is not None:
        parser.add_argument("--stretch", type=int, default=stretch, help="positions of one cell of the table")
    parser.add_argument("--out", type=Path, help="write every number as JSON")
    return parser


def publish(report: Report, out: Path | None, table: Callable[[Report], str]) -> None:
    """Write the report to `out` where that is given, and print its table."""
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))
