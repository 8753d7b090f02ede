"""Finds the compiled kernels, picks the instruction set, and binds the functions once.

Knows files, symbols and argument types; knows nothing of tensors beyond type codes. The library is an ordinary shared
object that the package's build puts beside this file; it needs no Python and no torch, but is loaded after torch so
that both use one OpenMP thread pool (and `torch.set_num_threads` governs both).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch  # loads libgomp, which the library below then shares

from windlass.kernels.cpu.sources import fingerprint
from windlass.kernels.cpu.structs import (
    _FLOAT,
    _INT,
    _LONG,
    _POINTER,
    AttentionArguments,
    compiled_fields,
    declared_fields,
    differing_structs,
)

ISA_VARIABLE = "WINDLASS_CPU_ISA"
# Worst to best among those of one kind of processor; the index is the level in windlass_can_run.
ISAS = ("generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon", "neon_dot")
# Where rows of bfloat16 are multiplied natively by weights of it in panels.
BF16_DOT_ISAS = frozenset({"avx512_bf16", "avx512_amx"})
# Sets that have functions of their own only where their instructions serve, and the set that the others come from.
_EXTENDED = {
    "avx2_vnni": "avx2",
    "avx512_vnni": "avx512",
    "avx512_bf16": "avx512_vnni",
    "avx512_amx": "avx512_bf16",
    "neon_dot": "neon",
}

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
PAGE_CODES = TYPE_CODES | {torch.int8: 3}  # int8 pages come with scales
PAGES_OF_ROWS = 4  # of int8 codes, token by token

_TENSOR2 = [_POINTER, _LONG, _INT]  # address, row stride, type
_TENSOR3 = [_POINTER, _LONG, _LONG]  # address, row stride, head stride
_STATE_ROWS = [_POINTER, _POINTER, _POINTER, _LONG, _POINTER]  # blocks, starts, lengths, sequences, kept
# Codes, scales, scales of super groups; bits, group, super groups, whether there are minima, offset.
_BLOCKS = [_POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT, _INT]

SIGNATURES: dict[str, list[type]] = {
    "linear": [*_TENSOR2, *_TENSOR2, _POINTER, _INT, _POINTER, _LONG, _LONG, _LONG, _LONG],
    "linear_panels": [*_TENSOR2, _POINTER, _INT, _POINTER, _INT, _POINTER, _LONG, _LONG, _LONG, _LONG],
    "pack_panels": [_POINTER, _LONG, _INT, _LONG, _LONG, _LONG, _POINTER],
    "widen_panels": [_POINTER, _INT, _LONG, _LONG, _LONG, _POINTER],
    "linear_blocks": [
        *(_POINTER, _LONG, *_BLOCKS, _POINTER, _INT, _POINTER, _LONG),  # x, the weight, bias, activation, out
        *(_LONG, _LONG, _LONG),  # rows, columns, inner
    ],
    "linear_blocks_rounded": [
        *(*_TENSOR2, *_BLOCKS, _POINTER, _INT, _POINTER, _LONG),  # x, the weight, bias, activation, out
        *(_LONG, _LONG, _LONG),  # rows, columns, inner
    ],
    "linear_panels_rounded": [
        *(_POINTER, _LONG, _POINTER, _POINTER, _INT, _POINTER, _LONG),  # x, the weight, bias, activation, out
        *(_LONG, _LONG, _LONG),  # rows, columns, inner
    ],
    "widen_blocks": [*_BLOCKS, _POINTER, _LONG, _FLOAT, _POINTER, _LONG, _LONG, _LONG],  # ids or the first, factor, out
    "repack_blocks": [_POINTER, _LONG, _INT, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER],
    "pack_blocks": [
        *(_POINTER, _LONG, _INT, _POINTER, _LONG),  # source, weights
        *(_INT, _INT, _INT, _INT, _INT),  # the form
        *(_LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER),  # rows, columns, the weight
    ],
    "rotate_and_append": [
        *(*_TENSOR3, *_TENSOR3, *_TENSOR3, _INT),  # q, k, v
        *(_POINTER, _LONG, _POINTER, _LONG, _POINTER),  # cos, sin, q_scale
        *(_POINTER, _POINTER, _INT, _LONG, _POINTER),  # pages, slots
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _INT),  # tokens, heads, kv heads, dim, value dim, half, past caches
    ],
    "rerotate_cached_keys": [
        *(_POINTER, _POINTER, _INT, _LONG, _POINTER, _POINTER, _LONG),  # pages, sources, targets
        *(_POINTER, _LONG, _POINTER, _LONG),  # cos, sin
        *(_LONG, _LONG, _LONG, _LONG),  # kv heads, dim, value dim, half
    ],
    "rotate_and_append_int8": [
        *(*_TENSOR3, *_TENSOR3, *_TENSOR3, _INT),  # q, k, v
        *(_POINTER, _LONG, _POINTER, _LONG, _POINTER),  # cos, sin, q_scale
        *(_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER),  # pages, their scales, block size, slots
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _LONG),  # tokens, heads, kv heads, dim, value dim, half
    ],
    "rerotate_cached_keys_int8": [
        *(_POINTER, _POINTER, _POINTER, _POINTER, _LONG),  # pages, their scales, block size
        *(_LONG, _POINTER, _POINTER, _LONG),  # slots, sources, targets
        *(_POINTER, _LONG, _POINTER, _LONG),  # cos, sin
        *(_LONG, _LONG, _LONG, _LONG),  # kv heads, dim, value dim, half
    ],
    "rotate_and_append_rows": [
        *(*_TENSOR3, *_TENSOR3, _INT),  # q, k
        *(_POINTER, _LONG, _POINTER, _LONG, _POINTER),  # cos, sin, q_scale
        *(_POINTER, _POINTER, _LONG, _POINTER),  # codes, scales, slots
        *(_LONG, _LONG, _LONG, _LONG, _LONG),  # tokens, heads, kv heads, dim, half
    ],
    "rerotate_cached_rows": [
        *(_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG),  # codes, scales, slots, sources, targets
        *(_POINTER, _LONG, _POINTER, _LONG),  # cos, sin
        *(_LONG, _LONG, _LONG),  # kv heads, dim, half
    ],
    "rotate_queries": [
        *(*_TENSOR3, _INT, _POINTER, _POINTER, _LONG, _POINTER, _LONG),  # q, rows, cos, sin
        *(_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG),  # out: tokens, turned ones, heads, dim, half
    ],
    "rotary_angles": [
        *(_POINTER, _LONG, _LONG, _LONG),  # inverse frequencies: groups, rows, half
        *(_POINTER, _POINTER, _LONG, _POINTER, _POINTER),  # rows, positions, tokens, cos, sin
    ],
    "rms_norm": [
        *(_POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG, _INT),  # x: rows and groups of rows, residual
        *(_POINTER, _FLOAT, _POINTER, _LONG, _LONG),  # weight, eps, out
    ],
    "gated_activation": [_POINTER, _LONG, _INT, _INT, _POINTER, _LONG, _LONG],
    "soft_cap": [_POINTER, _LONG, _FLOAT, _POINTER, _LONG, _LONG],
    "token_logprobs": [
        *(
            _POINTER,
            _LONG,
            _LONG,
            _LONG,
            _POINTER,
            _POINTER,
            _LONG,
            _LONG,
        ),  # logits, rows and targets, how many of the top
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG),  # out, scratch
    ],
    "add_low_rank": [
        *(_POINTER, _LONG, _POINTER, _LONG, _INT, _POINTER),  # x, out, their type, slots
        *(_LONG, _LONG, _POINTER, _LONG),  # rows, inner, table
    ],
    "latent_queries": [*_TENSOR3, _INT, _POINTER, _INT, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _LONG],
    "latent_values": [*_TENSOR3, _INT, _POINTER, _INT, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG],
    "rms_norm_in_place": [_POINTER, _LONG, _INT, _POINTER, _FLOAT, _LONG, _LONG],
    "route_experts": [
        *(_POINTER, _LONG, _POINTER, _POINTER, _LONG),  # logits, bias, scales, experts
        *(_LONG, _LONG, _LONG),  # chosen, groups, chosen groups
        *(
            _INT,
            _INT,
            _INT,
            _FLOAT,
            _FLOAT,
            _FLOAT,
            _FLOAT,
        ),  # scores, two largest, normalized, scale, least sum, sum eps, jitter
        *(_POINTER, _POINTER, _LONG),  # chosen, weights, rows
    ],
    "linear_of_experts": [
        *(*_TENSOR2, _POINTER, _LONG, _LONG, _POINTER),  # x, table, experts, parts, products
        *(_POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG),  # chosen, rows, experts of a row of x, out, columns, inner
    ],
    "sum_of_experts": [_POINTER, _INT, _POINTER, _LONG, _POINTER, _LONG, _LONG],
    "clamped_glu": [_POINTER, _LONG, _INT, _FLOAT, _FLOAT, _POINTER, _LONG, _LONG],
    "gate_by_sigmoid": [*_TENSOR2, *_TENSOR2, _LONG, _LONG, _LONG],
    "layer_norm": [
        *(_POINTER, _LONG, _LONG, _LONG, _INT),  # x: rows and groups of rows
        *(_POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG),  # weight, bias, eps, out
    ],
    "activate": [*_TENSOR2, _INT, _POINTER, _LONG, _LONG],
    "xielu": [*_TENSOR2, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG],  # its four numbers, out
    "clip": [*_TENSOR2, _FLOAT, _LONG, _LONG],
    "scale_rows": [*_TENSOR2, _POINTER, _LONG, _LONG],
    "scale_columns": [*_TENSOR2, _POINTER, _POINTER, _LONG, _LONG],
    "multiply": [*_TENSOR2, _POINTER, _LONG, _POINTER, _LONG, _LONG],  # by rows, by one factor
    "short_convolution": [
        *(*_TENSOR2, _POINTER, _LONG, _POINTER, _INT, _POINTER, _LONG),  # x, weight, bias, activation, window
        *(*_STATE_ROWS, _POINTER, _LONG, _LONG),  # rows, out
    ],
    "gated_delta_rule": [
        *(*_TENSOR2, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER),  # qkv, decay, strength, rate, bias
        *(_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _LONG),  # memory: blocks, key heads, heads, dims, in turns
        *(*_STATE_ROWS, _POINTER, _LONG),  # rows, out
    ],
    "state_space": [
        *(*_TENSOR2, _POINTER, _LONG, _POINTER, _POINTER, _POINTER),  # mixed, step, rate, bias, skip
        *(_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG),  # memory: blocks, key heads, heads, dims
        *(_FLOAT, _FLOAT),  # limits
        *(*_STATE_ROWS, _POINTER, _LONG),  # rows, out
    ],
    "sum_over_ranks": [_POINTER, _POINTER, _INT, _LONG],
    "gather_columns": [_POINTER, _POINTER, _POINTER, _LONG],
    "repeat_calls": [_POINTER, _LONG],
    "draw_passes": [
        *(_POINTER, _LONG, _LONG),  # calls, passes
        *(_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG),  # as of fill_rows
        *(_POINTER, _POINTER, _POINTER, _POINTER, _LONG),
        *(_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER),  # as of rotary_angles
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),  # ids, values, stops, ends, drawn, made
    ],
    "draw_tokens": [_POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG],
    "fill_rows": [
        *(
            _POINTER,
            _LONG,
            _POINTER,
            _LONG,
            _LONG,
            _LONG,
            _LONG,
            _LONG,
        ),  # what was said, tables, groups, blocks, block size
        *(_POINTER, _POINTER, _POINTER, _POINTER, _LONG),  # positions, lengths, slots, own tables
    ],
    "row_maxima": [_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER],
    "embed_rows": [_POINTER, _LONG, _INT, _LONG, _POINTER, _FLOAT, _POINTER, _INT, _LONG, _LONG],
    "paged_attention_decode": [ctypes.POINTER(AttentionArguments)],
    "paged_attention_prefill": [ctypes.POINTER(AttentionArguments), _LONG],  # fewest queries
}

# What only sets of instructions have that make it worth while.
_OPTIONAL = frozenset({"linear_blocks_rounded", "linear_panels_rounded"})

Function = Callable[..., int]


class KernelsUnavailableError(RuntimeError):
    """The compiled CPU kernels cannot be used here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Library:
    """The kernels bound for one instruction set. Every function returns 0, or a code its caller in `ops` explains.

    linear_blocks_rounded, linear_panels_rounded: None where the processor has no matrix unit.
    """

    path: Path
    isa: str
    linear: Function
    linear_panels: Function
    pack_panels: Function
    widen_panels: Function
    linear_blocks: Function
    widen_blocks: Function
    repack_blocks: Function
    pack_blocks: Function
    rotate_and_append: Function
    rerotate_cached_keys: Function
    rotate_and_append_int8: Function
    rerotate_cached_keys_int8: Function
    rotate_and_append_rows: Function
    rerotate_cached_rows: Function
    rotate_queries: Function
    rotary_angles: Function
    rms_norm: Function
    gated_activation: Function
    soft_cap: Function
    embed_rows: Function
    fill_rows: Function
    row_maxima: Function
    draw_tokens: Function
    token_logprobs: Function
    add_low_rank: Function
    latent_queries: Function
    latent_values: Function
    rms_norm_in_place: Function
    route_experts: Function
    linear_of_experts: Function
    sum_of_experts: Function
    clamped_glu: Function
    gate_by_sigmoid: Function
    layer_norm: Function
    activate: Function
    xielu: Function
    clip: Function
    scale_rows: Function
    scale_columns: Function
    multiply: Function
    short_convolution: Function
    gated_delta_rule: Function
    state_space: Function
    sum_over_ranks: Function
    gather_columns: Function
    repeat_calls: Function
    draw_passes: Function
    paged_attention_decode: Function
    paged_attention_prefill: Function
    linear_blocks_rounded: Function | None
    linear_panels_rounded: Function | None
    addresses: Mapping[str, int] = field(compare=False)  # of the functions' code, for those that call it from C


def find() -> Path | None:
    """The shared object built for this interpreter, or None."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_windlass_cpu{suffix}"
        if path.exists():
            return path
    return None


def bind(path: Path, isa: str) -> Library:
    """Load `path` and bind the functions of `isa`, without asking whether this processor can run them.

    Raises OSError for a file that does not load and AttributeError for one that lacks the instruction set.
    """
    handle = ctypes.CDLL(str(path))
    functions: dict[str, Any] = {}
    addresses: dict[str, int] = {}
    for name, arguments in SIGNATURES.items():
        source = isa
        while not hasattr(handle, f"windlass_{name}_{source}") and source in _EXTENDED:
            source = _EXTENDED[source]
        if name in _OPTIONAL and not hasattr(handle, f"windlass_{name}_{source}"):
            functions[name] = None
            continue
        function = getattr(handle, f"windlass_{name}_{source}")
        function.argtypes = arguments
        function.restype = ctypes.c_int
        functions[name] = function
        addresses[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return Library(path=path, isa=isa, addresses=addresses, **functions)


def runnable(path: Path) -> tuple[str, ...]:
    """The instruction sets in `path` that this processor can run, worst to best.

    Raises OSError for a file that does not load and AttributeError for one that was compiled from other sources.
    """
    handle = ctypes.CDLL(str(path))
    handle.windlass_sources.restype = ctypes.c_char_p
    if (sources := fingerprint(Path(__file__).parent / "src")) and handle.windlass_sources().decode() != sources:
        raise AttributeError("compiled from other sources")
    if others := differing_structs(handle):
        raise AttributeError(f"compiled from other sources: {'; '.join(others)}")
    if compiled_fields(handle) != declared_fields():
        raise AttributeError("compiled from other sources: AttentionArguments has other fields")
    return tuple(
        isa
        for level, isa in enumerate(ISAS)
        if any(hasattr(handle, f"windlass_{name}_{isa}") for name in SIGNATURES) and handle.windlass_can_run(level)
    )


@functools.cache
def _load_once() -> tuple[Library | None, str | None]:
    wanted = os.environ.get(ISA_VARIABLE, "")
    if wanted == "off":
        return None, f"{ISA_VARIABLE}=off turns the compiled CPU kernels off"
    path = find()
    again = "install a C++ compiler (g++ 11 or newer), then run pip install -e . again (in a clone, make serve does)"
    if path is None:
        return None, f"the CPU kernels were not compiled: {again}"
    try:
        available = runnable(path)
        if wanted and wanted not in available:
            return None, f"{ISA_VARIABLE}={wanted} is not one of {', '.join(available)} (or off) on this processor"
        return bind(path, wanted or available[-1]), None
    except (OSError, AttributeError) as error:
        return None, f"{path.name} does not load ({error}): {again}"


def unavailable_reason() -> str | None:
    """Why the compiled kernels cannot be used in this process, or None when they can. Decided once."""
    return _load_once()[1]


def load() -> Library:
    """The library for the best instruction set of this processor, or the one WINDLASS_CPU_ISA names.

    Raises KernelsUnavailableError.
    """
    library, reason = _load_once()
    if library is None:
        raise KernelsUnavailableError(reason)
    return library
