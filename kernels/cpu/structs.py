"""Structs that the compiled kernels take, as ctypes sees them: field by field those of the C++ headers. Knows no tensors."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

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
    """One row to draw: the same as `SamplingRow` in src/sampling.h; `windlass.kernels.cpu.sampling.CompiledSamplingRow` explains it."""

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
