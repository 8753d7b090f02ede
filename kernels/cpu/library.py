"""Compiled library: finds the shared object, selects the instruction set, and declares function signatures, structs and operand checks.

The library needs neither Python nor torch. It is loaded after torch, so that both share one OpenMP thread pool.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from windlass.kernels.cpu.sources import fingerprint
from windlass.kernels.layouts.kv_pages import PANEL_TOKENS, QUAD, num_groups, padded_dim

_POINTER, _LONG, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int

_INT64, _DOUBLE = ctypes.c_int64, ctypes.c_double

_LETTERS = {_POINTER: "P", _LONG: "l", _FLOAT: "f", _INT: "i"}


class AttentionArguments(ctypes.Structure):
    """One call of attention: the same in src/attention_call.h, where every field is explained."""

    _fields_ = (
        ("q", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("key_scales", _POINTER),
        ("value_scales", _POINTER),
        ("tables", _POINTER),
        ("query_start", _POINTER),
        ("lengths", _POINTER),
        ("score_scale", _POINTER),
        ("sinks", _POINTER),
        ("range_ends", _POINTER),
        ("range_rows", _POINTER),
        ("range_reaches", _POINTER),
        ("slopes", _POINTER),
        ("range_gaps", _POINTER),
        ("out", _POINTER),
        ("q_rows", _LONG),
        ("q_row", _LONG),
        ("q_head", _LONG),
        ("num_blocks", _LONG),
        ("block_size", _LONG),
        ("kv_heads", _LONG),
        ("dim", _LONG),
        ("value_dim", _LONG),
        ("table_row", _LONG),
        ("table_columns", _LONG),
        ("batch", _LONG),
        ("heads", _LONG),
        ("ranges", _LONG),
        ("window", _LONG),
        ("chunk", _LONG),
        ("scale", _FLOAT),
        ("soft_cap", _FLOAT),
        ("q_type", _INT),
        ("page_type", _INT),
        ("lengths_are_64", _INT),
        ("causal", _INT),
        ("rounds", _LONG),
    )


class SamplingRowFields(ctypes.Structure):
    """One row to draw: the same as `SamplingRow` in src/sampling.h; `windlass.kernels.cpu.elementwise_bindings.CompiledSamplingRow` explains it."""

    _fields_ = (
        ("row", _INT64),
        ("allowed", _POINTER),
        ("num_allowed", _INT64),
        ("forbidden", _POINTER),
        ("num_forbidden", _INT64),
        ("biased", _POINTER),
        ("bias", _POINTER),
        ("num_biased", _INT64),
        ("counted", _POINTER),
        ("in_output", _POINTER),
        ("num_counted", _INT64),
        ("decreased", _POINTER),
        ("decrease", _POINTER),
        ("num_decreased", _INT64),
        ("mask", _POINTER),
        ("repetition", _FLOAT),
        ("frequency", _FLOAT),
        ("presence", _FLOAT),
        ("temperature", _FLOAT),
        ("floor", _FLOAT),
        ("status", _INT),
        ("top_k", _INT64),
        ("top_p", _DOUBLE),
        ("typical_p", _DOUBLE),
        ("exclude_from", _DOUBLE),
        ("uniform", _DOUBLE),
        ("token", _INT64),
    )


class LowRankPartFields(ctypes.Structure):
    """A part of a low-rank change: the same as `LowRankPart` in src/low_rank.h; `LowRankPart` in layouts explains it."""

    _fields_ = (
        ("up", _POINTER),
        ("type", _INT64),
        ("first", _INT64),
        ("columns", _INT64),
        ("rank_first", _INT64),
        ("rank", _INT64),
        ("scale", _DOUBLE),
    )


class LowRankFields(ctypes.Structure):
    """A low-rank change: the same as `LowRankChange` in src/low_rank.h; of rank 0 where there is none."""

    _fields_ = (("down", _POINTER), ("type", _INT64), ("rank", _INT64), ("num_parts", _INT64), ("parts", _POINTER))


class ExpertPartFields(ctypes.Structure):
    """Rows of an expert's weight: the same as `ExpertPart` in src/experts.h, where every field is explained."""

    _fields_ = (
        ("data", _POINTER),
        ("scales", _POINTER),
        ("supers", _POINTER),
        ("bias", _POINTER),
        ("kind", _INT64),
        ("type", _INT64),
        ("stride", _INT64),
        ("bits", _INT64),
        ("group", _INT64),
        ("super_groups", _INT64),
        ("minimum", _INT64),
        ("offset", _INT64),
        ("bias_type", _INT64),
        ("first", _INT64),
        ("columns", _INT64),
    )


class ExpertProductsFields(ctypes.Structure):
    """Addresses of the products of one instruction set: the same as `ExpertProducts` in src/experts.h."""

    _fields_ = (
        ("linear", _POINTER),
        ("linear_panels", _POINTER),
        ("linear_blocks", _POINTER),
        ("linear_blocks_rounded", _POINTER),
        ("linear_panels_rounded", _POINTER),
        ("fewest_rounded_blocks", _INT64),
        ("fewest_rounded_panels", _INT64),
    )


class RankGroupFields(ctypes.Structure):
    """One of the ranks of a model: the same as `RankGroup` in src/ranks.h."""

    _fields_ = (
        ("memory", _POINTER),
        ("bounds", _POINTER),
        ("rank", _INT64),
        ("ranks", _INT64),
        ("slot_bytes", _INT64),
        ("round", _INT64),
    )


RECORDED_CALL = struct.Struct("=qqq")  # `Call` in src/repeat.h: kind, function, address of its arguments

# The sizes in bytes of what both sides lay out, by the names that C++ has for them.
SIZES = {
    "AttentionArguments": ctypes.sizeof(AttentionArguments),
    "Draw": ctypes.sizeof(SamplingRowFields),
    "Call": RECORDED_CALL.size,
    "LowRankPart": ctypes.sizeof(LowRankPartFields),
    "LowRankChange": ctypes.sizeof(LowRankFields),
    "ExpertPart": ctypes.sizeof(ExpertPartFields),
    "ExpertProducts": ctypes.sizeof(ExpertProductsFields),
    "RankGroup": ctypes.sizeof(RankGroupFields),
}

# Packing all fields at once takes a third of the time of setting them one by one.
_pack_attention = struct.Struct("@" + "".join(_LETTERS[kind] for _, kind in AttentionArguments._fields_)).pack


def attention_arguments(*fields: float) -> AttentionArguments:
    """The struct with all fields in their order; 0 for an address that is none."""
    return AttentionArguments.from_buffer_copy(_pack_attention(*fields))


def struct_values(arguments: ctypes.Structure) -> tuple[Any, ...]:
    """What the fields hold; of an address only whether there is one."""
    return tuple(
        getattr(arguments, name) if kind is not _POINTER else getattr(arguments, name) is None
        for name, kind, *_ in arguments._fields_
    )


class FieldOffset(NamedTuple):
    """Where a field of a struct stands, in bytes."""

    offset: int
    size: int


class _CFieldPlace(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("offset", _LONG), ("size", _LONG))


def compiled_fields(handle: ctypes.CDLL) -> tuple[dict[str, FieldOffset], int]:
    """The fields of AttentionArguments as a library was compiled with them, and the size of the whole.

    Raises AttributeError for a library without that table.
    """
    table_of = handle.windlass_attention_fields
    table_of.argtypes, table_of.restype = (), ctypes.POINTER(_CFieldPlace)
    table, found = table_of(), dict[str, FieldOffset]()
    while (place := table[len(found)]).name is not None:
        found[place.name.decode()] = FieldOffset(place.offset, place.size)
    return found, place.offset


def declared_fields() -> tuple[dict[str, FieldOffset], int]:
    """The same of AttentionArguments above."""
    names = [name for name, _ in AttentionArguments._fields_]
    places = {name: getattr(AttentionArguments, name) for name in names}
    return {n: FieldOffset(p.offset, p.size) for n, p in places.items()}, ctypes.sizeof(AttentionArguments)


def differing_structs(handle: ctypes.CDLL) -> list[str]:
    """The structs that a library was compiled with in another size than here, with both sizes; unknown ones have -1.

    Raises AttributeError for a library that tells no sizes.
    """
    size_of = handle.windlass_struct_size
    size_of.argtypes, size_of.restype = (ctypes.c_char_p,), _LONG
    compiled = {name: size_of(name.encode()) for name in SIZES}
    return [f"{name}: {compiled[name]} bytes, not {size}" for name, size in SIZES.items() if compiled[name] != size]


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


def check(condition: bool, message: str) -> None:
    """ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


class PageSizes(NamedTuple):
    """What the shapes of pages tell. dim: of a key; of int8 keys in panels the next multiple of 4."""

    num_blocks: int
    block_size: int
    kv_heads: int
    dim: int
    value_dim: int
    in_panels: bool

    def holds_keys(self, kv_heads: int, dim: int) -> bool:
        """Whether such keys fit."""
        return self.kv_heads == kv_heads and self.dim == (padded_dim(dim) if self.in_panels else dim)


def page_sizes(key_pages: Tensor, value_pages: Tensor, key_scales: Tensor | None) -> PageSizes:
    """Of pages that neither function below refuses."""
    if key_scales is None or key_pages.dim() == 4:
        num_blocks, block_size, kv_heads, dim = key_pages.shape
        return PageSizes(num_blocks, block_size, kv_heads, dim, value_pages.shape[3], False)
    num_blocks, kv_heads, block_size = key_scales.shape
    return PageSizes(num_blocks, block_size, kv_heads, QUAD * key_pages.shape[3], value_pages.shape[3], True)


def pages_refusal(key_pages: Tensor, value_pages: Tensor) -> str | None:
    """Why these are not pages that the kernels take, or None when they are."""
    if key_pages.dtype not in PAGE_CODES or key_pages.dtype != value_pages.dtype:
        return f"pages are {key_pages.dtype} and {value_pages.dtype}, not one of float32, bfloat16, float16, int8"
    if key_pages.dtype == torch.int8 and key_pages.dim() != 4:
        shapes = tuple(key_pages.shape), tuple(value_pages.shape)
        if key_pages.dim() != 6 or value_pages.dim() != 5:
            return f"int8 pages {shapes} are not codes laid out for the kernels (see int8_layout)"
        num_blocks, kv_heads, panels, _, tokens, quad = key_pages.shape
        value_dim = value_pages.shape[3]
        if (tokens, quad) != (PANEL_TOKENS, QUAD) or value_pages.shape != (
            num_blocks,
            kv_heads,
            panels * PANEL_TOKENS // QUAD,
            value_dim,
            QUAD,
        ):
            return f"int8 pages {shapes} are not the keys and values of the same tokens"
    elif key_pages.dim() != 4 or key_pages.shape[:3] != value_pages.shape[:3]:
        return f"pages {tuple(key_pages.shape)} and {tuple(value_pages.shape)} differ before their last dimension"
    if not (key_pages.is_cpu and key_pages.is_contiguous() and value_pages.is_cpu and value_pages.is_contiguous()):
        return "the pages are not contiguous CPU tensors"
    return None


def scales_refusal(
    key_pages: Tensor, value_pages: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
) -> str | None:
    """Why these are not the scales of such pages, which `pages_refusal` takes, or None when they are."""
    for scales, dim in ((key_scales, key_pages.shape[3]), (value_scales, value_pages.shape[3])):
        if (scales is not None) != (key_pages.dtype == torch.int8):
            return "int8 pages need scales for keys and values, pages of floats have none"
        if scales is None:
            continue
        shape: tuple[int, ...] = (key_pages.shape[0], key_pages.shape[1], key_pages.shape[2] * PANEL_TOKENS)
        if key_pages.dim() == 4:
            shape = (*key_pages.shape[:3], num_groups(dim))
        if not (scales.dtype == torch.float32 and scales.shape == shape and scales.is_cpu and scales.is_contiguous()):
            return f"scales are {scales.dtype} {tuple(scales.shape)}, not float32 {shape}, contiguous"
    return None


def table_ok(table: Tensor, shape: tuple[int, int]) -> bool:
    """A float32 matrix of this shape with adjacent elements in a row."""
    return (
        table.dtype == torch.float32
        and table.shape == shape
        and table.is_cpu
        and (shape[1] < 2 or table.stride(1) == 1)
    )


def vector_ok(vector: Tensor, dtype: torch.dtype, length: int) -> bool:
    """A contiguous vector of this type and length."""
    return vector.dtype == dtype and vector.shape == (length,) and vector.is_cpu and vector.is_contiguous()


def check_out(out: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
    """ValueError unless this is a matrix of that shape and type, with adjacent elements in a row, to be written."""
    if out.shape != (rows, columns) or out.dtype != dtype or (columns > 1 and out.stride(1) != 1) or not out.is_cpu:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not {dtype} {(rows, columns)} with adjacent elements")
