"""Options that a device or a checkpoint has nothing for, refused by what they say and before anything is read.

Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from windlass.engine.api.config import EngineConfig
from windlass.engine.errors import LoadError
from windlass.engine.model.loading.gguf_index import GGUFIndex
from windlass.engine.model.loading.quantized.plan import QuantizedCheckpoint


def check_quantization(config: EngineConfig) -> None:
    """LoadError for a way to quantize weights that there is not."""
    if config.compute.quantization == "none":
        return
    option = f"`compute.quantization={config.compute.quantization}`"
    if config.compute.quantization not in ("int8", "int4"):
        raise LoadError(f"{option} is not known: use none, int8 or int4")


def check_replicas(config: EngineConfig, device: str) -> None:
    """LoadError where several engines cannot stand side by side. device: "cpu", "cuda:1", …"""
    if device != "cpu" and (config.replicas > 1 or config.loading.shared_memory):
        raise LoadError(
            f"`replicas` share the cores and the memory of a CPU, not {device}: use `compute.device=cpu`, or leave it out"
        )


def check_device_share(config: EngineConfig, device: str) -> None:
    """LoadError for a share of a GPU where there is none. device: "cpu", "cuda:1", …"""
    if device == "cpu" and config.cache.device_share is not None:
        raise LoadError("`cache.device_share` is for GPUs: use `cache.memory` on a CPU")


def check_not_quantized_twice(
    config: EngineConfig, directory: Path, gguf: GGUFIndex | None, quantized: QuantizedCheckpoint | None
) -> None:
    """LoadError where weights would be quantized that are quantized in their file."""
    if config.compute.quantization == "none":
        return
    already = None
    if gguf is not None and gguf.is_quantized():
        already = f"{gguf.files[0]} is quantized already ({', '.join(gguf.types())})"
    elif quantized is not None and quantized.is_integers:
        already = f"{directory} is quantized already ({quantized.title})"
    if already is not None:
        raise LoadError(
            f"{already}: leave `compute.quantization={config.compute.quantization}` out, or give the unquantized model"
        )
