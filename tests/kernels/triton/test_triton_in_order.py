"""Attention of prompts over keys brought in order, interpreted, against float64; and which calls take it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.attention_case import AttentionCase
from kernels_helpers.interpreted import ON_THE_DEVICE, assert_near

from windlass.kernels import AttentionCall, PrefillTotals
from windlass.kernels.triton import prefill_attention
from windlass.kernels.triton.launch import Device
from windlass.kernels.triton.paged_attention import paged_attention
from windlass.kernels.triton.prefill_attention import PrefillTile

pytestmark = ON_THE_DEVICE
SHAPES = [(17, 4), (70, 1), (0, 39), (150, 70)]  # cached and new tokens; one is not a prompt
OTHER = slice(4, 5)
HOPPER = Device(132, 227 << 10, (9, 0))


def attended(case: AttentionCase, call: AttentionCall, sizes: PrefillTile) -> torch.Tensor:
    """Rows of the sequence of one token as they were: NaN."""
    out = torch.full((len(case.q), case.q.shape[1], case.all_pages.value_dim), torch.nan)
    prefill_attention.prefill_attention(case.q, case.all_pages, call, out, sizes)
    return out


CASES: dict[str, dict[str, Any]] = {
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
def test_prompts(name: str) -> None:
    options = dict(CASES[name])
    with_sinks = options.pop("sinks", False)
    case = AttentionCase(options.pop("shapes", SHAPES), **options)
    sinks = torch.randn(case.q.shape[1]) if with_sinks else None
    found = attended(case, case.call(sink_logits=sinks), PrefillTile(16, 16, 4, 2))
    assert found[OTHER].isnan().all()
    expected = case.expected(sinks)
    found[OTHER] = expected[OTHER].to(found.dtype)
    assert_near(found.double(), expected)


def test_scores_may_be_turned_round() -> None:
    """Scales below 0 make the least product the largest score."""
    case = AttentionCase(SHAPES[2:], dim=16, spread=10.0)
    case.scale = -case.scale
    assert_near(attended(case, case.call(), PrefillTile(64, 32, 4, 2)).double(), case.expected())


def test_a_block_that_is_none_shows() -> None:
    """In the rows of its sequence that see it, and nowhere else; a block of no keys does not matter."""
    case = AttentionCase([(70, 3), (20, 30)], dim=16)
    call = case.call()
    sound = attended(case, call, PrefillTile(16, 32, 4, 2))
    assert sound.isfinite().all()
    for block in (-1, case.all_pages.key.shape[0]):
        tables = call.block_tables.clone()
        tables[0, 1] = block
        tables[1, 2] = block  # keys 32 to 47, of which queries 20 to 31 see none
        found = attended(case, replace(call, block_tables=tables), PrefillTile(16, 32, 4, 2))
        assert found[:3].isnan().all() and found[3 + 12 :].isnan().all()
        assert torch.equal(found[3 : 3 + 12], sound[3 : 3 + 12])


def test_calls_that_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
    )  # rows, heads of keys, a key and a value
    assert prefill_attention.takes_prefill(q, pages, known, HOPPER)
    monkeypatch.setattr(prefill_attention, "MOST_BYTES", prefill_attention.MOST_BYTES - 1)
    assert not prefill_attention.takes_prefill(q, pages, known, HOPPER)


def test_prompts_beside_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host knows of prompts decides, and is all that they take; streams of one token come before and between them."""
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


def test_it_is_part_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with a sequence of one token, in one call."""
    monkeypatch.setattr(prefill_attention, "_LEAST_TOKENS", 1)
    case = AttentionCase(SHAPES, dim=32, q_type=torch.float16, page_type=torch.float16)
    taken = list[int]()
    real = prefill_attention.prefill_attention
    monkeypatch.setattr(prefill_attention, "prefill_attention", lambda *given: taken.append(1) or real(*given))
    found = paged_attention(case.q, case.all_pages, case.call(), device=HOPPER)
    assert_near(found.double(), case.expected(), 2e-3)
    assert taken
