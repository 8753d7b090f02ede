"""The struct of an attention call, described in C++ and filled by field name in Python."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.attention_case import decode_call
from helpers.code_pages import pages_of_codes
from helpers.cpu_kernels import kernels

from windlass.kernels import AttentionCall, KeyRanges, KVPages, cpu
from windlass.kernels.cpu import attention_bindings, library
from windlass.kernels.cpu.library import AttentionArguments, Library

# Fields of AttentionCall and KeyRanges, with the fields of the struct that they determine.
SOURCES = {
    "block_tables": {"tables", "table_row", "table_columns"},
    "query_start": {"query_start"},
    "seq_lens": {"lengths", "int64_lengths", "batch"},
    "score_scale": {"score_scale"},
    "scale": {"scale"},
    "window": {"window"},
    "soft_cap": {"soft_cap"},
    "sink_logits": {"sinks"},
    "causal": {"causal"},
    "chunk": {"chunk"},
    "alibi_slopes": {"slopes"},
    "ends": {"range_ends", "ranges"},
    "rows": {"range_rows"},
    "reaches": {"range_reaches"},
    "gaps": {"range_gaps"},
}
HOST_ONLY = {"prompts", "ranges"}  # a hint of sizes; the struct of the range tensors


def names_of(arguments: AttentionArguments) -> list[str]:
    return [name for name, *_ in arguments._fields_]


def values_of(arguments: AttentionArguments) -> dict[str, object]:
    return {name: getattr(arguments, name) for name in names_of(arguments)}


def test_python_and_cpp_have_the_same_limit_of_rounded_queries() -> None:
    source = (Path(attention_bindings.__file__).parent / "src" / "attention_prefill.h").read_text()
    assert re.findall(r"MIN_BF16_QUERIES = (\d+);", source) == [str(attention_bindings.MIN_BF16_QUERIES)]


class RecordingLibrary:
    """Records the arguments of the last call, which is executed as usual, and the values of their fields."""

    def __init__(self) -> None:
        real = kernels()
        self.library = real.with_functions(
            {
                "paged_attention_decode": lambda a: self._note(a) or real.paged_attention_decode(a),
                "paged_attention_prefill": lambda a, n: self._note(a) or real.paged_attention_prefill(a, n),
            }
        )
        self._pack = real.attention_arguments
        self.library.attention_arguments = self._packed

    def _packed(self, values: Mapping[str, float]) -> AttentionArguments:
        self.values = values
        return self._pack(values)

    def _note(self, arguments: AttentionArguments) -> None:
        self.found = arguments


def test_every_field_has_its_value() -> None:
    rows, watched = torch.zeros(2, 9, 8), RecordingLibrary()
    q, pages = rows[:, 1:7], KVPages(torch.zeros(5, 16, 3, 8).half(), torch.zeros(5, 16, 3, 4).half())
    tables, lengths, ones, sinks = (
        torch.zeros(2, 7, dtype=torch.int32),
        torch.ones(2).int(),
        torch.ones(2),
        torch.ones(6),
    )
    call = decode_call(tables[:, :6], lengths, ones, 0.25, window=11, soft_cap=3.0, sink_logits=sinks)
    out = cpu.paged_attention_decode(watched.library, q, pages, call)
    assert set(watched.values) == set(names_of(watched.found))
    expected: dict[str, object] = {
        **{"q": q.data_ptr(), "keys": pages.key.data_ptr(), "values": pages.value.data_ptr(), "out": out.data_ptr()},
        **{"key_scales": None, "value_scales": None, "tables": tables.data_ptr(), "query_start": None},
        **{"lengths": lengths.data_ptr(), "score_scale": ones.data_ptr(), "sinks": sinks.data_ptr()},
        **{"slopes": None, "range_gaps": None},
        **{"range_ends": None, "range_rows": None, "range_reaches": None, "ranges": 0},
        **{"q_rows": 2, "q_row": 72, "q_head": 8},
        **{"num_blocks": 5, "block_size": 16, "kv_heads": 3, "dim": 8, "value_dim": 4, "table_row": 7},
        **{"table_columns": 6, "batch": 2, "heads": 6, "window": 11, "chunk": 0, "scale": 0.25, "soft_cap": 3.0},
        **{"q_type": 0, "page_type": 2, "int64_lengths": 0, "causal": 1, "bf16_products": 0},
    }
    assert values_of(watched.found) == expected
    call = AttentionCall(tables, torch.tensor([0, 1, 2]), torch.tensor([1, 1]), ones, 0.5)
    codes = pages_of_codes(
        *(torch.zeros(5, 16, 3, 8, dtype=torch.int8), torch.zeros(5, 16, 3)),
        *(torch.zeros(5, 16, 3, 4, dtype=torch.int8), torch.zeros(5, 16, 3)),
    )
    out = cpu.paged_attention_prefill(watched.library, q, codes, call)
    assert codes.key_scale is not None and codes.value_scale is not None
    expected |= {"keys": codes.key.data_ptr(), "values": codes.value.data_ptr(), "out": out.data_ptr()}
    expected |= {"key_scales": codes.key_scale.data_ptr(), "value_scales": codes.value_scale.data_ptr()}
    expected |= {"query_start": call.query_start.data_ptr(), "lengths": call.seq_lens.data_ptr(), "sinks": None}
    expected |= {"table_columns": 7, "window": 0, "soft_cap": 0.0, "scale": 0.5, "page_type": 3, "int64_lengths": 1}
    assert values_of(watched.found) == expected
    ends, plain, reaches = torch.tensor([[1, 1]] * 2), torch.tensor([[0, 0], [1, 1]]), torch.full((2, 2), 9)
    call = replace(call, ranges=KeyRanges(ends, plain, reaches, gaps=ends), alibi_slopes=sinks)
    out = cpu.paged_attention_prefill(watched.library, torch.zeros(5, 6, 8), codes, call)
    found = watched.found
    assert found.bf16_products == 0
    addresses = (found.range_ends, found.range_rows, found.range_reaches)
    assert addresses == (ends.data_ptr(), plain.data_ptr(), reaches.data_ptr())
    assert (found.slopes, found.range_gaps) == (sinks.data_ptr(), ends.data_ptr())
    assert (found.ranges, found.q_rows, found.batch, len(out)) == (2, 5, 2, 2)


def test_every_field_of_a_call_reaches_the_struct() -> None:
    fields = {field.name for kind in (AttentionCall, KeyRanges) for field in dataclasses.fields(kind)}
    assert fields == SOURCES.keys() | HOST_ONLY
    assert set().union(*SOURCES.values()) <= set(names_of(arguments_of(kernels())))


def test_a_missing_or_unknown_field_is_an_error() -> None:
    found = kernels()
    values = dict.fromkeys(names_of(arguments_of(found)), 0)
    with pytest.raises(KeyError, match="window"):
        found.attention_arguments({**{n: 0 for n in values if n != "window"}, "windows": 0})
    with pytest.raises(ValueError, match="windows"):
        found.attention_arguments({**values, "windows": 0})


def test_a_library_with_another_layout_is_not_bound() -> None:
    field = library._AttentionField
    table = (field * 2)(field(b"window", 0, b"l"), field(None, 24, b"\0"))

    def fields() -> object:
        return table

    handle = type("Handle", (), {"windlass_attention_fields": fields})
    with pytest.raises(AttributeError, match="24 bytes, not 8"):
        library.attention_packer(handle)  # type: ignore[arg-type]


def arguments_of(found: Library, **values: float) -> AttentionArguments:
    """Return arguments with these values, and 0 for all other fields."""
    handle = ctypes.CDLL(str(found.path))
    handle.windlass_attention_fields.restype = ctypes.POINTER(library._AttentionField)
    names, table = [], handle.windlass_attention_fields()
    while (name := table[len(names)].name) is not None:
        names.append(name.decode())
    return found.attention_arguments({**dict.fromkeys(names, 0), **values})


@pytest.mark.parametrize(
    "change",
    [
        {"range_ends": 8, "causal": 0},
        {"chunk": 4, "window": 3},
        {"chunk": 4, "causal": 0},
        {"range_ends": 8, "window": 3},
        {"slopes": 8},
        {"range_ends": 8, "slopes": 8},
    ],
    ids=str,
)
def test_kernels_refuse_unsupported_calls(form: Library, change: dict[str, int]) -> None:
    """Python refuses these calls earlier. Other callers fill the struct themselves."""
    arguments = arguments_of(form, causal=1, kv_heads=1, heads=1, block_size=16)  # without sequences
    assert form.paged_attention_decode(arguments) == form.paged_attention_prefill(arguments, 1) == 0
    for name, value in change.items():
        setattr(arguments, name, value)
    assert form.paged_attention_decode(arguments) == form.paged_attention_prefill(arguments, 1) == 3


def test_values_of_a_struct_exclude_addresses() -> None:
    found = kernels()
    numbers = {name: i + 1 for i, name in enumerate(names_of(arguments_of(found)))}
    first, moved = found.attention_arguments(numbers), found.attention_arguments(numbers)
    moved.q, moved.out = 99, 100
    assert library.struct_values(first) == library.struct_values(moved)
    moved.sinks = None
    assert library.struct_values(first) != library.struct_values(moved)
    moved.sinks, moved.window = 10, 5
    assert library.struct_values(first) != library.struct_values(moved)
