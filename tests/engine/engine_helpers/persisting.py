"""Successive engines with a disk tier in one folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.engines import make_core
from helpers.eventually import eventually

from windlass.engine.core.engine_core import EngineCore


def files_in(folder: Path) -> list[Path]:
    """Return the files of stored blocks."""
    return sorted(folder.glob("*/*.safetensors"))


@contextlib.contextmanager
def keeping(model: Path, folder: Path, **options: Any) -> Iterator[EngineCore]:
    """An engine that has scanned `folder` for its files, and has written its blocks at the end."""
    core = make_core(model, **{"deterministic": True, "kv_persist": str(folder), **options})
    try:
        assert core._store is not None
        core._store.wait_scanned(30)
        yield core
        written(core)
    finally:
        core.close()


def written(core: EngineCore) -> None:
    """Wait until every block is written or has failed."""
    eventually(lambda: not core.stats().persist.waiting_blocks or core.stats().persist.failures, 30)
