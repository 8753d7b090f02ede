"""Reads adapter_config.json as PEFT writes it. What it does not understand it refuses by name. Knows no tensors."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.engine.errors import RequestError
from windlass.engine.model.families.text_part import text_module_name

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MAX_CONFIG = 1 << 20  # bytes
_MAX_PATTERNS = 4096
_UNREAD = frozenset(
    # What changes nothing of an adapter that is saved and only used.
    "auto_mapping base_model_name_or_path revision inference_mode task_type lora_dropout peft_version runtime_config "
    "megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config arrow_config qalora_group_size "
    "exclude_modules layers_to_transform layers_pattern ensure_weight_tying".split()
)
_READ = frozenset("peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules bias".split())
# With what they mean, for the message.
_REFUSED = {
    "modules_to_save": "whole modules saved beside the adapter",
    "use_dora": "DoRA",
    "lora_bias": "biases of the low-rank matrices",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "changed parameters outside linear layers",
    "alora_invocation_tokens": "adapters that begin in the middle of a prompt",
    "use_qalora": "QALoRA",
}
_CHANGES_BASE = (
    "pissa",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
)  # ways of initialising that take from the model's own weights
_HEADS = ("lm_head", "embed_tokens", "wte", "embeddings")
_PLAIN_PATTERN = re.compile(r"[\w.]+")
_PATTERN = re.compile(r"[\w.\\^$|()\[\]*+?-]{1,256}")


def refuse(message: str, code: str = "invalid_adapter") -> RequestError:
    """The error for files that make no adapter of this model."""
    return RequestError(message, "lora_path", code)


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What adapter_config.json says. rank_patterns, alpha_patterns: of modules that have their own."""

    rank: int
    alpha: float
    rank_stabilized: bool
    rank_patterns: Sequence[tuple[re.Pattern[str], int]]
    alpha_patterns: Sequence[tuple[re.Pattern[str], float]]

    def rank_of(self, module: str) -> int:
        return int(_first_match(self.rank_patterns, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What the product of the two matrices is multiplied by (rank-stabilized: 2312.03732)."""
        rank = self.rank_of(module)
        alpha = _first_match(self.alpha_patterns, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def read_peft_config(directory: Path, max_rank: int) -> PeftConfig:
    """Raises RequestError that names the key at fault."""
    path = directory / CONFIG
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe's end may never come
            raise refuse(f"{CONFIG} is no regular file")
        if status.st_size > _MAX_CONFIG:
            raise refuse(f"{CONFIG} is larger than {_MAX_CONFIG} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
    except RequestError:  # a ValueError, too
        raise
    except FileNotFoundError:
        raise refuse(f"{directory.name} holds no {CONFIG}: give a directory as PEFT writes it") from None
    except OSError as error:
        raise refuse(f"cannot read {CONFIG}: {error.strerror or type(error).__name__}") from None
    except (ValueError, RecursionError):
        raise refuse(f"{CONFIG} is not valid JSON") from None
    if not isinstance(config, dict):
        raise refuse(f"{CONFIG} does not hold a JSON object")
    _check_understood(config)
    rank = _whole(config.get("r"), "r", max_rank)
    return PeftConfig(
        rank,
        _number(config.get("lora_alpha"), "lora_alpha"),
        _flag(config.get("use_rslora", False), "use_rslora"),
        [
            (_compiled(text_module_name(k)), _whole(v, f"rank_pattern {k}", max_rank))
            for k, v in _patterns(config, "rank_pattern").items()
        ],
        [
            (_compiled(text_module_name(k)), _number(v, f"alpha_pattern {k}"))
            for k, v in _patterns(config, "alpha_pattern").items()
        ],
    )


def _check_understood(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise refuse(f"{CONFIG}: peft_type is {_shown(config.get('peft_type'))}, only LORA is supported")
    for key, meaning in _REFUSED.items():
        if config.get(key):
            raise refuse(f"{CONFIG}: {key} ({meaning}) is not supported", "unsupported_adapter")
    if config.get("bias") not in (None, "none"):
        raise refuse(
            f"{CONFIG}: bias is {_shown(config['bias'])}, trained biases are not supported", "unsupported_adapter"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise refuse(
            f"{CONFIG}: init_lora_weights is {_shown(start)}, which changes the model's own weights: save it converted to LoRA",
            "unsupported_adapter",
        )
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if isinstance(target, str) and target.rpartition(".")[2] in _HEADS:
            raise refuse(
                f"{CONFIG}: target_modules names {_shown(target)}: only linear layers of attention and feed-forward change",
                "unsupported_adapter",
            )
    for key, value in config.items():
        if key not in _UNREAD | _READ | _REFUSED.keys() | {"init_lora_weights"} and value not in (None, False, [], {}):
            raise refuse(f"{CONFIG}: {_shown(key)} is not known here", "unsupported_adapter")


def _patterns(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Only patterns whose matching takes bounded time."""
    found = config.get(key) or {}
    if not isinstance(found, dict) or len(found) > _MAX_PATTERNS:
        raise refuse(f"{CONFIG}: {key} must be an object of at most {_MAX_PATTERNS} entries")
    for pattern in found:
        quick = (
            _PATTERN.fullmatch(pattern) and sum(map(pattern.count, "*+?")) <= 3 and not re.search(r"\)[*+?]", pattern)
        )
        try:
            if not quick:
                raise ValueError
            re.compile(pattern)
        except (ValueError, re.error):
            raise refuse(f"{CONFIG}: {key} has a pattern that is not supported: {_shown(pattern)}") from None
    return found


def _compiled(pattern: str) -> re.Pattern[str]:
    """Matches whole names of modules that end with the pattern; see PEFT's `get_pattern_key`."""
    if _PLAIN_PATTERN.fullmatch(pattern):
        return re.compile(rf"(?:.*\.)?{pattern}")
    if pattern.startswith("^"):
        return re.compile(pattern[1:])
    return re.compile(rf"(?:.*\.)?(?:{pattern})")


def _first_match(patterns: Sequence[tuple[re.Pattern[str], float]], module: str, otherwise: float) -> float:
    """The value of the first pattern that fits the module's name."""
    return next((value for pattern, value in patterns if pattern.fullmatch(module)), otherwise)


def _whole(value: object, key: str, most: int) -> int:
    if type(value) is not int or value < 1:
        raise refuse(f"{CONFIG}: {key[:80]} must be a whole number of at least 1, got {_shown(value)}")
    if value > most:
        raise refuse(
            f"{CONFIG}: {key[:80]} is {value}, and this server takes ranks up to {most} (`adapters.max_rank`)",
            "rank_too_large",
        )
    return value


def _number(value: object, key: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e9:  # type: ignore[arg-type]
        raise refuse(f"{CONFIG}: {key[:80]} must be a number, got {_shown(value)}")
    return float(value)  # type: ignore[arg-type]


def _flag(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise refuse(f"{CONFIG}: {key} must be true or false, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
