"""Loading of LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Everything is checked before anything is used; unsupported keys are refused by name. Takes no lock and changes no state, so it
may run concurrently with steps.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource
from windlass.engine.model.families.multimodal import text_module_name
from windlass.engine.model.loading.safetensors_header import FileHeader, read_header
from windlass.engine.model.loading.tensor_reader import read_tensors
from windlass.engine.model.loading.weights import row_order
from windlass.engine.model.lora import Adapter
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.model.weight_spec import WeightSpec
from windlass.engine.rotary.scaling_fields import format_value
from windlass.kernels import LowRankPart, LowRankUpdate

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MAX_CONFIG = 1 << 20  # bytes
_MAX_PATTERNS = 4096

_UNREAD = frozenset(
    # Without effect on an adapter that is only applied.
    "auto_mapping base_model_name_or_path revision inference_mode task_type lora_dropout peft_version runtime_config "
    "megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config arrow_config qalora_group_size "
    "exclude_modules layers_to_transform layers_pattern ensure_weight_tying".split()
)

_READ = frozenset("peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules bias".split())

# Keys of unsupported features, with their meaning for the message.
_REFUSED = {
    "modules_to_save": "whole modules saved with the adapter",
    "use_dora": "DoRA",
    "lora_bias": "biases of the low-rank matrices",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "changed parameters outside linear layers",
    "alora_invocation_tokens": "adapters that begin in the middle of a prompt",
    "use_qalora": "QALoRA",
}

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the model's own weights
_HEADS = ("lm_head", "embed_tokens", "wte", "embeddings")
_PLAIN_PATTERN = re.compile(r"[\w.]+")
_PATTERN = re.compile(r"[\w.\\^$|()\[\]*+?-]{1,256}")
T = TypeVar("T")


def refuse(message: str, code: str = "invalid_adapter") -> RequestError:
    """An error for files that are not an adapter of this model."""
    return RequestError(message, "lora_path", code)


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Contents of adapter_config.json. rank_patterns, alpha_patterns: exceptions by module name."""

    rank: int
    alpha: float
    rank_stabilized: bool
    rank_patterns: Sequence[tuple[re.Pattern[str], int]]
    alpha_patterns: Sequence[tuple[re.Pattern[str], float]]

    def rank_of(self, module: str) -> int:
        return _first_match(self.rank_patterns, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of the product of the two matrices (rank-stabilized: arXiv 2312.03732)."""
        rank = self.rank_of(module)
        alpha = _first_match(self.alpha_patterns, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def read_peft_config(directory: Path, max_rank: int) -> PeftConfig:
    """Read adapter_config.json. Raises RequestError that names the invalid key."""
    path = directory / CONFIG
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe may never end
            raise refuse(f"{CONFIG} is not a regular file")
        if status.st_size > _MAX_CONFIG:
            raise refuse(f"{CONFIG} is larger than {_MAX_CONFIG} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
    except RequestError:  # it is a ValueError
        raise
    except FileNotFoundError:
        raise refuse(f"{directory.name} contains no {CONFIG}: give a directory that PEFT has written") from None
    except OSError as error:
        raise refuse(f"cannot read {CONFIG}: {error.strerror or type(error).__name__}") from None
    except (ValueError, RecursionError):
        raise refuse(f"{CONFIG} is not valid JSON") from None
    if not isinstance(config, dict):
        raise refuse(f"{CONFIG} does not contain a JSON object")
    _check_understood(config)
    rank = _rank(config.get("r"), "r", max_rank)
    return PeftConfig(
        rank,
        _number(config.get("lora_alpha"), "lora_alpha"),
        _flag(config.get("use_rslora", False), "use_rslora"),
        _patterns(config, "rank_pattern", lambda value, key: _rank(value, key, max_rank)),
        _patterns(config, "alpha_pattern", _number),
    )


def _check_understood(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise refuse(f"{CONFIG}: peft_type is {format_value(config.get('peft_type'))}, only LORA is supported")
    for key, meaning in _REFUSED.items():
        if config.get(key):
            raise refuse(f"{CONFIG}: {key} ({meaning}) is not supported", "unsupported_adapter")
    if config.get("bias") not in (None, "none"):
        raise refuse(
            f"{CONFIG}: bias is {format_value(config['bias'])}, trained biases are not supported", "unsupported_adapter"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise refuse(
            f"{CONFIG}: init_lora_weights is {format_value(start)}, which changes the model's own weights: save it converted to "
            "LoRA",
            "unsupported_adapter",
        )
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if isinstance(target, str) and target.rpartition(".")[2] in _HEADS:
            raise refuse(
                f"{CONFIG}: target_modules names {format_value(target)}: only linear layers of attention and feed-forward change",
                "unsupported_adapter",
            )
    for key, value in config.items():
        if key not in _UNREAD | _READ | _REFUSED.keys() | {"init_lora_weights"} and value not in (None, False, [], {}):
            raise refuse(f"{CONFIG}: {format_value(key)} is not known here", "unsupported_adapter")


def _patterns(config: Mapping[str, Any], key: str, read: Callable[[object, str], T]) -> list[tuple[re.Pattern[str], T]]:
    """Patterns of a key and their values. Refuses patterns whose matching time is not bounded."""
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
            raise refuse(f"{CONFIG}: {key} has a pattern that is not supported: {format_value(pattern)}") from None
    return [(_compiled(text_module_name(pattern)), read(value, f"{key} {pattern}")) for pattern, value in found.items()]


def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern that matches module names which end with it; see PEFT's `get_pattern_key`."""
    if _PLAIN_PATTERN.fullmatch(pattern):
        return re.compile(rf"(?:.*\.)?{pattern}")
    if pattern.startswith("^"):
        return re.compile(pattern[1:])
    return re.compile(rf"(?:.*\.)?(?:{pattern})")


def _first_match(patterns: Sequence[tuple[re.Pattern[str], T]], module: str, otherwise: T) -> T:
    return next((value for pattern, value in patterns if pattern.fullmatch(module)), otherwise)


def _rank(value: object, key: str, most: int) -> int:
    if type(value) is not int or value < 1:
        raise refuse(f"{CONFIG}: {key[:80]} must be a whole number of at least 1, got {format_value(value)}")
    if value > most:
        raise refuse(
            f"{CONFIG}: {key[:80]} is {value}, and this server accepts ranks up to {most} (`adapters.max_rank`)",
            "rank_too_large",
        )
    return value


def _number(value: object, key: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e9:  # type: ignore[arg-type]
        raise refuse(f"{CONFIG}: {key[:80]} must be a number, got {format_value(value)}")
    return float(value)  # type: ignore[arg-type]


def _flag(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise refuse(f"{CONFIG}: {key} must be true or false, got {format_value(value)}")
    return value


_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.(?:default\.)?weight")
_FLOATS = ("F32", "F16", "BF16", "F64")
_MAX_HEADER = 16 << 20  # bytes of a file in addition to its tensors
Pair = tuple[Tensor, Tensor]  # A [r, K] and B [N, r]


@dataclass(frozen=True, slots=True)
class AdapterStorage:
    """How matrices are stored. compute: the compute dtype. stored: `adapters.dtype`, None if it is not set."""

    compute: torch.dtype
    device: torch.device
    stored: torch.dtype | None = None

    def matrix(self, matrix: Tensor) -> Tensor:
        """A float32 matrix in its stored type. Raises RequestError if its numbers are too large for that."""
        if self.stored is not None:
            found = matrix.to(self.device, self.stored)
            if not found.isfinite().all():
                name = str(self.stored).removeprefix("torch.")
                raise refuse(f"{WEIGHTS} contains numbers that are too large for `adapters.dtype={name}`", "not_finite")
            return found
        if self.device.type == "cpu" and self.compute == torch.float32:
            for narrow in (torch.bfloat16, torch.float16):  # fewer bytes to read in every step
                found = matrix.to(narrow)
                if torch.equal(found.float(), matrix):
                    return found
        return matrix.to(self.device, self.compute)


def read_adapter(source: AdapterSource, spec: ModelSpec, storage: AdapterStorage, max_rank: int) -> Adapter:
    """Read the adapter in a directory. Raises RequestError that names the fault.

    spec: of the model, with rows in the order of the original weights, whatever the format of its files.
    """
    if spec.has_folded_factors:
        raise refuse(
            "the weights of this GGUF file are multiplied by factors that it does not name and that the adapter was trained "
            "without: serve the original Hugging Face model",
            "unsupported_adapter",
        )
    directory = Path(source.path)
    described = read_peft_config(directory, max_rank)
    found = _read(directory, described, spec, max_rank)
    digest = hashlib.sha256(str(storage.stored).encode())
    for module, (down, up) in sorted(found.items()):
        digest.update(f"{module} {tuple(down.shape)} {tuple(up.shape)} {described.scale_of(module)!r} ".encode())
        for tensor in (down, up):
            digest.update(tensor.contiguous().numpy().tobytes())
    parts: list[dict[str, LowRankUpdate]] = []
    for prefix, weights in spec.adapted_parts():
        changes = {weight.name: _join_updates(weight, prefix, found, described, storage) for weight in weights}
        parts.append({name: change for name, change in changes.items() if change is not None})
    info = AdapterInfo(
        source.adapter_id,
        source.name,
        source.path,
        rank=max(down.shape[0] for down, _ in found.values()),
        targets=tuple(sorted({module.rpartition(".")[2] for module in found})),
        num_bytes=sum(change.nbytes for part in parts for change in part.values()),
        digest=digest.hexdigest(),
    )
    return Adapter(info, tuple(parts))


def _modules(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix that an adapter can change, by module name."""
    return {
        prefix + stored.name.removesuffix(".weight"): (stored.rows, weight.shape[1])
        for prefix, weights in spec.adapted_parts()
        for weight in weights
        for stored in weight.stored
    }


def _read(directory: Path, described: PeftConfig, spec: ModelSpec, max_rank: int) -> dict[str, Pair]:
    """Both matrices of every changed module, float32, checked."""
    path, known = directory / WEIGHTS, _modules(spec)
    if not path.is_file():
        pickled = (directory / "adapter_model.bin").exists()
        other = " (adapter_model.bin may run code when it is read: convert it)" if pickled else ""
        raise refuse(f"{directory.name} contains no {WEIGHTS}{other}")
    most = _MAX_HEADER + sum(8 * max_rank * (rows + columns) for rows, columns in known.values())
    try:
        size = path.stat().st_size
        if size > most:
            raise refuse(f"{WEIGHTS} has {size} bytes, more than an adapter of this model of rank {max_rank} can have")
        header = read_header(path)
        names = _check_tensor_names(header, known, described)
        tensors: dict[str, Tensor] = {}

        def destination(name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
            return tensors.setdefault(name, torch.empty(shape, dtype=dtype))

        for chunk in read_tensors(path, destination):
            if not chunk.finite:
                raise refuse(f"tensor {chunk.name!r} contains NaN or infinite numbers", "not_finite")
    except LoadError as error:
        raise refuse(str(error).replace(str(path), WEIGHTS)) from None
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise refuse(f"cannot read {WEIGHTS}: {reason or str(error).replace(str(path), WEIGHTS)}") from None
    return {module: (tensors[down].float(), tensors[up].float()) for module, (down, up) in names.items()}


def _check_tensor_names(
    header: FileHeader, known: dict[str, tuple[int, int]], described: PeftConfig
) -> dict[str, tuple[str, str]]:
    """The names of A and B of every module in the file. Refuses shapes and types that do not match this model."""
    names: dict[str, dict[str, str]] = {}
    for name, tensor in header.tensors.items():
        matched = _NAME.fullmatch(name)
        if matched is None:
            raise refuse(
                f"tensor {name[:200]!r} is not supported: only lora_A and lora_B of linear layers are",
                "unsupported_adapter",
            )
        module, which = matched[1], matched[2]
        module = next((name for name in (module, text_module_name(module)) if name in known), f"model.{module}")
        if module not in known:
            raise refuse(
                f"tensor {name[:200]!r}: this model has no linear layer {matched[1][:200]!r} that an adapter can change",
                "unknown_module",
            )
        if which in names.setdefault(module, {}):
            raise refuse(f"module {module!r} has two tensors lora_{which}")
        names[module][which] = name
        rank, (rows, columns) = described.rank_of(module), known[module]
        wanted = (rank, columns) if which == "A" else (rows, rank)
        if tensor.shape != wanted:
            raise refuse(
                f"tensor {name[:200]!r} has the shape {list(tensor.shape)[:4]} where this model and the adapter's rank ask for "
                f"{list(wanted)}: it is an adapter of another model or rank",
                "wrong_shape",
            )
        if tensor.dtype not in _FLOATS:
            raise refuse(f"tensor {name[:200]!r} has the type {str(tensor.dtype)[:20]!r}: use F32, F16 or BF16")
    if not names:
        raise refuse(f"{WEIGHTS} contains no tensors")
    for module, pair in names.items():
        if len(pair) < 2:
            raise refuse(f"module {module!r} has only one of lora_A and lora_B")
    return {module: (pair["A"], pair["B"]) for module, pair in names.items()}


def _join_updates(
    weight: WeightSpec,
    prefix: str,
    found: dict[str, Pair],
    described: PeftConfig,
    storage: AdapterStorage,
) -> LowRankUpdate | None:
    """The low-rank update of a weight from those of its tensors; None if no tensor changes."""
    downs: list[Tensor] = []
    parts: list[LowRankPart] = []
    first = rank_first = 0
    for stored in weight.stored:
        module = prefix + stored.name.removesuffix(".weight")
        if module in found:
            down, up = found[module]
            order = row_order(stored)
            own = storage.matrix(up if order is None else up[order])
            parts.append(LowRankPart.of(own, first, rank_first, described.scale_of(module)))
            downs.append(down)
            rank_first += len(down)
        first += stored.rows
    return LowRankUpdate.of(storage.matrix(torch.cat(downs)), parts) if downs else None
