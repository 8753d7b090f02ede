"""From a model directory to a decoder with weights, plus the facts about it that the rest of the engine needs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from windlass import kernels
from windlass.engine.config import EngineConfig, parse_cache_dtype, parse_dtype
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.model import weight_cache
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.families import read_spec
from windlass.engine.model.spec import ModelSpec
from windlass.engine.model.weights import Progress, load_weights, matrix_dtypes, randomize_weights, weights_digest
from windlass.engine.rotary.config_names import RotaryGroup, apply_scaling
from windlass.engine.rotary.learned import with_learned_frequencies
from windlass.kernels.packed import MAX_COLUMNS

_SCALING_OPTION = "--rope-scaling"  # what an operator calls EngineConfig.rope_scaling


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """digest identifies the weights (see `weights_digest`); cache_dtype is that of the KV pages.

    rotary_groups: the model's own, before the server's scaling.
    """

    decoder: Decoder
    cache_dtype: torch.dtype
    digest: bytes
    notices: tuple[str, ...]
    rotary_groups: tuple[RotaryGroup, ...]


def load_model(config: EngineConfig, progress: Progress | None = None) -> LoadedModel:
    """Read config.json, allocate the decoder, fill it. Raises LoadError with one line that says what to do."""
    directory = Path(config.model)
    hf_config = read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    spec = read_spec(hf_config, read_json(generation_path) if generation_path.is_file() else None)
    spec = replace(spec, rotary_groups=with_learned_frequencies(spec.rotary_groups, directory))
    own_groups = spec.rotary_groups
    spec = _with_server_scaling(spec, config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, hf_config, device)
    check_quantization(config, spec, device)
    cache_name = parse_cache_dtype(config.kv_cache_dtype)
    cache_dtype = dtype if cache_name == "auto" else _torch_dtype(cache_name)
    try:
        weight_dtype = choose_weight_dtype(config, hf_config, dtype, device)
        decoder = Decoder(
            spec, dtype, device, weight_dtype, quantization=config.quantization, deterministic=config.deterministic
        )
        if config.load_format == "dummy":
            notices = weight_cache.without_effect(config, "--load-format dummy")
            randomize_weights(decoder, config.seed, progress)
            digest = f"dummy {config.seed}".encode()
        else:
            notices = fill(decoder, directory, config, progress)
            digest = weights_digest(directory)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error) and "memory" not in str(error):
            raise
        raise LoadError(
            f"the weights do not fit into memory on {device}: use a smaller model or --dtype bfloat16"
        ) from None
    return LoadedModel(decoder, cache_dtype, digest, spec.notices + notices, own_groups)


def fill(decoder: Decoder, directory: Path, config: EngineConfig, progress: Progress | None = None) -> tuple[str, ...]:
    """Put the checkpoint's weights into the decoder, quantized ones from the cache if there is one; returns notices."""
    if config.weight_cache is None or decoder.quantization is None:
        load_weights(decoder, directory, progress)
        return weight_cache.without_effect(config, "--quantization none")
    cache = weight_cache.WeightCache(config.weight_cache, directory, decoder)
    if not cache.load(decoder, progress):
        load_weights(decoder, directory, progress)
        cache.store(decoder, progress)
    return tuple(cache.notices)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or LoadError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(
            f"{path} does not exist: give a Hugging Face model directory (config.json, *.safetensors, …)"
        ) from None
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise LoadError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} does not hold a JSON object: download it again")
    return value


def _with_server_scaling(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    try:
        return replace(
            spec, rotary_groups=apply_scaling(spec.rotary_groups, config.rope_scaling, param=_SCALING_OPTION)
        )
    except RequestError as error:
        raise LoadError(error.message) from None


def choose_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one; LoadError for a device this torch does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise LoadError(f"--device {name}: {reason}: use cpu, or cuda with a CUDA build of torch") from None
    return device


def choose_dtype(name: str, hf_config: dict[str, Any], device: torch.device) -> torch.dtype:
    """The compute dtype. auto: float32 on a CPU, whatever the checkpoint holds; on CUDA the checkpoint's own."""
    name = parse_dtype(name)
    if name != "auto":
        return _torch_dtype(name)
    if device.type == "cpu":
        return torch.float32
    stored = hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16"
    return _torch_dtype(parse_dtype(str(stored)))


def choose_weight_dtype(
    config: EngineConfig, hf_config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """How matrices are stored: under `auto` on a CPU as the checkpoint has them, where the kernels read that.

    What counts is the files, not the config's word for them: a float32 file under a bfloat16 config keeps its digits.
    """
    if parse_dtype(config.dtype) != "auto" or device.type != "cpu" or not kernels.reads_narrow_weights():
        return dtype
    if config.load_format == "dummy":
        stored = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32")
        return _torch_dtype(stored) if stored in ("bfloat16", "float16") else dtype
    found = matrix_dtypes(Path(config.model))
    return next(iter(found)) if len(found) == 1 and found <= {torch.bfloat16, torch.float16} else dtype


def check_quantization(config: EngineConfig, spec: ModelSpec, device: torch.device) -> None:
    """LoadError where quantized weights do not work: off the CPU, and for matrices wider than integer sums allow."""
    if config.quantization == "none":
        return
    option = f"--quantization {config.quantization}"
    if config.quantization not in ("int8", "int4"):
        raise LoadError(f"{option} is not known: use none, int8 or int4")
    if device.type != "cpu":
        raise LoadError(f"{option} works on a CPU only so far: use --device cpu, or --quantization none on {device}")
    widest = max(max(spec.hidden_size, layer.intermediate_size) for layer in spec.layers)
    if widest > MAX_COLUMNS:
        raise LoadError(f"{option} takes at most {MAX_COLUMNS} inputs a layer, this model has {widest}: use none")


def _torch_dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
    return known[name]
