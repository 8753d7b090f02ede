"""What several engines are together: their statistics summed, their pages side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from windlass.engine.api.looks import CacheGroupSnapshot, CacheSnapshot
from windlass.engine.api.request import EngineStats, PersistStats


def sum_stats(parts: Sequence[EngineStats | None]) -> EngineStats:
    """The statistics of all engines; None for one that has none now. `kv_cache_usage` is that of the fullest."""
    known = [part for part in parts if part is not None]
    values: dict[str, Any] = {}
    for field in fields(EngineStats):
        each = [getattr(part, field.name) for part in known]
        match field.name:
            case "engines":
                continue
            case "kv_cache_usage":
                values[field.name] = max(each, default=0.0)
            case "recomputed_tokens":
                values[field.name] = dict(sum(map(Counter, each), Counter()))
            case "persist":
                values[field.name] = _sum_persist(each)
            case "step_tokens":
                values[field.name] = tuple(map(sum, zip(*filter(None, each), strict=True)))
            case name if name.endswith("_seconds"):
                values[field.name] = tuple(seconds for samples in each for seconds in samples)
            case _:
                values[field.name] = sum(each)
    return EngineStats(**values, engines=tuple(parts))


def _sum_persist(parts: Sequence[PersistStats]) -> PersistStats:
    """All engines keep their blocks in one folder, so what lies there is not added up."""
    found = {field.name: [getattr(part, field.name) for part in parts] for field in fields(PersistStats)}
    shared = ("disk_bytes", "known_blocks")
    return PersistStats(**{n: max(each, default=0) if n in shared else sum(each) for n, each in found.items()})


def concat_cache_snapshots(pictures: Sequence[tuple[int, CacheSnapshot]]) -> CacheSnapshot:
    """One picture of several caches, each with the number of its engine."""
    groups: list[CacheGroupSnapshot] = []
    before = 0
    for engine, picture in pictures:
        for group in picture.groups:
            owners = tuple(owner if owner < 0 else owner + before for owner in group.owners)
            groups.append(replace(group, owners=owners, engine=engine))
        before += len(picture.sequences)
    sequences = tuple(sequence for _, picture in pictures for sequence in picture.sequences)
    seconds = max(picture.seconds for _, picture in pictures)
    return CacheSnapshot(pictures[0][1].block_size, tuple(groups), sequences, seconds)
