"""Attention of prompts rounded to bfloat16, where the processor multiplies that: against float64 of what is rounded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.cpu_kernels import PAIR_FORMS, at_the_end_of_memory, kernels
from helpers.prefill_case import PrefillCase as Case

from windlass.kernels import AttentionCall, cpu
from windlass.kernels.cpu.library import Library

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=PAIR_FORMS)
def form(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def check(case: Case, form: Library, **options: Any) -> None:
    """Only the weights (2^-9 of each, for a maximum of 1) and the scaled queries are rounded."""
    got = case.got(form, bf16_products=True, **options).double()
    case.wide = [rounded(part) for part in case.wide]
    want = case.expected(**options)
    largest = torch.stack([part[part.isfinite()].abs().max() for part in case.wide]).max()
    error = (got - want).abs()
    assert error.max() <= 2**-7 * largest and error.mean() <= 2**-10 * largest, (error.max(), error.mean())


@pytest.mark.parametrize("page_type", HALVES)
def test_shapes_windows_and_chunks(form: Library, page_type: torch.dtype) -> None:
    for dim in (5, 24, 32, 36, 64, 80, 128, 512):
        check(Case([(0, 33), (100, 40), (127, 16)], dim=dim, page_type=page_type, spread=0.5), form)
    for q_type in HALVES:
        check(Case([(10, 31)], q_type=q_type, page_type=page_type, dim=32), form)
    for options in ({"window": 17}, {"window": 130}, {"chunk": 40}, {"causal": False}):
        check(Case([(150, 70), (37, 65)], dim=32, page_type=page_type, **options), form)  # type: ignore[arg-type]
    for heads, kv_heads in ((16, 4), (8, 1), (16, 1)):
        check(Case([(3, 40)], dim=512, heads=heads, kv_heads=kv_heads, page_type=page_type, spread=0.5), form)
    check(Case([(3, 40)], dim=64, value_dim=48, heads=9, kv_heads=3, block_size=48, page_type=page_type), form)


def test_sinks_and_soft_cap(form: Library) -> None:
    sinks = torch.tensor([-100.0, -1.0, 0.0, 2.0, 30.0, -torch.inf])
    for options in ({"sinks": sinks}, {"soft_cap": 2.0}, {"sinks": sinks, "soft_cap": 15.0}):
        check(Case([(0, 19), (140, 30)], heads=6, dim=32, page_type=torch.float16), form, **options)


def test_what_is_not_rounded(form: Library) -> None:
    """Few queries, wider pages, codes, and calls that do not ask for it: all have the bits that they always had."""
    for page_type, new in ((torch.float16, 15), (torch.float32, 40), (torch.int8, 40)):
        case = Case([(90, new)], page_type=page_type)
        assert torch.equal(case.got(form, bf16_products=True), case.got(form))
    case = Case([(90, 16), (30, 15)], page_type=torch.float16)
    same = (case.got(form, bf16_products=True) == case.got(form)).all(-1).all(-1)
    assert not same[:16].any() and same[16:].all()


def test_chunks_of_sixteen_and_more_do_not_change_the_bits(form: Library) -> None:
    case = Case([(37, 300)], dim=64, page_type=torch.bfloat16)
    whole = case.got(form, bf16_products=True)
    parts = []
    for begin, end in itertools.pairwise([0, 16, 146, 163, 284, 300]):
        start, lengths = torch.tensor([0, end - begin]), torch.tensor([37 + end])
        call = AttentionCall(case.table, start, lengths, case.temperature[begin:end], case.scale)
        parts.append(cpu.paged_attention_prefill(form, case.q[begin:end], case.all_pages, call, bf16_products=True))
    assert torch.equal(torch.cat(parts), whole)


def test_a_poisoned_query_and_key_harm_only_whom_they_reach(form: Library) -> None:
    case = Case([(20, 60)], dim=32, page_type=torch.float16)
    want = case.got(form, bf16_products=True)
    case.q[31, 2, 3] = torch.nan
    got = case.got(form, bf16_products=True)
    assert got[31, 2].isnan().all()
    want[31, 2] = 0.0
    assert torch.equal(got.nan_to_num(0.0), want)


@pytest.mark.parametrize("page_type", HALVES)
def test_nothing_past_the_operands_is_read(form: Library, page_type: torch.dtype) -> None:
    for dim in (5, 36, 64):
        case = Case([(9, 39)], heads=3, kv_heads=1, dim=dim, page_type=page_type)
        used = case.table[0, :3].long()
        case.pages = [at_the_end_of_memory(part[used]) for part in case.pages]
        case.wide = [part[used] for part in case.wide]
        case.table = at_the_end_of_memory(torch.arange(3, dtype=torch.int32)[None])
        case.q = at_the_end_of_memory(case.q)
        check(case, form)
