"""Compiled library: finds the shared object, selects the instruction set, and declares function signatures, structs and
operand checks.

The library needs neither Python nor torch. It is loaded after torch, so that both share one OpenMP thread pool.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import struct
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from windlass.kernels.cpu.sources import fingerprint
from windlass.kernels.layouts.kv_pages import PANEL_TOKENS, QUAD, num_groups, padded_dim

_POINTER, _LONG, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int

_INT64, _DOUBLE = ctypes.c_int64, ctypes.c_double

_TYPES = {b"P": _POINTER, b"l": _LONG, b"f": _FLOAT, b"i": _INT}  # by the type letters of the struct module


class AttentionArguments(ctypes.Structure):
    """Arguments of one attention call. `attention_packer` adds the fields, which src/attention_call.h describes."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = ()


class SamplingRowFields(ctypes.Structure):
    """`SamplingRow` in src/sampling.h; `elementwise_bindings.CompiledSamplingRow` describes the fields."""

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
    """`LowRankPart` in src/low_rank.h; `LowRankPart` in kernels/layouts describes the fields."""

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
    """`LowRankUpdate` in src/low_rank.h; rank 0 for none."""

    _fields_ = (("down", _POINTER), ("type", _INT64), ("rank", _INT64), ("num_parts", _INT64), ("parts", _POINTER))


class ExpertPartFields(ctypes.Structure):
    """`ExpertPart` in src/experts.h, which describes the fields."""

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
    """`ExpertProducts` in src/experts.h: addresses of the products of one instruction set."""

    _fields_ = (
        ("linear", _POINTER),
        ("linear_panels", _POINTER),
        ("linear_blocks", _POINTER),
        ("linear_blocks_amx", _POINTER),
        ("linear_panels_amx", _POINTER),
        ("amx_min_rows_blocks", _INT64),
        ("amx_min_rows_panels", _INT64),
    )


class RankGroupFields(ctypes.Structure):
    """`RankGroup` in src/collectives.h: the state of one rank."""

    _fields_ = (
        ("memory", _POINTER),
        ("bounds", _POINTER),
        ("rank", _INT64),
        ("ranks", _INT64),
        ("slot_bytes", _INT64),
        ("round", _INT64),
    )


RECORDED_CALL = struct.Struct(
    "=qqq"
)  # `RecordedCall` in src/recorded_calls.h: kind, function, address of its arguments

# Sizes in bytes of structs that are declared on both sides, by their names in C++.
SIZES = {
    "SamplingRow": ctypes.sizeof(SamplingRowFields),
    "RecordedCall": RECORDED_CALL.size,
    "LowRankPart": ctypes.sizeof(LowRankPartFields),
    "LowRankUpdate": ctypes.sizeof(LowRankFields),
    "ExpertPart": ctypes.sizeof(ExpertPartFields),
    "ExpertProducts": ctypes.sizeof(ExpertProductsFields),
    "RankGroup": ctypes.sizeof(RankGroupFields),
}


def struct_values(arguments: ctypes.Structure) -> tuple[Any, ...]:
    """The values of all fields; for addresses, whether they are null."""
    return tuple(
        getattr(arguments, name) if kind is not _POINTER else getattr(arguments, name) is None
        for name, kind, *_ in arguments._fields_
    )


class _AttentionField(ctypes.Structure):
    """`ArgumentField` in src/isa_generic.cpp."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", _LONG), ("type", ctypes.c_char))


def attention_packer(handle: ctypes.CDLL) -> Callable[[Mapping[str, float]], AttentionArguments]:
    """A function that makes the struct of an attention call from the values of all fields by name (0 for a null address).

    The fields are those that the library was compiled with. The function raises KeyError for a missing field and ValueError
    for an unknown one. Raises AttributeError for a library without the table of fields, or with another layout than ctypes'.
    """
    table_of = handle.windlass_attention_fields
    table_of.argtypes, table_of.restype = (), ctypes.POINTER(_AttentionField)
    table, fields = table_of(), list[tuple[str, Any]]()
    letters = ""
    while (entry := table[len(fields)]).name is not None:
        fields.append((entry.name.decode(), _TYPES[entry.type]))
        letters += entry.type.decode()
    own_struct: type[AttentionArguments] = types.new_class(
        "AttentionArguments", (AttentionArguments,), exec_body=lambda body: body.update(_fields_=fields)
    )
    if ctypes.sizeof(own_struct) != entry.offset:
        raise AttributeError(f"AttentionArguments: {entry.offset} bytes, not {ctypes.sizeof(own_struct)}")
    # Packing all fields at once takes a third of the time of setting them one by one.
    pack, in_order = struct.Struct("@" + letters).pack, operator.itemgetter(*(name for name, _ in fields))

    def packed(values: Mapping[str, float]) -> AttentionArguments:
        if len(values) != len(fields):
            raise ValueError(f"unknown attention arguments: {sorted(values.keys() - dict(fields))}")
        return own_struct.from_buffer_copy(pack(*in_order(values)))

    return packed


def differing_structs(handle: ctypes.CDLL) -> list[str]:
    """Structs whose compiled size differs from the one declared here, with both sizes (-1: unknown to the library).

    Raises AttributeError for a library that does not report sizes.
    """
    size_of = handle.windlass_struct_size
    size_of.argtypes, size_of.restype = (ctypes.c_char_p,), _LONG
    compiled = {name: size_of(name.encode()) for name in SIZES}
    return [f"{name}: {compiled[name]} bytes, not {size}" for name, size in SIZES.items() if compiled[name] != size]


ISA_VARIABLE = "WINDLASS_CPU_ISA"

# Slowest to fastest for each kind of processor; the index is the level in windlass_can_run.
ISAS = ("generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon", "neon_dot")

# Instruction sets with native products of bfloat16 rows and panel weights.
BF16_DOT_ISAS = frozenset({"avx512_bf16", "avx512_amx"})

# Instruction sets that override only some functions, and the set that provides the others.
_EXTENDED = {
    "avx2_vnni": "avx2",
    "avx512_vnni": "avx512",
    "avx512_bf16": "avx512_vnni",
    "avx512_amx": "avx512_bf16",
    "neon_dot": "neon",
}

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

PAGE_CODES = TYPE_CODES | {torch.int8: 3}  # int8 pages come with scales

LATENT_PAGES = 4  # rows of int8 codes for latent attention

_TENSOR2 = [_POINTER, _LONG, _INT]  # address, row stride, type

_TENSOR3 = [_POINTER, _LONG, _LONG]  # address, row stride, head stride

_STATE_ROWS = [_POINTER, _POINTER, _POINTER, _LONG, _POINTER]  # blocks, starts, lengths, sequences, snapshots

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
    "linear_blocks_amx": [
        *(*_TENSOR2, *_BLOCKS, _POINTER, _INT, _POINTER, _LONG),  # x, the weight, bias, activation, out
        *(_LONG, _LONG, _LONG),  # rows, columns, inner
    ],
    "linear_panels_amx": [
        *(_POINTER, _LONG, _POINTER, _POINTER, _INT, _POINTER, _LONG),  # x, the weight, bias, activation, out
        *(_LONG, _LONG, _LONG),  # rows, columns, inner
    ],
    "dequantize_blocks": [
        *_BLOCKS,
        _POINTER,
        _LONG,
        _FLOAT,
        _POINTER,
        _LONG,
        _LONG,
        _LONG,
    ],  # ids or the first, factor, out
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
        *(_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG),  # out: tokens, copies, heads, dim, half
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
        *(_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG),  # logits, rows, targets, count, k
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
        *(_INT, _INT, _INT),  # scores, two largest, normalized
        *(_FLOAT, _FLOAT, _FLOAT, _FLOAT),  # scale, least sum, sum eps, jitter
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
    "all_reduce": [_POINTER, _POINTER, _INT, _LONG],
    "gather_columns": [_POINTER, _POINTER, _POINTER, _LONG],
    "repeat_calls": [_POINTER, _LONG],
    "run_decode_steps": [
        *(_POINTER, _LONG, _LONG),  # calls, passes
        *(_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG),  # as in fill_step_buffers
        *(_POINTER, _POINTER, _POINTER, _POINTER, _LONG),
        *(_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER),  # as in rotary_angles
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),  # ids, values, stops, ends, drawn, made
    ],
    "sample_tokens": [_POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG],
    "fill_step_buffers": [
        *(_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG),  # metadata, tables, groups, blocks, block size
        *(_POINTER, _POINTER, _POINTER, _POINTER, _LONG),  # positions, lengths, slots, own tables
    ],
    "row_maxima": [_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER],
    "embed_rows": [_POINTER, _LONG, _INT, _LONG, _POINTER, _FLOAT, _POINTER, _INT, _LONG, _LONG],
    "paged_attention_decode": [ctypes.POINTER(AttentionArguments)],
    "paged_attention_prefill": [ctypes.POINTER(AttentionArguments), _LONG],  # fewest queries
}

# Functions that only some instruction sets have.
_OPTIONAL = frozenset({"linear_blocks_amx", "linear_panels_amx"})

Function = Callable[..., int]


class KernelsUnavailableError(RuntimeError):
    """The compiled CPU kernels cannot be used here; the message says why and what to do."""


class Library:
    """The kernels bound for one instruction set: a function for every name in SIGNATURES. It returns 0 or an error code.

    linear_blocks_amx, linear_panels_amx: None on a processor without AMX. addresses: of the functions' code, for callers in C.
    attention_arguments: see `attention_packer`.
    """

    linear_blocks_amx: Function | None
    linear_panels_amx: Function | None

    def __init__(
        self,
        path: Path,
        isa: str,
        functions: Mapping[str, Function | None],
        addresses: Mapping[str, int],
        attention_arguments: Callable[[Mapping[str, float]], AttentionArguments],
    ) -> None:
        self.path, self.isa, self.functions, self.addresses = path, isa, functions, addresses
        self.attention_arguments = attention_arguments
        vars(self).update(functions)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Function: ...

    def with_functions(self, functions: Mapping[str, Function]) -> Library:
        """A copy with other functions under these names."""
        return Library(self.path, self.isa, {**self.functions, **functions}, self.addresses, self.attention_arguments)


def find() -> Path | None:
    """The shared object built for this interpreter, or None."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_windlass_cpu{suffix}"
        if path.exists():
            return path
    return None


def bind(path: Path, isa: str) -> Library:
    """Load `path` and bind the functions of `isa`. Whether this processor can run them is not checked.

    Raises OSError for a file that does not load and AttributeError for one that lacks the instruction set.
    """
    handle = ctypes.CDLL(str(path))
    functions, addresses = dict[str, Any](), dict[str, int]()
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
    return Library(path, isa, functions, addresses, attention_packer(handle))


def runnable(path: Path) -> tuple[str, ...]:
    """The instruction sets in `path` that this processor can run, slowest to fastest.

    Raises OSError for a file that does not load and AttributeError for one that was compiled from other sources.
    """
    handle = ctypes.CDLL(str(path))
    handle.windlass_sources.restype = ctypes.c_char_p
    if (sources := fingerprint(Path(__file__).parent / "src")) and handle.windlass_sources().decode() != sources:
        raise AttributeError("compiled from other sources")
    if others := differing_structs(handle):
        raise AttributeError(f"compiled from other sources: {'; '.join(others)}")
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
    """Why the compiled kernels cannot be used in this process, or None. Decided once."""
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
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


class PageSizes(NamedTuple):
    """Sizes derived from the shapes of pages. dim: of a key; for int8 keys in panels rounded up to a multiple of 4."""

    num_blocks: int
    block_size: int
    kv_heads: int
    dim: int
    value_dim: int
    in_panels: bool

    def holds_keys(self, kv_heads: int, dim: int) -> bool:
        """Whether keys of this shape fit the pages."""
        return self.kv_heads == kv_heads and self.dim == (padded_dim(dim) if self.in_panels else dim)


def page_sizes(key_pages: Tensor, value_pages: Tensor, key_scales: Tensor | None) -> PageSizes:
    """The sizes of valid pages (see `pages_refusal`, `scales_refusal`)."""
    if key_scales is None or key_pages.dim() == 4:
        num_blocks, block_size, kv_heads, dim = key_pages.shape
        return PageSizes(num_blocks, block_size, kv_heads, dim, value_pages.shape[3], False)
    num_blocks, kv_heads, block_size = key_scales.shape
    return PageSizes(num_blocks, block_size, kv_heads, QUAD * key_pages.shape[3], value_pages.shape[3], True)


def pages_refusal(key_pages: Tensor, value_pages: Tensor) -> str | None:
    """Why the kernels do not support these pages, or None."""
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
    """Why these are not the scales of such (valid) pages, or None."""
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


def check_matrix(x: Tensor, name: str, *, wide: bool = False) -> None:
    """Raise ValueError unless x is a float CPU matrix (wide: float32) with adjacent elements in a row.

    name: function and operand.
    """
    known = x.dtype == torch.float32 if wide else x.dtype in TYPE_CODES
    if x.dim() != 2 or not known or not x.is_cpu or (x.shape[1] > 1 and x.stride(1) != 1):
        kind = "float32" if wide else "float"
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, not a {kind} CPU tensor [T, N] with adjacent elements")


def tensor2(x: Tensor) -> tuple[int, int, int]:
    """Address, row stride and type code of a matrix."""
    return x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype]


def address(x: Tensor | None) -> int | None:
    """The address of an optional tensor."""
    return None if x is None else x.data_ptr()


def table_ok(table: Tensor, shape: tuple[int, int]) -> bool:
    """Whether this is a float32 matrix of this shape with adjacent elements in a row."""
    return (
        table.dtype == torch.float32
        and table.shape == shape
        and table.is_cpu
        and (shape[1] < 2 or table.stride(1) == 1)
    )


def vector_ok(vector: Tensor, dtype: torch.dtype, length: int) -> bool:
    """Whether this is a contiguous vector of this type and length."""
    return vector.dtype == dtype and vector.shape == (length,) and vector.is_cpu and vector.is_contiguous()


def check_out(out: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless `out` is a writable matrix of this shape and type, with adjacent elements in a row."""
    if out.shape != (rows, columns) or out.dtype != dtype or (columns > 1 and out.stride(1) != 1) or not out.is_cpu:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not {dtype} {(rows, columns)} with adjacent elements")
