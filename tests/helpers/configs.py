"""Engine configurations from a flat list of options. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.engine.interface.config import EngineConfig
from windlass.server.config.option_names import from_flat


def engine_config(model: str | Path, **values: Any) -> EngineConfig:
    """`engine_config(DEMO, kv_cache_memory=8 << 20, device="cpu")`; omitted options have their defaults."""
    return from_flat(str(model), values)
