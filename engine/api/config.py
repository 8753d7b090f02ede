"""What an operator may set about the engine. Plain data, torch-free: it is built by the CLI and sent to the engine process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from windlass.engine.errors import LoadError
from windlass.engine.rotary.policy import RopeUpdate
from windlass.engine.rotary.scaling import RopeScaling
from windlass.engine.suggestions import did_you_mean

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4"]

MAX_SPECULATIVE_TOKENS = 64

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float": "float32", "half": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All engine options; `None` means "choose sensibly when the model is known".

    model: directory with config.json. device: a torch device string or "auto" (CUDA when there is one).
    max_model_len: longest prompt + output; None is the model's own length, clamped to what the KV budget holds.
    max_num_batched_tokens: token budget of one step. max_num_seqs: sequences that run at once.
    max_waiting: requests that may wait before new ones are refused. kv_cache_memory: bytes for KV pages.
    block_size: tokens per KV block, a multiple of 16. threads: torch intra-op threads.
    cores: the only ones the engine may run on.
    quantization: weights of 8 or 4 bits, quantized while they are loaded; none: as `dtype` says.
    weight_cache: folder in which quantized weights are kept for the next start, "beside" for one in the model's directory,
    None for none.
    rope_update: policy of requests that name none; None: `recompute` for longrope, `frozen` for everything else.
    deterministic: the bits of a row depend on nothing but its own sequence, at a price in speed.
    speculative_ngram: tokens a running stream may propose per step by prompt lookup (0: none). speculative_ngram_min, _max:
    how many of its last tokens must, and how many may, agree with an earlier place.
    target_step_seconds: prefill chunks shrink so that a step beside running streams stays under this (0: no bound).
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: Quantization = "none"
    weight_cache: str | None = None
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_waiting: int = 1024
    block_size: int = 16
    kv_cache_memory: int | None = None
    prefix_caching: bool = True
    rope_scaling: RopeScaling | None = None
    rope_update: RopeUpdate | None = None
    deterministic: bool = False
    threads: int | None = None
    cores: tuple[int, ...] | None = None
    speculative_ngram: int = 0
    speculative_ngram_min: int = 2
    speculative_ngram_max: int = 4
    target_step_seconds: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_waiting",
            "threads",
            "kv_cache_memory",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LoadError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.block_size < 16 or self.block_size % 16:
            raise LoadError(f"--block-size must be a multiple of 16, got {self.block_size}")
        if not 0 <= self.speculative_ngram <= MAX_SPECULATIVE_TOKENS:
            raise LoadError(
                f"--speculative-ngram must lie between 0 and {MAX_SPECULATIVE_TOKENS}, got {self.speculative_ngram}"
            )
        if not 1 <= self.speculative_ngram_min <= self.speculative_ngram_max:
            raise LoadError(
                "--speculative-ngram-min must be at least 1 and at most --speculative-ngram-max, got "
                f"{self.speculative_ngram_min} and {self.speculative_ngram_max}"
            )
        if self.target_step_seconds < 0:
            raise LoadError(f"--target-step-seconds must not be negative, got {self.target_step_seconds}")


def parse_dtype(name: str) -> str:
    """Normalise a dtype name ("bf16", "bfloat16", "auto", …) or raise LoadError naming the allowed ones."""
    full = _DTYPE_NAMES.get(name.lower(), name.lower())
    known = ("auto", "float32", "bfloat16", "float16")
    if full not in known:
        meant = did_you_mean(name, known)
        raise LoadError(f"unknown dtype {name!r}{meant}: use auto, float32, bfloat16 or float16")
    return full


def parse_cache_dtype(name: str) -> str:
    """As `parse_dtype`, for cached keys and values, which may be int8 too."""
    if name.lower() == "int8":
        return "int8"
    try:
        return parse_dtype(name)
    except LoadError:
        meant = did_you_mean(name, ("auto", "float32", "bfloat16", "float16", "int8"))
        raise LoadError(f"unknown cache dtype {name!r}{meant}: use auto, float32, bfloat16, float16 or int8") from None


def parse_size(text: str) -> int:
    """Bytes from "4GiB", "500MB", "1.5g" or a plain number; raises LoadError that shows the form."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] == "i" or float(match[1]) <= 0:
        raise LoadError(f"cannot read {text!r} as a size: write for example 4GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])
