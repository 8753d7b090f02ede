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
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from windlass.kernels.cpu.build import EXTENSIONS, fingerprint, supported
from windlass.kernels.layouts.kv_pages import PANEL_TOKENS, QUAD, KVPages, num_groups

# By the type letters of the struct module; S: the address of `AttentionArguments`.
_TYPES: dict[str, type] = {
    "P": ctypes.c_void_p,
    "l": ctypes.c_long,
    "f": ctypes.c_float,
    "i": ctypes.c_int,
    "q": ctypes.c_int64,
    "d": ctypes.c_double,
}


def _fields(described: str) -> list[tuple[str, type]]:
    """Fields of a struct from "name:letter name:letter ..."."""
    return [(name, _TYPES[letter]) for name, letter in (field.split(":") for field in described.split())]


class AttentionArguments(ctypes.Structure):
    """Arguments of one attention call. `attention_packer` adds the fields, which src/attention_call.h describes."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = ()


_TYPES["S"] = ctypes.POINTER(AttentionArguments)


class SamplingRowFields(ctypes.Structure):
    """`SamplingRow` in src/shared_structs.h; `elementwise_bindings.CompiledSamplingRow` describes the fields."""

    _fields_ = _fields(
        "row:q allowed:P num_allowed:q forbidden:P num_forbidden:q biased:P bias:P num_biased:q counted:P in_output:P "
        "num_counted:q decreased:P decrease:P num_decreased:q mask:P repetition:f frequency:f presence:f temperature:f "
        "floor:f status:i top_k:q top_p:d typical_p:d exclude_from:d uniform:d token:q"
    )


class LowRankPartFields(ctypes.Structure):
    """`LowRankPart` in src/shared_structs.h; `LowRankPart` in kernels/layouts describes the fields."""

    _fields_ = _fields("up:P type:q first:q columns:q rank_first:q rank:q scale:d")


class LowRankFields(ctypes.Structure):
    """`LowRankUpdate` in src/shared_structs.h; rank 0 for none."""

    _fields_ = _fields("down:P type:q rank:q num_parts:q parts:P")


class ExpertPartFields(ctypes.Structure):
    """`ExpertPart` in src/shared_structs.h, which describes the fields."""

    _fields_ = _fields(
        "data:P scales:P supers:P bias:P kind:q type:q stride:q bits:q group:q super_groups:q minimum:q offset:q "
        "bias_type:q first:q columns:q"
    )


class ExpertProductsFields(ctypes.Structure):
    """`ExpertProducts` in src/shared_structs.h: addresses of the products of one instruction set."""

    _fields_ = _fields(
        "linear:P linear_panels:P linear_blocks:P linear_blocks_amx:P linear_panels_amx:P amx_min_rows_blocks:q "
        "amx_min_rows_panels:q"
    )


class RankGroupFields(ctypes.Structure):
    """`RankGroup` in src/shared_structs.h: the state of one rank."""

    _fields_ = _fields("memory:P bounds:P rank:q ranks:q slot_bytes:q round:q")


# `RecordedCall`: address of the adapter that calls the function, and of its arguments
RECORDED_CALL = struct.Struct("=qq")

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
        getattr(arguments, name) if kind is not ctypes.c_void_p else getattr(arguments, name) is None
        for name, kind, *_ in arguments._fields_
    )


class _AttentionField(ctypes.Structure):
    """`ArgumentField` in src/library.cpp."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_long), ("type", ctypes.c_char))


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
        letters += entry.type.decode()
        fields.append((entry.name.decode(), _TYPES[letters[-1]]))
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
    size_of.argtypes, size_of.restype = (ctypes.c_char_p,), ctypes.c_long
    compiled = {name: size_of(name.encode()) for name in SIZES}
    return [f"{name}: {compiled[name]} bytes, not {size}" for name, size in SIZES.items() if compiled[name] != size]


ISA_VARIABLE = "WINDLASS_CPU_ISA"

# Instruction sets with native products of bfloat16 rows and panel weights.
BF16_DOT_ISAS = frozenset({"avx512_bf16", "avx512_amx"})

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

PAGE_CODES = TYPE_CODES | {torch.int8: 3}  # int8 pages come with scales

LATENT_PAGES = 4  # rows of int8 codes for latent attention

_BLOCKS = "PPP iiiii"  # codes, scales, scales of super groups; bits, group, super groups, whether minima, offset

_STATE_ROWS = "PPPl P"  # blocks, starts, lengths, sequences; snapshots

_STEP_BUFFERS = (
    "Pl Pl llll PPPP l"  # metadata, tables, groups and blocks, own arrays, columns: see `CompiledBufferFiller`
)

# Types of each function's arguments. "Pli" is a matrix: address, row stride and type; "Pll" has a row and a head stride.
SIGNATURES = {
    name: letters.replace(" ", "")
    for name, letters in {
        "linear": "Pli Pli Pi Pl lll",  # x, weight, bias, out, sizes
        "linear_panels": "Pli Pi Pi Pl lll",  # x, weight, bias, out, sizes
        "pack_panels": "Pli lll P",  # source, rows and columns, weight
        "widen_panels": "Pi lll P",  # weight, panels and inner size, out
        "linear_blocks": f"Pl {_BLOCKS} P i Pl lll",  # x, weight, bias, activation, out, sizes
        "linear_blocks_amx": f"Pli {_BLOCKS} P i Pl lll",
        "linear_panels_amx": "Pl P P i Pl lll",
        "dequantize_blocks": f"{_BLOCKS} Pl f P lll",  # weight, ids or the first, factor, out, sizes
        "repack_blocks": "Pl i lll PPP",  # blocks, form, rows and columns, weight
        "pack_blocks": "Pli Pl iiiii lll PPP",  # source, weights of errors, form, rows and columns, weight
        # q, k, v, type, cos, sin, q_scale, pages, slots, tokens, heads, kv heads, dim, value dim, half; past caches
        "rotate_and_append": "Pll Pll Pll i Pl Pl P PPi lP llllll i",
        "rotate_and_append_int8": "Pll Pll Pll i Pl Pl P PP PPl lP llllll",  # scales and block size instead of a type
        "rotate_and_append_rows": "Pll Pll i Pl Pl P PP lP lllll",  # without values
        # pages, slots, sources, targets, entries, cos, sin, kv heads, dim, value dim, half
        "rerotate_cached_keys": "PPi lPPl Pl Pl llll",
        "rerotate_cached_keys_int8": "PP PPl lPPl Pl Pl llll",
        "rerotate_cached_rows": "PP lPPl Pl Pl lll",
        "rotate_queries": "Pll i P Pl Pl P lllll",  # q, rows, cos, sin, out, sizes
        "rotary_angles": "Plll PPl PP",  # inverse frequencies, rows, positions, tokens, cos, sin
        "rms_norm": "Plll Pl i P f P ll",  # x in groups of rows, residual, type, weight, eps, out, sizes
        "rms_norm_in_place": "Pli P f ll",
        "layer_norm": "Plll i PP f P ll",  # x in groups of rows, type, weight, bias, eps, out, sizes
        "gated_activation": "Pli i P ll",
        "clamped_glu": "Pli ff P ll",
        "activate": "Pli i P ll",
        "xielu": "Pli PPPP P ll",  # x, its four numbers, out, sizes
        "soft_cap": "Pl f P ll",
        "clip": "Pli f ll",
        "gate_by_sigmoid": "Pli Pli lll",
        "scale_rows": "Pli P ll",
        "scale_columns": "Pli PP ll",
        "multiply": "Pli Pl P ll",  # x, rows, or one factor
        "embed_rows": "Pli l P f Pi ll",  # table, its rows, ids, factor, out, sizes
        "add_low_rank": "Pl Pl i P ll Pl",  # x, out, their type, slots, sizes, table
        "latent_queries": "Pll i Pi P llllll",  # q, matrices, out, sizes
        "latent_values": "Pll i Pi P lllll",
        # logits, bias, scales, experts, chosen, groups, chosen groups, scores, two largest, normalized; then
        # scale, least sum, sum eps, jitter, and the results
        "route_experts": "Pl PPl lll iii ffff PPl",
        "linear_of_experts": "Pli Pll P Pll P ll",  # x, table, products, chosen, out, sizes
        "sum_of_experts": "Pi Pl P ll",
        "short_convolution": f"Pli Pl P i Pl {_STATE_ROWS} P ll",  # x, weight, bias, activation, window, rows, out
        # qkv, decay, strength, rate, bias, memory with its sizes and the order of heads, rows, out
        "gated_delta_rule": f"Pli Pl Pl PP Plllll l {_STATE_ROWS} Pl",
        # mixed, step, rate, bias, skip, memory with its sizes, limits, rows, out
        "state_space": f"Pli Pl PPP Plllll ff {_STATE_ROWS} Pl",
        "all_reduce": "P Pi l",
        "gather_columns": "P PP l",
        "repeat_calls": "Pl",
        # calls, passes, buffers, rotary tables, ids, values, stops, ends, drawn, made
        "run_decode_steps": f"Pl l {_STEP_BUFFERS} Plll PP PPPPPP",
        "fill_step_buffers": _STEP_BUFFERS,
        "row_maxima": "Pl ll PP",
        "sample_tokens": "Pl ll Pl Pl",  # logits, rows to sample, workspace
        "token_logprobs": "Pl ll PPll PPPPP Pl",  # logits, rows, targets, count and k, results, workspace
        "paged_attention_decode": "S",
        "paged_attention_prefill": "S l",  # fewest queries
    }.items()
}

# Functions that only some instruction sets have.
_OPTIONAL = frozenset({"linear_blocks_amx", "linear_panels_amx"})

Function = Callable[..., int]


class KernelsUnavailableError(RuntimeError):
    """The compiled CPU kernels cannot be used here; the message gives the reason and the remedy."""


class HasLibrary(Protocol):
    """First operand of every binding: a `CompiledBackend`, whose methods most bindings are, or a `Library` itself."""

    @property
    def library(self) -> Library: ...


class Library:
    """The kernels bound for one instruction set: a function for every name in SIGNATURES. It returns 0 or an error code.

    linear_blocks_amx, linear_panels_amx: None on a processor without AMX. addresses: of the functions' code, for callers in C.
    recorded: addresses of the adapters of functions that a recorded step may call.
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
        recorded: Mapping[str, int],
        attention_arguments: Callable[[Mapping[str, float]], AttentionArguments],
    ) -> None:
        self.path, self.isa, self.functions, self.addresses = path, isa, functions, addresses
        self.recorded, self.attention_arguments = recorded, attention_arguments
        vars(self).update(functions)

    @property
    def library(self) -> Library:
        return self

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Function: ...

    def with_functions(self, functions: Mapping[str, Function]) -> Library:
        """A copy with other functions under these names."""
        changed = {**self.functions, **functions}
        return Library(self.path, self.isa, changed, self.addresses, self.recorded, self.attention_arguments)


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
    functions, addresses, recorded = dict[str, Any](), dict[str, int](), dict[str, int]()
    for name, letters in SIGNATURES.items():
        source = isa
        while not hasattr(handle, f"windlass_{name}_{source}") and source in EXTENSIONS:
            source, _ = EXTENSIONS[source]
        if name in _OPTIONAL and not hasattr(handle, f"windlass_{name}_{source}"):
            functions[name] = None
            continue
        function = getattr(handle, f"windlass_{name}_{source}")
        function.argtypes = [_TYPES[letter] for letter in letters]
        function.restype = ctypes.c_int
        functions[name] = function
        addresses[name] = _address(function)
        if adapter := getattr(handle, f"windlass_recorded_{name}_{source}", None):
            recorded[name] = _address(adapter)
    return Library(path, isa, functions, addresses, recorded, attention_packer(handle))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def runnable(path: Path) -> tuple[str, ...]:
    """The instruction sets in `path` that this processor can run, slowest to fastest.

    Raises OSError for a file that does not load and AttributeError for one that was compiled from other sources.
    """
    handle = ctypes.CDLL(str(path))
    handle.windlass_sources.restype = handle.windlass_isas.restype = ctypes.c_char_p
    if (sources := fingerprint()) and handle.windlass_sources().decode().split()[-1] != sources:
        raise AttributeError("compiled from other sources")
    if others := differing_structs(handle):
        raise AttributeError(f"compiled from other sources: {'; '.join(others)}")
    isas = handle.windlass_isas().decode().split()[-1].split(",")
    found = tuple(isa for isa in supported(handle) if isa in isas)
    if not found:
        raise AttributeError(f"compiled for {', '.join(isas)}, which this processor does not support")
    return found


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


def pages_refusal(pages: KVPages) -> str | None:
    """Why the kernels do not support these pages, or None."""
    key, value = pages.key, pages.value
    if key.dtype not in PAGE_CODES or key.dtype != value.dtype:
        return f"pages are {key.dtype} and {value.dtype}, not one of float32, bfloat16, float16, int8"
    if key.dtype == torch.int8 and key.dim() != 4:
        shapes = tuple(key.shape), tuple(value.shape)
        if key.dim() != 6 or value.dim() != 5:
            return f"int8 pages {shapes} are not codes laid out for the kernels (see int8_layout)"
        num_blocks, kv_heads, panels, _, tokens, quad = key.shape
        expected = (num_blocks, kv_heads, panels * PANEL_TOKENS // QUAD, value.shape[3], QUAD)
        if (tokens, quad) != (PANEL_TOKENS, QUAD) or value.shape != expected:
            return f"int8 pages {shapes} are not the keys and values of the same tokens"
    elif key.dim() != 4 or key.shape[:3] != value.shape[:3]:
        return f"pages {tuple(key.shape)} and {tuple(value.shape)} differ before their last dimension"
    if not (key.is_cpu and key.is_contiguous() and value.is_cpu and value.is_contiguous()):
        return "the pages are not contiguous CPU tensors"
    for scales, dim in ((pages.key_scale, key.shape[3]), (pages.value_scale, value.shape[3])):
        if (scales is not None) != (key.dtype == torch.int8):
            return "int8 pages need scales for keys and values, pages of floats have none"
        if scales is None:
            continue
        shape: tuple[int, ...] = (key.shape[0], key.shape[1], key.shape[2] * PANEL_TOKENS)
        if key.dim() == 4:
            shape = (*key.shape[:3], num_groups(dim))
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


def check_vectors(names: str, dtype: torch.dtype, length: int, *vectors: Tensor | None) -> None:
    """Raise ValueError unless all given vectors are contiguous, of this type and length. names: function and operands."""
    for vector in vectors:
        if vector is not None and not vector_ok(vector, dtype, length):
            raise ValueError(f"{names} must be {str(dtype).removeprefix('torch.')} [{length}], contiguous")


def adjacent(x: Tensor) -> Tensor:
    """A matrix with adjacent elements in a row: x if it is one, else a copy."""
    return x.contiguous() if x.stride(1) != 1 and x.shape[1] > 1 else x


def result_matrix(out: Tensor | None, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """`out`, or a new matrix if it is None. Raises ValueError unless `out` is of this shape and type, with adjacent
    elements in a row."""
    if out is None:
        return torch.empty((rows, columns), dtype=dtype)
    if out.shape != (rows, columns) or out.dtype != dtype or (columns > 1 and out.stride(1) != 1) or not out.is_cpu:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not {dtype} {(rows, columns)} with adjacent elements")
    return out
