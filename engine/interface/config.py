"""Engine configuration.

Plain data without torch: built by the command line and sent to the engine process.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.rotary.auto_scaling import ScalingThreshold
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_policy import RopeUpdate

Quantization = Literal["none", "int8", "int4"]
Activations = Literal["int8", "float32"]
LoadFormat = Literal["safetensors", "dummy"]

PERSIST_SIZE = 4 << 30  # bytes
MAX_SPECULATIVE_TOKENS = 64
MAX_DRAFT_TOKENS = 16
MAX_RANKS = 32
MAX_THREADS = 1024
MAX_SEQS = 65_536
MAX_BURST_SECONDS = 1.0  # an abort waits for the end of a burst
MAX_ADAPTERS = 1024  # each one reserves an entry in the table of every weight, used or not

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_DTYPES = ("auto", "float32", "bfloat16", "float16")

_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float": "float32", "half": "float16"}

_CACHE_DTYPE_NAMES = {"int8": "int8"} | dict.fromkeys(("fp8", "fp8_e4m3", "float8", "float8_e4m3fn"), "float8_e4m3fn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """Device, dtypes, threads and ranks.

    device: a torch device string or "auto" (CUDA if available). quantization: 8- or 4-bit weights, quantized during loading;
    none: `dtype` applies. activations: rows are rounded to this before multiplication with block weights; float32: not rounded,
    which is slow and meant for comparison. deterministic: the bits of a row depend only on its own sequence, at some cost in
    speed. threads: torch intra-op threads of each rank. cores: the only CPU cores that the engine may use.
    tensor_parallel: number of ranks, processes that each hold a part of every layer and compute every step together.
    cuda_graphs: capture decode steps on a device with CUDA graphs; no effect elsewhere.
    """

    device: str = "auto"
    dtype: str = "auto"
    quantization: Quantization = "none"
    activations: Activations = "int8"
    deterministic: bool = False
    threads: int | None = None
    cores: tuple[int, ...] | None = None
    tensor_parallel: int = 1
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        _check_count("compute.threads", self.threads, MAX_THREADS)
        _check_count("compute.tensor_parallel", self.tensor_parallel, MAX_RANKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingConfig:
    """Source of the weights.

    format: dummy means random weights generated from `seed`. weight_cache: folder in which quantized weights are stored for the
    next start, `beside` for a folder in the model's directory, None to disable. shared_memory: descriptors of memory files (one
    for the model, one for a draft model) through which several engines share one copy of their weights; empty: not shared.
    """

    format: LoadFormat = "safetensors"
    weight_cache: str | None = None
    seed: int = 0
    shared_memory: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV cache and its disk and host tiers.

    memory: bytes of all blocks, None for the memory that weights and steps leave. device_share: share of a GPU's memory that the
    engine may use, weights and steps included; None: `DEVICE_SHARE`. block_size: tokens per block, a multiple of 16.
    prefix_caching: requests share the blocks of equal prompt starts. persist: folder in which full blocks are stored for later
    engines, None to disable; persist_size: bytes of all its files, None: `PERSIST_SIZE`. host_memory: bytes of main memory for
    blocks that a GPU's cache evicts, None to disable.
    """

    dtype: str = "auto"
    memory: int | None = None
    device_share: float | None = None
    block_size: int = 16
    prefix_caching: bool = True
    persist: str | None = None
    persist_size: int | None = None
    host_memory: int | None = None

    def __post_init__(self) -> None:
        _check_count("cache.memory", self.memory)
        _check_count("cache.persist_size", self.persist_size)
        _check_count("cache.host_memory", self.host_memory)
        if self.device_share is not None and not 0 < self.device_share <= 1:
            raise LoadError(f"`cache.device_share` must be above 0 and at most 1, got {self.device_share:g}")
        if self.device_share is not None and self.memory is not None:
            raise LoadError(
                "`cache.device_share` and `cache.memory` both set the size of the cache: leave one of them out"
            )
        if self.persist is None and self.persist_size is not None:
            raise LoadError(
                "`cache.persist_size` is the cap of a folder: name one with `cache.persist`, or leave it out"
            )
        if self.block_size < 16 or self.block_size % 16:
            raise LoadError(f"`cache.block_size` must be a multiple of 16, got {self.block_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding by prompt lookup and, where that finds nothing, by a draft model or the model's MTP layer.

    num_tokens: maximum tokens per step that a running stream proposes from its own text; 0 disables. min_match, max_match: how
    many of its last tokens must, and how many may, match an earlier position.
    model: directory of the draft model, None for none. mtp: the model's own MTP layer (multi-token prediction) proposes.
    quantization: of the draft model's weights, or of the MTP layer's and of its own copy of the head; "none": the MTP layer uses
    the model's head and is quantized as the model is. draft_tokens: maximum tokens per step that either proposes for a stream.
    adaptive: propose less where less is accepted, and nothing where that saves no time.
    """

    num_tokens: int = 0
    min_match: int = 2
    max_match: int = 4
    model: str | None = None
    quantization: Quantization = "none"
    mtp: bool = False
    draft_tokens: int = 4
    adaptive: bool = True

    def __post_init__(self) -> None:
        _check_range("scheduling.speculation.num_tokens", self.num_tokens, 0, MAX_SPECULATIVE_TOKENS)
        if not 1 <= self.min_match <= self.max_match:
            raise LoadError(
                "`scheduling.speculation.min_match` must be at least 1 and at most `scheduling.speculation.max_match`, got "
                f"{self.min_match} and {self.max_match}"
            )
        _check_range("scheduling.speculation.draft_tokens", self.draft_tokens, 1, MAX_DRAFT_TOKENS)
        if not self.drafts and self.quantization != "none":
            raise LoadError(
                f"`scheduling.speculation.quantization={self.quantization}` is that of a draft model: name one with "
                "`scheduling.speculation.model`, ask for `scheduling.speculation.mtp`, or leave it out"
            )
        if self.model is not None and self.mtp:
            raise LoadError(
                "`scheduling.speculation.mtp` is the model's own layer in place of the draft model that "
                "`scheduling.speculation.model` names: leave one of them out"
            )

    @property
    def drafts(self) -> bool:
        """Whether a draft model or the model's MTP layer proposes tokens."""
        return self.model is not None or self.mtp

    @property
    def max_proposed_tokens(self) -> int:
        """Maximum tokens proposed for a stream in a step, by either method."""
        return max(self.num_tokens, self.draft_tokens if self.drafts else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the waiting queue.

    max_num_batched_tokens: token budget of one step. max_num_seqs: sequences that run at once. max_waiting: requests that may
    wait before new ones are refused; max_waiting_tokens: the maximum of their tokens together; one request alone may exceed it.
    target_step_seconds: prefill chunks shrink so that a step that also decodes stays below this (0: no bound).
    burst_seconds: maximum duration of multi-step decoding before running streams return their tokens; 0: after each token.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_waiting: int = 1024
    max_waiting_tokens: int = 8 << 20
    target_step_seconds: float = 0.25
    burst_seconds: float = 0.02
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        _check_count("scheduling.max_num_batched_tokens", self.max_num_batched_tokens)
        _check_count("scheduling.max_num_seqs", self.max_num_seqs, MAX_SEQS)
        _check_count("scheduling.max_waiting", self.max_waiting)
        _check_count("scheduling.max_waiting_tokens", self.max_waiting_tokens)
        if not 0 <= self.target_step_seconds < math.inf:
            raise LoadError(
                f"`scheduling.target_step_seconds` must be finite and not negative, got {self.target_step_seconds}"
            )
        _check_range("scheduling.burst_seconds", self.burst_seconds, 0, MAX_BURST_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Rotary settings of requests without their own.

    scaling: `AUTO` chooses it by length. update: policy of requests that set none; None: `recompute` for longrope, `frozen` for
    everything else. ladder: the automatic scaling thresholds; empty: the model's own.
    """

    scaling: RopeScaling | None = None
    update: RopeUpdate | None = None
    ladder: tuple[ScalingThreshold, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """Limits of sequences under context shift.

    shift_context: tokens held at once, None for `max_model_len`. max_total_tokens: prompt and output together, None: unlimited.
    """

    shift_context: int | None = None
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_count("context.shift_context", self.shift_context)
        _check_count("context.max_total_tokens", self.max_total_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """LoRA adapters.

    sources: loaded at start. max_loaded: adapters loaded at once, later ones included. max_rank: limit of each adapter.
    dtype: adapter weights are rounded to it; auto: the compute dtype, narrower only where no precision is lost.
    """

    sources: tuple[AdapterSource, ...] = ()
    max_loaded: int = 8
    max_rank: int = 64
    dtype: str = "auto"

    def __post_init__(self) -> None:
        _check_count("adapters.max_loaded", self.max_loaded, MAX_ADAPTERS)
        _check_count("adapters.max_rank", self.max_rank)
        if len(self.sources) > self.max_loaded:
            raise LoadError(
                f"`adapters.sources` names {len(self.sources)} adapters, `adapters.max_loaded` allows {self.max_loaded}: raise it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All engine options. None: chosen once the model is known.

    model: directory with config.json. max_model_len: maximum of prompt and output tokens together; None: the model's own length,
    clamped to the KV budget. replicas: number of equal engines, this one included, that share the machine's free memory equally.
    """

    model: str
    max_model_len: int | None = None
    replicas: int = 1
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    loading: LoadingConfig = field(default_factory=LoadingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduling: SchedulerConfig = field(default_factory=SchedulerConfig)
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)

    def __post_init__(self) -> None:
        _check_count("max_model_len", self.max_model_len)
        _check_count("replicas", self.replicas)


def _check_count(field: str, value: int | None, most: float = math.inf) -> None:
    if value is not None and value < 1:
        raise LoadError(f"`{field}` must be at least 1, got {value}")
    if value is not None and value > most:
        raise LoadError(f"`{field}` must be at most {most}, got {value}")


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also false for NaN
        raise LoadError(f"`{field}` must lie between {low} and {high}, got {value}")


def parse_dtype(name: str) -> str:
    """Normalise a dtype name ("bf16", "bfloat16", "auto", …). Raises LoadError that lists the allowed names."""
    return _parse_dtype(name, "dtype", _DTYPES)


def parse_cache_dtype(name: str) -> str:
    """Like `parse_dtype`, for cached keys and values, which may also be int8 or, on a GPU, float8."""
    return _CACHE_DTYPE_NAMES.get(name.lower()) or _parse_dtype(name, "cache dtype", (*_DTYPES, "int8", "fp8"))


def _parse_dtype(name: str, what: str, known: tuple[str, ...]) -> str:
    full = _DTYPE_NAMES.get(name.lower(), name.lower())
    if full not in known:
        names = f"{', '.join(known[:-1])} or {known[-1]}"
        raise LoadError(f"unknown {what} {name!r}{did_you_mean(name, known)}: use {names}")
    return full


def parse_size(text: str) -> int:
    """Bytes from "4GiB", "500MB", "1.5g" or a plain number. Raises LoadError with an example."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] == "i" or float(match[1]) <= 0:
        raise LoadError(f"cannot read {text!r} as a size: write for example 4GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])
