"""Pooling and reranking settings in the files of sentence-transformers (modules.json).

Reranking by token logits may also be declared in config.json under vLLM's keys. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.engine.bounded_files import read_json_text
from windlass.engine.errors import LoadError, reason_of
from windlass.engine.interface.model_info import PoolingDefaults, PoolingKind
from windlass.engine.model.config_json.classifier_head import ClassifierTokens, read_classifier_tokens
from windlass.engine.rotary.scaling_fields import format_value

# Keys of 1_Pooling/config.json, one of which is true.
_MODES: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}

_NAMES: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "first"}  # of newer files


def read_pooling(directory: Path) -> PoolingDefaults:
    """Pooling from modules.json and the files that it names. Raises LoadError for files that cannot be read."""
    if not (directory / "modules.json").is_file():
        return PoolingDefaults()
    modules = _read_json(directory / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise LoadError(f"{directory / 'modules.json'} must hold a list of modules: download or copy the file again")
    kind: PoolingKind | None = None
    normalize, refusal = False, None
    for module in modules:
        name = str(module.get("type")).rpartition(".")[2]
        if name == "Pooling":
            kind, mode = _kind(_read_json(directory / str(module.get("path")) / "config.json"))
            if kind is None:
                refusal = f"the model's files ask for pooling {mode}, which is not supported"
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            refusal = f"the model's files ask for a {name} after the pooling, which is not supported"
    if kind is None and refusal is None:
        refusal = "the model's files list modules and no pooling"
    return PoolingDefaults(kind or "last", normalize, declared=True, refusal=refusal)


def _kind(config: Any) -> tuple[PoolingKind | None, str]:
    """The kind, None if it is not supported, and its name in the file."""
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


def read_reranker_config(directory: Path) -> ClassifierTokens | None:
    """The tokens of a reranker; None if the files of this directory name none. Raises LoadError for invalid files."""
    config = _read_json(directory / "config.json", required=False)
    named = read_classifier_tokens(config) if isinstance(config, Mapping) else None
    if named is not None:
        return named
    modules = _read_json(directory / "modules.json", required=False)
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, Mapping) and str(module.get("type")).rpartition(".")[2] == "LogitScore":
            file = directory / str(module.get("path")) / "config.json"
            return ClassifierTokens(
                _token_ids(_read_json(file, required=False), file), instruction=_instruction(directory)
            )
    return None


def _token_ids(config: Any, file: Path) -> tuple[int, ...]:
    if not isinstance(config, Mapping):
        raise LoadError(f"{file}, which modules.json names, is missing or contains no object: download the model again")
    wanted, other = config.get("true_token_id"), config.get("false_token_id")
    found: tuple[Any, ...] = (wanted,) if other is None else (wanted, other)
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in found):
        raise LoadError(f"{file}: true_token_id and false_token_id must be token ids, got {format_value(list(found))}")
    return found


def _instruction(directory: Path) -> str | None:
    """The prompt that sentence-transformers puts before pairs by default."""
    config = _read_json(directory / "config_sentence_transformers.json", required=False)
    if not isinstance(config, Mapping) or not isinstance(config.get("prompts"), Mapping):
        return None
    found = config["prompts"].get(config.get("default_prompt_name"))
    return found if isinstance(found, str) and found else None


def _read_json(path: Path, *, required: bool = True) -> Any:
    """Contents of a JSON file; None if there is none and it is not required. Raises LoadError."""
    if not required and not path.exists():
        return None
    try:
        return json.loads(read_json_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"cannot read {path}: {reason_of(error)}: download or copy the file again") from None
