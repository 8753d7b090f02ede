"""How a model's files have its states pooled: what sentence-transformers writes beside a checkpoint. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from windlass.engine.api.model_heads import PoolingDefaults
from windlass.engine.api.pooling import PoolingKind
from windlass.engine.errors import LoadError

# Modes of pooling as 1_Pooling/config.json has them, of which one is true.
_MODES: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
_NAMES: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "first"}  # of newer files


def read_pooling(directory: Path) -> PoolingDefaults:
    """What modules.json and the files that it names say. Raises LoadError for files that cannot be read."""
    if not (directory / "modules.json").is_file():
        return PoolingDefaults()
    modules = _read_required_json(directory / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise LoadError(f"{directory / 'modules.json'} must hold a list of modules: download or copy the file again")
    kind: PoolingKind | None = None
    normalize, refusal = False, None
    for module in modules:
        name = str(module.get("type")).rpartition(".")[2]
        if name == "Pooling":
            kind, mode = _kind(_read_required_json(directory / str(module.get("path")) / "config.json"))
            if kind is None:
                refusal = f"the model's files ask for pooling {mode}, which is not offered"
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            refusal = f"the model's files ask for a {name} behind the pooling, which is not offered"
    if kind is None and refusal is None:
        refusal = "the model's files list modules and no pooling"
    return PoolingDefaults(kind or "last", normalize, declared=True, refusal=refusal)


def _kind(config: Any) -> tuple[PoolingKind | None, str]:
    """The kind, None for one that is not offered, and what the file calls it."""
    if not isinstance(config, dict):
        return None, "of no known form"
    named = config.get("pooling_mode")
    if named is not None:
        modes = [named] if isinstance(named, str) else list(named)
        known = [_NAMES.get(str(mode)) for mode in modes]
    else:
        modes = [mode for mode, chosen in config.items() if mode.startswith("pooling_mode_") and chosen is True]
        known = [_MODES.get(mode) for mode in modes]
    return (known[0] if len(known) == 1 else None), " and ".join(map(str, modes)) or "none"


def _read_required_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {path}: {error}: download or copy the file again") from None
