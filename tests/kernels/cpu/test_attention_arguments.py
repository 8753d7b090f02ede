"""The struct of an attention call: Python and C++ see the same fields at the same places, filled with what they are named for."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cpu_kernels import kernels, look_again

from windlass.kernels import AttentionCall, KeyRanges, KVPages, cpu
from windlass.kernels.cpu import attention_bindings, library
from windlass.kernels.cpu.library import AttentionArguments, Library


def test_fields_stand_where_the_compiler_put_them() -> None:
    kernels("generic")
    compiled, size = library.compiled_fields(ctypes.CDLL(str(library.find())))
    assert list(compiled) == [name for name, _ in AttentionArguments._fields_]
    for name, place in compiled.items():
        field = getattr(AttentionArguments, name)
        assert (name, place.offset, place.size) == (name, field.offset, field.size)
    assert size == ctypes.sizeof(AttentionArguments)
    assert sum(place.size for place in compiled.values()) == size  # the C++ struct has no field that its table lacks


def test_both_say_the_same_of_how_many_queries_are_rounded() -> None:
    source = (Path(attention_bindings.__file__).parent / "src" / "attention_prefill.h").read_text()
    assert re.findall(r"FEWEST_ROUNDED = (\d+);", source) == [str(attention_bindings.FEWEST_ROUNDED)]


def test_a_library_of_another_struct_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("generic")
    places, size = library.declared_fields()
    monkeypatch.setattr(library, "declared_fields", lambda: ({**places, "dim": library.FieldOffset(8, 8)}, size))
    look_again(monkeypatch)
    reason = str(library.unavailable_reason())
    assert "AttentionArguments has other fields" in reason and "install a C++ compiler" in reason


class Watched:
    """The arguments of the last call, which runs as ever."""

    def __init__(self) -> None:
        self.found = AttentionArguments()
        real = kernels("generic")
        self.library = replace(
            real,
            paged_attention_decode=lambda a: self._note(a) or real.paged_attention_decode(a),
            paged_attention_prefill=lambda a, n: self._note(a) or real.paged_attention_prefill(a, n),
        )

    def _note(self, arguments: AttentionArguments) -> None:
        self.found = arguments


def test_every_field_holds_what_it_is_named_for() -> None:
    rows, watched = torch.zeros(2, 9, 8), Watched()
    q, pages = rows[:, 1:7], KVPages(torch.zeros(5, 16, 3, 8).half(), torch.zeros(5, 16, 3, 4).half())
    tables, lengths, ones, sinks = (
        torch.zeros(2, 7, dtype=torch.int32),
        torch.ones(2).int(),
        torch.ones(2),
        torch.ones(6),
    )
    call = AttentionCall.for_decode(tables[:, :6], lengths, ones, 0.25, window=11, soft_cap=3.0, sink_logits=sinks)
    out = cpu.paged_attention_decode(q, pages, call, library=watched.library)
    expected: dict[str, object] = {
        **{"q": q.data_ptr(), "keys": pages.key.data_ptr(), "values": pages.value.data_ptr(), "out": out.data_ptr()},
        **{"key_scales": None, "value_scales": None, "tables": tables.data_ptr(), "query_start": None},
        **{"lengths": lengths.data_ptr(), "score_scale": ones.data_ptr(), "sinks": sinks.data_ptr()},
        **{"slopes": None, "range_gaps": None},
        **{"range_ends": None, "range_rows": None, "range_reaches": None, "ranges": 0},
        **{"q_rows": 2, "q_row": 72, "q_head": 8},
        **{"num_blocks": 5, "block_size": 16, "kv_heads": 3, "dim": 8, "value_dim": 4, "table_row": 7},
        **{"table_columns": 6, "batch": 2, "heads": 6, "window": 11, "chunk": 0, "scale": 0.25, "soft_cap": 3.0},
        **{"q_type": 0, "page_type": 2, "lengths_are_64": 0, "causal": 1, "rounds": 0},
    }
    assert {name: getattr(watched.found, name) for name, _ in AttentionArguments._fields_} == expected
    call = AttentionCall(tables, torch.tensor([0, 1, 2]), torch.tensor([1, 1]), ones, 0.5)
    codes = KVPages.of_codes(
        *(torch.zeros(5, 16, 3, 8, dtype=torch.int8), torch.zeros(5, 16, 3)),
        *(torch.zeros(5, 16, 3, 4, dtype=torch.int8), torch.zeros(5, 16, 3)),
    )
    out = cpu.paged_attention_prefill(q, codes, call, library=watched.library)
    assert codes.key_scale is not None and codes.value_scale is not None
    expected |= {"keys": codes.key.data_ptr(), "values": codes.value.data_ptr(), "out": out.data_ptr()}
    expected |= {"key_scales": codes.key_scale.data_ptr(), "value_scales": codes.value_scale.data_ptr()}
    expected |= {"query_start": call.query_start.data_ptr(), "lengths": call.seq_lens.data_ptr(), "sinks": None}
    expected |= {"table_columns": 7, "window": 0, "soft_cap": 0.0, "scale": 0.5, "page_type": 3, "lengths_are_64": 1}
    assert {name: getattr(watched.found, name) for name, _ in AttentionArguments._fields_} == expected
    ends, plain, all_of_it = torch.tensor([[1, 1]] * 2), torch.tensor([[0, 0], [1, 1]]), torch.full((2, 2), 9)
    call = replace(call, ranges=KeyRanges(ends, plain, all_of_it, gaps=ends), alibi_slopes=sinks)
    out = cpu.paged_attention_prefill(torch.zeros(5, 6, 8), codes, call, library=watched.library)
    found = watched.found
    assert found.rounds == 0
    addresses = (found.range_ends, found.range_rows, found.range_reaches)
    assert addresses == (ends.data_ptr(), plain.data_ptr(), all_of_it.data_ptr())
    assert (found.slopes, found.range_gaps) == (sinks.data_ptr(), ends.data_ptr())
    assert (found.ranges, found.q_rows, found.batch, len(out)) == (2, 5, 2, 2)


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
def test_the_kernels_refuse_what_they_do_not_do(form: Library, change: dict[str, int]) -> None:
    """Whoever fills the struct himself; Python refuses such a call before."""
    arguments = AttentionArguments(causal=1, kv_heads=1, heads=1, block_size=16)  # of no sequence
    assert form.paged_attention_decode(arguments) == form.paged_attention_prefill(arguments, 1) == 0
    for name, value in change.items():
        setattr(arguments, name, value)
    assert form.paged_attention_decode(arguments) == form.paged_attention_prefill(arguments, 1) == 3


def test_values_of_a_struct_leave_addresses_out() -> None:
    first = library.attention_arguments(*range(1, len(AttentionArguments._fields_) + 1))
    moved = library.attention_arguments(*range(1, len(AttentionArguments._fields_) + 1))
    moved.q, moved.out = 99, 100
    assert library.struct_values(first) == library.struct_values(moved)
    moved.sinks = None
    assert library.struct_values(first) != library.struct_values(moved)
    moved.sinks, moved.window = 10, 5
    assert library.struct_values(first) != library.struct_values(moved)
