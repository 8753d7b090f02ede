"""Triton's paged attention, interpreted, against float64: decode in splits, prompts in tiles or gathered, and key ranges."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.attention_case import AttentionCase, decode_call
from helpers.ranges import Part, RangeCase, random_parts
from kernels_helpers.interpreted import ON_THE_DEVICE, assert_near

from windlass.kernels import AttentionCall, PrefillTotals
from windlass.kernels.triton import paged_attention as attention
from windlass.kernels.triton import prefill_attention
from windlass.kernels.triton.launch import Device
from windlass.kernels.triton.paged_attention import paged_attention
from windlass.kernels.triton.prefill_attention import PrefillTile

pytestmark = ON_THE_DEVICE
MIXED = [(17, 4), (0, 9), (70, 1)]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8 pages, a cap": {"page_type": torch.int8, "soft_cap": 2.0},
    "float16 pages": {"page_type": torch.float16},
    "float8 pages": {"page_type": torch.float8_e4m3fn, "window": 20},
    "a window and sinks": {"window": 7, "sinks": True},
    "chunks": {"chunk": 6, "page_type": torch.bfloat16},
    "both ways": {"causal": False},
    "odd heads": {"heads": 6, "kv_heads": 2, "dim": 24, "value_dim": 40},
    "more heads than rows of a tile": {"heads": 40, "kv_heads": 1, "dim": 16},
    "heads of 512 numbers": {"heads": 8, "kv_heads": 2, "dim": 512, "page_type": torch.int8},
    "one head of keys for many": {"heads": 20, "kv_heads": 1, "dim": 40, "window": 9},
}
DIMS, GROUPS = (64, 80, 96, 128, 256, 512), (1, 3, 4, 8, 16)
PROMPT_SHAPES = [(17, 4), (70, 1), (0, 39), (150, 70)]  # cached and new tokens; one is not a prompt
SINGLE_TOKEN = slice(4, 5)
HOPPER = Device(132, 227 << 10, (9, 0))
PROMPT_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8 pages": {"page_type": torch.int8},
    "float8 pages and a window": {"page_type": torch.float8_e4m3fn, "window": 20},
    "a narrow window and sinks": {"window": 7, "sinks": True},
    "chunks": {"chunk": 6, "page_type": torch.bfloat16},
    "long chunks": {"chunk": 50},
    "both ways": {"causal": False},
    "both ways in a window": {"causal": False, "window": 9},
    "odd heads": {"heads": 6, "kv_heads": 2, "dim": 24, "value_dim": 40},
    "more heads than rows of a tile": {"heads": 40, "kv_heads": 1, "dim": 16, "shapes": [(17, 4), (70, 1), (0, 9)]},
    "large blocks": {"block_size": 128, "window": 90},
}


@pytest.mark.parametrize("name", CASES)
def test_decode_and_prompts_in_one_call(name: str) -> None:
    options = dict(CASES[name])
    cap, with_sinks = options.pop("soft_cap", None), options.pop("sinks", False)
    case = AttentionCase(MIXED, **options)
    sinks = torch.randn(case.q.shape[1]) if with_sinks else None
    found = paged_attention(case.q, case.all_pages, case.call(soft_cap=cap, sink_logits=sinks))
    assert_near(found.double(), case.expected(sinks, cap))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_deterministic_calls(name: str) -> None:
    options = dict(CASES[name])
    cap, with_sinks = options.pop("soft_cap", None), options.pop("sinks", False)
    case = AttentionCase(MIXED, **options)
    sinks = torch.randn(case.q.shape[1]) if with_sinks else None
    call = case.call(soft_cap=cap, sink_logits=sinks)
    assert_near(paged_attention(case.q, case.all_pages, call, deterministic=True).double(), case.expected(sinks, cap))


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_sizes_of_models(dim: int, group: int) -> None:
    """Single tokens and prompts that end at, before and after the end of a page, and a prompt without cached tokens.

    Every size and every group meets both ways, the next one the other.
    """
    shapes = [(15, 1), (16, 1), (31, 2), (0, 16), (14, 5), (0, 1)]
    case = AttentionCase(shapes, dim=dim, heads=group, kv_heads=1, page_type=torch.float16)
    deterministic = bool((DIMS.index(dim) + GROUPS.index(group)) % 2)
    found = paged_attention(case.q, case.all_pages, case.call(), deterministic=deterministic)
    assert_near(found.double(), case.expected())


def test_long_contexts_are_split_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_LEAST_SPLIT", 64)
    case = AttentionCase([(299, 1), (3, 1), (64, 1)], heads=2, kv_heads=1, dim=16)
    sinks = torch.randn(2)
    for processors in (1, 132):  # few splits and many
        call = case.call(sink_logits=sinks)
        assert_near(
            paged_attention(case.q, case.all_pages, call, device=Device(processors)).double(), case.expected(sinks)
        )


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_any_ranges(seed: int) -> None:
    torch.manual_seed(seed)
    rng, shapes = random.Random(seed), [(50, 1), (20, 7), (0, 3)]
    parts = [random_parts(old, new, 5, rng) for old, new in shapes]
    page_type = (torch.int8, torch.float32, torch.float16)[seed]
    case = RangeCase(shapes, parts, page_type=page_type, sinks=torch.randn(4), soft_cap=2.0 if seed else None)
    case.slopes = torch.tensor([0.02, 0.005, 0.001, 0.0])
    for deterministic in (False, True)[: 2 if seed else 1]:
        found = paged_attention(*case.operands(), deterministic=deterministic)
        assert_near(found.double(), case.expected(), 1e-5)


@pytest.mark.parametrize("page_type", [torch.float16, torch.int8], ids=str)
def test_heads_of_512_in_16_bit_tiles(page_type: torch.dtype) -> None:
    case = AttentionCase([(17, 9), (20, 1)], heads=8, kv_heads=1, dim=512, q_type=torch.float16, page_type=page_type)
    assert_near(paged_attention(case.q, case.all_pages, case.call()).double(), case.expected(), 2e-3)


def test_ranges_of_heads_of_512_with_partial_rotation() -> None:
    rng, shapes = random.Random(1), [(20, 1), (10, 3)]
    parts = [random_parts(old, new, 3, rng) for old, new in shapes]
    sizes = {"heads": 4, "kv_heads": 1, "dim": 512, "value_dim": 512, "pairs": 256, "still": 192}
    case = RangeCase(shapes, parts, page_type=torch.int8, **sizes)
    for deterministic in (False, True):
        found = paged_attention(*case.operands(), deterministic=deterministic)
        assert_near(found.double(), case.expected(), 1e-5)


def test_a_row_has_the_same_bits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row does not depend on other sequences, or on being computed in a prompt or alone."""
    monkeypatch.setattr(attention, "KEY_SPLIT", 64)  # two splits for one sequence, one for the other
    case = AttentionCase([(15, 3), (70, 1)], heads=2, kv_heads=1, dim=16)
    call = case.call(sink_logits=torch.randn(2))
    whole = paged_attention(case.q, case.all_pages, call, deterministic=True)
    for rows, length, own in call.sequences():
        narrow = replace(own, block_tables=own.block_tables[:, : -(-length // 16)])
        assert torch.equal(paged_attention(case.q[rows], case.all_pages, narrow, deterministic=True), whole[rows])
    rows, _, own = next(call.sequences())
    last = own.slice_tokens(2, 3)
    assert torch.equal(paged_attention(case.q[2:3], case.all_pages, last, deterministic=True)[0], whole[2])


@pytest.mark.parametrize("ranged", [False, True])
def test_deterministic_calls_need_little_memory(ranged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are computed in parts with unchanged bits, also with key ranges and with sequences without new tokens."""
    monkeypatch.setattr(attention, "KEY_SPLIT", 64)
    if ranged:
        shapes = [(50, 1), (20, 7), (0, 3)]
        parts = [random_parts(old, new, 3, random.Random(1)) for old, new in shapes]
        q, pages, call = RangeCase(shapes, parts).operands()
    else:
        case = AttentionCase([(15, 3), (70, 0), (9, 15), (9, 1)], heads=2, kv_heads=1, dim=16)
        q, pages, call = case.q, case.all_pages, case.call(sink_logits=torch.randn(2))
    whole = paged_attention(q, pages, call, deterministic=True)
    splits = -(-call.block_tables.shape[1] * pages.block_size // 64)
    each = whole.shape[1] * splits * (pages.value_dim + 2) * 4
    empty, sizes = torch.empty, list[int]()

    def watched(*given: Any, **named: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*given, **named)
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", watched)
    for at_once in (4,) if ranged else (17, 4):
        monkeypatch.setattr(attention, "_MOST_SUMS", at_once * each)
        assert torch.equal(paged_attention(q, pages, call, deterministic=True), whole)
        assert sum(sizes) <= at_once * each < len(whole) * each
        sizes.clear()


def test_keys_moved_by_whole_splits_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retained keys precede them, as after a window has dropped the keys in between."""
    monkeypatch.setattr(attention, "KEY_SPLIT", 64)
    q, pages, call = RangeCase([(330, 1)], [[Part(10), Part(64, hole=True), Part(400)]]).operands()
    stay = paged_attention(q, pages, call, deterministic=True)
    assert call.ranges is not None
    for cuts in (1, 2, 7):
        between = call.block_tables.new_full((1, 4 * cuts), -1)
        moved = replace(
            call,
            block_tables=torch.cat((call.block_tables[:, :4], between, call.block_tables[:, 4:]), 1),
            seq_lens=call.seq_lens + 64 * cuts,
            ranges=replace(call.ranges, ends=call.ranges.ends + torch.tensor([0, 64 * cuts, 64 * cuts])),
        )
        assert torch.equal(paged_attention(q, pages, moved, deterministic=True), stay)


def test_invalid_blocks_and_rows_give_nan() -> None:
    """Invalid blocks and rows of q give NaN, and no memory is read at their addresses."""
    q, pages, call = RangeCase([(30, 3), (5, 1)], [[Part(10), Part(33, shift=3)], [Part(6)]]).operands()
    sound = paged_attention(q, pages, call)
    assert sound.isfinite().all()
    assert call.ranges is not None
    for row in (len(q) - 2, len(q), -2):
        rows = call.ranges.rows.clone()
        rows[0, 0] = row
        found = paged_attention(q, pages, replace(call, ranges=replace(call.ranges, rows=rows)))
        assert found[2].isnan().all() and torch.equal(found[3], sound[3])
    for block in (-1, pages.key.shape[0]):
        tables = call.block_tables.clone()
        tables[1, 0] = block
        found = paged_attention(q, pages, replace(call, block_tables=tables))
        assert found[3].isnan().all() and torch.equal(found[:3], sound[:3])
    with pytest.raises(ValueError, match="rows for"):
        paged_attention(q[:2], pages, call)


@pytest.mark.parametrize("options", [{}, {"page_type": torch.int8}, {"soft_cap": 2.0}], ids=["plain", "int8", "a cap"])
def test_nan_scales_affect_their_row_and_others_may_be_any_number(options: dict[str, Any]) -> None:
    """Scales of NaN, zero and below, for prompts and single tokens."""
    cap = options.pop("soft_cap", None)
    case = AttentionCase(MIXED, **options)
    case.temperature[[0, 3, 13]] = torch.tensor([0.0, -0.7, -1.1])
    call, expected = case.call(soft_cap=cap), case.expected(soft_cap=cap)
    for deterministic in (False, True):
        found = paged_attention(case.q, case.all_pages, call, deterministic=deterministic)
        assert_near(found.double(), expected, 1e-5)
    case.temperature[5] = torch.nan
    for deterministic in (False, True):
        found = paged_attention(case.q, case.all_pages, case.call(soft_cap=cap), deterministic=deterministic)
        assert found[5].isnan().all() and found.isnan().any(-1).any(-1).sum() == 1


def test_an_invalid_block_among_others_gives_nan() -> None:
    """The block is in a tile that is entirely visible, of a prompt or a single token."""
    case = AttentionCase([(70, 3), (80, 1)], dim=16)
    call = case.call()
    sound = paged_attention(case.q, case.all_pages, call)
    for sequence, rows in ((0, slice(0, 3)), (1, slice(3, 4))):
        tables = call.block_tables.clone()
        tables[sequence, 1] = case.all_pages.key.shape[0]
        found = paged_attention(case.q, case.all_pages, replace(call, block_tables=tables))
        assert found[rows].isnan().all()
        found[rows] = sound[rows]
        assert torch.equal(found, sound)


def test_negative_scales() -> None:
    """A negative scale makes the smallest product the largest score."""
    case = AttentionCase([(70, 3), (80, 1)], dim=16, spread=40.0)
    case.scale = -case.scale
    assert_near(paged_attention(case.q, case.all_pages, case.call()).double(), case.expected())


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    """A tile of keys has several blocks, one block, or a part of a block."""
    case = AttentionCase([(130, 3), (200, 1)], dim=16, block_size=block_size, window=90)
    for deterministic in (False, True):
        found = paged_attention(case.q, case.all_pages, case.call(), deterministic=deterministic)
        assert_near(found.double(), case.expected())


def test_empty_batches_and_sequences() -> None:
    """A batch without sequences, and a sequence without keys."""
    case = AttentionCase([(3, 2)], dim=16)
    empty = AttentionCall(case.table[:0], torch.zeros(1).long(), case.lengths[:0], case.temperature[:0], 1.0)
    assert paged_attention(case.q[:0], case.all_pages, empty).shape == (0, 4, 16)
    none = decode_call(case.table, torch.zeros(1).long(), torch.ones(1), 1.0)
    assert torch.equal(paged_attention(case.q[:1], case.all_pages, none), torch.zeros(1, 4, 16))


# -- prompts over gathered keys --------------------------------------------------------------------------------------


def attended(case: AttentionCase, call: AttentionCall, sizes: PrefillTile) -> torch.Tensor:
    """Return the output, in which the row of the sequence with one token is still NaN."""
    out = torch.full((len(case.q), case.q.shape[1], case.all_pages.value_dim), torch.nan)
    prefill_attention.prefill_attention(case.q, case.all_pages, call, out, sizes)
    return out


@pytest.mark.parametrize("name", PROMPT_CASES)
def test_gathered_prompts(name: str) -> None:
    options = dict(PROMPT_CASES[name])
    with_sinks = options.pop("sinks", False)
    case = AttentionCase(options.pop("shapes", PROMPT_SHAPES), **options)
    sinks = torch.randn(case.q.shape[1]) if with_sinks else None
    found = attended(case, case.call(sink_logits=sinks), PrefillTile(16, 16, 4, 2))
    assert found[SINGLE_TOKEN].isnan().all()
    expected = case.expected(sinks)
    found[SINGLE_TOKEN] = expected[SINGLE_TOKEN].to(found.dtype)
    assert_near(found.double(), expected)


def test_negative_scales_of_gathered_prompts() -> None:
    """A negative scale makes the smallest product the largest score."""
    case = AttentionCase(PROMPT_SHAPES[2:], dim=16, spread=10.0)
    case.scale = -case.scale
    assert_near(attended(case, case.call(), PrefillTile(64, 32, 4, 2)).double(), case.expected())


def test_an_invalid_block_of_gathered_prompts_gives_nan() -> None:
    """Only rows that see the block are affected. A block without visible keys has no effect."""
    case = AttentionCase([(70, 3), (20, 30)], dim=16)
    call = case.call()
    sound = attended(case, call, PrefillTile(16, 32, 4, 2))
    assert sound.isfinite().all()
    for block in (-1, case.all_pages.key.shape[0]):
        tables = call.block_tables.clone()
        tables[0, 1] = block
        tables[1, 2] = block  # keys 32 to 47, invisible to queries 20 to 31
        found = attended(case, replace(call, block_tables=tables), PrefillTile(16, 32, 4, 2))
        assert found[:3].isnan().all() and found[3 + 12 :].isnan().all()
        assert torch.equal(found[3 : 3 + 12], sound[3 : 3 + 12])


def test_calls_that_gather_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many new tokens of 16 bits on Hopper, without a soft cap or bias, and with memory for gathered keys and values."""
    case = AttentionCase([(3, 130), (0, 140)], q_type=torch.float16, page_type=torch.float16)
    q, pages, call = case.q, case.all_pages, case.call()
    assert prefill_attention.takes_prefill(q, pages, call, HOPPER)
    assert not prefill_attention.takes_prefill(q.float(), pages, call, HOPPER)
    assert not prefill_attention.takes_prefill(q, pages, replace(call, soft_cap=3.0), HOPPER)
    for capability in ((8, 0), (8, 9), (12, 0)):
        assert not prefill_attention.takes_prefill(q, pages, call, HOPPER._replace(capability=capability))
    short = AttentionCase([(3, 130), (0, 100)], q_type=torch.float16)
    assert not prefill_attention.takes_prefill(short.q, short.all_pages, short.call(), HOPPER)
    wide = AttentionCase([(3, 130)], q_type=torch.float16, dim=136)
    assert not prefill_attention.takes_prefill(wide.q, wide.all_pages, wide.call(), HOPPER)
    known = replace(call, prompts=PrefillTotals(2, 270, 273))
    monkeypatch.setattr(
        prefill_attention, "MOST_BYTES", 4 * 128 * 2 * (64 + 64) * 2
    )  # rows, key heads, a key and a value
    assert prefill_attention.takes_prefill(q, pages, known, HOPPER)
    monkeypatch.setattr(prefill_attention, "MOST_BYTES", prefill_attention.MOST_BYTES - 1)
    assert not prefill_attention.takes_prefill(q, pages, known, HOPPER)


def test_gathered_prompts_with_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known totals of prompts decide, and limit the memory. Streams precede and separate the prompts."""
    monkeypatch.setattr(prefill_attention, "_LEAST_TOKENS", 20)
    shapes = [(9, 1)] * 66 + [(3, 40), (5, 1), (140, 20)]
    case = AttentionCase(shapes, heads=2, kv_heads=1, dim=16, q_type=torch.float16)
    q, pages, call = case.q, case.all_pages, case.call()
    known = replace(call, prompts=PrefillTotals(2, 60, 203))
    assert prefill_attention.takes_prefill(q, pages, known, HOPPER) and not prefill_attention.takes_prefill(
        q, pages, call, HOPPER
    )
    out = torch.full((len(q), 2, 16), torch.nan)
    prefill_attention.prefill_attention(q.float(), pages, known, out, PrefillTile(16, 16, 4, 2))
    prompts = torch.tensor([new > 1 for _, new in shapes for _ in range(new)])
    assert_near(out[prompts].double(), case.expected()[prompts])
    assert out[~prompts].isnan().all()


def test_attention_gathers_keys_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call contains prompts and a sequence of one token."""
    monkeypatch.setattr(prefill_attention, "_LEAST_TOKENS", 1)
    case = AttentionCase(PROMPT_SHAPES, dim=32, q_type=torch.float16, page_type=torch.float16)
    taken = list[int]()
    real = prefill_attention.prefill_attention
    monkeypatch.setattr(prefill_attention, "prefill_attention", lambda *given: taken.append(1) or real(*given))
    found = paged_attention(case.q, case.all_pages, case.call(), device=HOPPER)
    assert_near(found.double(), case.expected(), 2e-3)
    assert taken
