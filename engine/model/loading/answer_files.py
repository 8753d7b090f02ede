"""Whether a model's files say that it judges pairs of texts by the word that it goes on with. Imports no torch.

They say so in config.json, in vLLM's keys, or in modules.json, where sentence-transformers lists a LogitScore. Names say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.answers import read_classifier_tokens
from windlass.engine.rotary.fields import format_value


@dataclass(frozen=True, slots=True)
class RerankerConfig:
    """tokens: the one whose logit counts, and perhaps one whose logit is taken off it, by text or id.

    is_qwen3_reranker: see `ClassifierTokens`. instruction: of requests that bring none; None: what the prompt itself has.
    """

    tokens: tuple[str | int, ...]
    is_qwen3_reranker: bool = False
    instruction: str | None = None


def read_reranker_config(directory: Path) -> RerankerConfig | None:
    """None where the files of this directory say nothing of it. Raises LoadError for what they say and cannot be understood."""
    config = _read_optional_json(directory / "config.json")
    named = read_classifier_tokens(config) if isinstance(config, Mapping) else None
    if named is not None:
        return RerankerConfig(named.tokens, named.is_qwen3_reranker)
    modules = _read_optional_json(directory / "modules.json")
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, Mapping) and str(module.get("type")).rpartition(".")[2] == "LogitScore":
            file = directory / str(module.get("path")) / "config.json"
            return RerankerConfig(_token_ids(_read_optional_json(file), file), instruction=_instruction(directory))
    return None


def _token_ids(config: Any, file: Path) -> tuple[int, ...]:
    if not isinstance(config, Mapping):
        raise LoadError(f"{file} is missing or holds no object, and modules.json names it: download the model again")
    wanted, other = config.get("true_token_id"), config.get("false_token_id")
    found: tuple[Any, ...] = (wanted,) if other is None else (wanted, other)
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in found):
        raise LoadError(f"{file}: true_token_id and false_token_id must be token ids, got {format_value(list(found))}")
    return found


def _instruction(directory: Path) -> str | None:
    """The prompt that sentence-transformers puts in front of pairs where nobody asks for another."""
    config = _read_optional_json(directory / "config_sentence_transformers.json")
    if not isinstance(config, Mapping) or not isinstance(config.get("prompts"), Mapping):
        return None
    found = config["prompts"].get(config.get("default_prompt_name"))
    return found if isinstance(found, str) and found else None


def _read_optional_json(path: Path) -> Any:
    """What a file holds, None where there is none. Raises LoadError for one that is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"cannot read {path}: {error}: download or copy the file again") from None
