"""Moving cached keys again and again, against turning the query instead: the error of the scores, by type of cache.

    python benchmarks/turned_keys.py [--shifts 1 10 100 1000 10000 100000] [--json OUT]

256 random keys of 64 dims stand in pages of each type. A shift moves them by 16 positions. `keys`: every shift turns the
keys where they lie, which rounds them to the cache's type again. `query`: nothing is written, the query is turned back by all
shifts at once. The error is that of the scores of 64 random queries against float64 over unrotated keys, root mean square
over root mean square, in per cent. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.kernels import Backend, KVPages, page_tensor_shapes, select_backend

TOKENS, DIM, BLOCK, STEP, QUERIES = 256, 64, 16, 16, 64
THETA = 100_000.0
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def inv_freq() -> Tensor:
    return THETA ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [N, DIM] float64, rotated at positions [N]."""
    angle = positions.double()[:, None] * inv_freq()
    first, second = x[:, : DIM // 2], x[:, DIM // 2 :]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), 1)


def filled(backend: Backend, dtype: torch.dtype, keys: Tensor) -> KVPages:
    """Pages that hold these keys [TOKENS, DIM], rotated at positions 0, 1, …"""
    shapes = page_tensor_shapes(TOKENS // BLOCK, BLOCK, 1, DIM, DIM, dtype)
    pages = KVPages(*(torch.zeros(shape, dtype=kind) for shape, kind in shapes))
    k = rotated(keys, torch.arange(TOKENS)).float()[:, None]
    plain = torch.ones(TOKENS, DIM // 2), torch.zeros(TOKENS, DIM // 2), torch.ones(TOKENS)
    backend.rotate_and_append(k.clone(), k, k.clone(), *plain, pages, torch.arange(TOKENS))
    return pages


def read(pages: KVPages) -> Tensor:
    """The keys as they stand in the pages, float64 [TOKENS, DIM]."""
    return pages.keys_of(torch.arange(TOKENS // BLOCK), DIM).reshape(TOKENS, DIM).double()


def error(scores: Tensor, right: Tensor) -> float | None:
    """In per cent; None where a score is not finite."""
    found = 100 * float((scores - right).pow(2).mean().sqrt() / right.pow(2).mean().sqrt())
    return found if math.isfinite(found) else None


def measure(shifts: list[int]) -> list[dict[str, Any]]:
    """A row for each number of shifts."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64)
    queries = torch.randn(QUERIES, DIM, generator=generator, dtype=torch.float64)
    backend = select_backend("cpu")
    rows: list[dict[str, Any]] = [{"shifts": count} for count in shifts]
    slots = torch.arange(TOKENS)
    angle = (STEP * inv_freq()).expand(TOKENS, -1)
    turn = angle.cos().float().contiguous(), angle.sin().float().contiguous()
    for name, dtype in TYPES.items():
        turned, still, done = filled(backend, dtype, keys), filled(backend, dtype, keys), 0
        for row in rows:
            moved = row["shifts"] * STEP
            for _ in range(row["shifts"] - done):
                backend.rerotate_cached_keys(turned, slots, slots, *turn, values=False)
            done = row["shifts"]
            places = torch.full((QUERIES,), moved + TOKENS)
            at = rotated(queries, places)
            right = at @ rotated(keys, torch.arange(TOKENS) + moved).T
            back = at.float()[:, None]
            cos, sin = backend.rotary_angles(
                inv_freq()[None, None], torch.zeros(QUERIES, dtype=torch.int64), places * 0 - moved
            )
            versions = backend.rotate_queries(back, torch.arange(QUERIES), cos[0], sin[0])[QUERIES:, 0]
            row[name] = {
                "keys": error(at @ read(turned).T, right),
                "query": error(versions.double() @ read(still).T, right),
            }
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row for each number of shifts."""
    lines = ["| shifts | " + " | ".join(f"{name}, keys | {name}, query" for name in TYPES) + " |"]
    lines.append("|--:" * (1 + 2 * len(TYPES)) + "|")
    for row in rows:
        found = [row[name][way] for name in TYPES for way in ("keys", "query")]
        cells = ["not finite" if x is None else f"{x:.2g} %" for x in found]
        lines.append(f"| {row['shifts']:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shifts", type=int, nargs="+", default=[1, 10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--json", type=Path, help="write every number as JSON")
    options = parser.parse_args()
    rows = measure(sorted(options.shifts))
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
