"""Which number types a model is loaded in: what it computes in and what is cached."""

from __future__ import annotations

import os
from pathlib import Path

from windlass.engine.api.config import EngineConfig, parse_cache_dtype, parse_dtype
from windlass.engine.model.config_json.values import Config
from windlass.engine.model.spec import ModelSpec
from windlass.engine.model.storage import StoragePlan, block_formats, plan_bytes

_LEAST_ROUNDED = 64 << 20  # bytes of weights; what is smaller is quick enough in float32
BFLOAT16_NOTICE = (
    "computed in bfloat16, which this processor multiplies natively: `compute.dtype=float32` rounds nothing and takes twice as "
    "long for prompts"
)


def compute_dtype(config: EngineConfig, hf_config: Config, device: str, in_files: str | None = None) -> str:
    """What the model computes in. auto: on CUDA the checkpoint's own; on a CPU float32, but see `prefers_bfloat16`.

    in_files: the one type that the matrices have in the files, which counts where the config names none.
    """
    name = parse_dtype(config.compute.dtype)
    if name != "auto":
        return name
    if device == "cpu":
        return "float32"
    return parse_dtype(str(hf_config.get("dtype") or hf_config.get("torch_dtype") or in_files or "bfloat16"))


def cache_dtype(config: EngineConfig, dtype: str, *, rounded: bool) -> str:
    """What keys and values are cached in, where the model computes in `dtype`.

    rounded: whether compiled kernels multiply rows of 8 bits by weights in blocks. What such products change of predictions
    is ten thousand times what float16 does, and half the bytes are read (docs/benchmarks.md); so float16 is what `auto` means.
    """
    name = parse_cache_dtype(config.cache.dtype)
    if name != "auto":
        return name
    return "float16" if rounded and dtype == "float32" else dtype


def prefers_bfloat16(config: EngineConfig, spec: ModelSpec, plan: StoragePlan, stored: str) -> bool:
    """Whether `auto` means bfloat16 on a CPU whose kernels multiply that natively: prompts are read twice as quickly for 0.0005
    nats (docs/benchmarks.md). Only for matrices that are bfloat16 already and lie in no blocks, not for experts and ranks, where
    it was not measured, and not where tokens must not depend on how a text was cut.
    """
    return (
        parse_dtype(config.compute.dtype) == "auto"
        and stored == "bfloat16"
        and not config.compute.deterministic
        and config.compute.tensor_parallel == 1
        and not block_formats(spec, plan)
        and not spec.has_experts
        and plan_bytes(spec, plan) >= _LEAST_ROUNDED
    )


def processor_multiplies_bfloat16() -> bool:
    """What `kernels.has_native_bf16` says of a CPU, as far as that can be told without torch: by Linux's list
    of what the processor has, unless the kernels were told to use less of it."""
    if os.environ.get("WINDLASS_CPU_ISA", "avx512_bf16") not in ("avx512_bf16", "avx512_amx"):
        return False
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return "avx512_bf16" in flags
