"""With rows of 8 bits, in the default modes, a prompt gives the same bits whether its beginning was cached, and in any chunks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device import ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run
from helpers.tiny_models import make_model

import windlass
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.scheduling.step_timer import StepTimer, deal_prefill_tokens
from windlass.kernels.cpu import library

DEMO = Path(windlass.__file__).parent / "models" / "demo"
BLOCK = 16

needs_kernels = pytest.mark.skipif(
    library.unavailable_reason() is not None, reason="plain torch rounds no rows to 8 bits"
)
# It multiplies many rows otherwise than few, which is as it was.
no_matrix_unit = pytest.mark.skipif(
    library.unavailable_reason() is None and library.load().linear_blocks_rounded is not None,
    reason="the processor's matrix unit rounds many rows",
)


def core_of(model: Path, **options: Any) -> EngineCore:
    return make_core(model, **{"max_model_len": 512, "quantization": "int8", **options})


def prompt(length: int) -> list[int]:
    return torch.randint(3, 120, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def logits(core: EngineCore, tokens: list[int]) -> tuple[torch.Tensor, int]:
    """Of four tokens behind a prompt; and how much of that was cached."""
    found = run(core, [greedy("a", tokens, 4)])["a", 0]
    return torch.stack(found.logits), found.outputs[0].cached_tokens


@ON_A_CPU
@needs_kernels
@no_matrix_unit
@pytest.mark.parametrize("model", ["demo", "gemma3", "qwen3"])
@pytest.mark.parametrize("pages", ["auto", "int8"])
def test_a_prompt_sent_twice_gives_the_same_bits(model: str, pages: str, tmp_path: Path) -> None:
    core = core_of(DEMO if model == "demo" else make_model(model, tmp_path / "model"), kv_cache_dtype=pages)
    for length in (17, 18, 31, 32, 33, 40, 64, 65, 200):
        first, cached = logits(core, prompt(length))
        assert cached == 0
        second, cached = logits(core, prompt(length))
        assert cached == (length - 1) // BLOCK * BLOCK
        assert torch.equal(first, second), length


@ON_A_CPU
@needs_kernels
@no_matrix_unit
@pytest.mark.parametrize("budget", [40, 100])
def test_a_prompt_cut_into_chunks_beside_streams_gives_the_same_bits(budget: int) -> None:
    tokens = prompt(150)
    right, _ = logits(core_of(DEMO), tokens)
    core = core_of(DEMO, max_num_batched_tokens=budget)
    sent = [greedy("stream", prompt(20), 40), greedy("another", prompt(33), 60), greedy("a", tokens, 4)]
    assert torch.equal(torch.stack(run(core, sent)["a", 0].logits), right)


@ON_A_CPU
@needs_kernels
@no_matrix_unit
def test_checked_proposals_give_the_same_bits() -> None:
    tokens = prompt(40) * 3
    sent = [greedy("a", tokens, 60, logprobs=3)]
    right = run(core_of(DEMO), sent)["a", 0]
    core = core_of(DEMO, speculative_ngram=4, speculative_ngram_min=1)
    got = run(core, sent, every_logit=False)["a", 0]
    assert core.scheduler.counters.spec_decode_num_accepted_tokens > 0
    assert got.token_ids == right.token_ids
    assert _said(got) == _said(right)


def _said(found: Finished) -> list[object]:
    return [each for output in found.outputs for each in output.logprobs or ()]


@pytest.mark.parametrize(
    ("needs", "starts", "budget", "grants"),
    [
        ([100], [0], 40, [32]),  # to the end of a block
        ([68], [32], 68, [68]),  # to the end of the sequence
        ([95], [5], 40, [27]),
        ([95], [5], 12, [12]),  # where a step may not take a block, as far as it may
        ([100, 100], [0, 0], 31, [16, 0]),
        ([100, 50, 3], [0, 0, 0], 40, [32, 0, 3]),  # the best-ranked one has half at least
        ([100, 20, 3], [0, 0, 0], 60, [32, 20, 3]),
        ([100, 50, 300], [0, 16, 0], 64, [32, 32, 0]),
    ],
)
def test_chunks_end_with_blocks(needs: list[int], starts: list[int], budget: int, grants: list[int]) -> None:
    assert deal_prefill_tokens(needs, budget, starts, BLOCK) == grants


def test_what_steps_may_take_is_dealt_out_but_for_less_than_a_block() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        count, budget = rng.randrange(1, 9), rng.randrange(1, 200)
        needs, starts = ([rng.randrange(low, 300) for _ in range(count)] for low in (1, 0))
        grants = deal_prefill_tokens(needs, budget, starts, BLOCK)
        left = budget - sum(grants)
        assert (
            grants[0] > 0 and left >= 0 and all(0 <= grant <= need for grant, need in zip(grants, needs, strict=True))
        )
        if grants != needs:
            assert left < (BLOCK if budget >= BLOCK else 1)
        for start, grant, need in zip(starts, grants, needs, strict=True):
            assert grant in (0, need) or (start + grant) % BLOCK == 0 or budget < BLOCK


def test_a_limit_is_told_in_blocks() -> None:
    timer = StepTimer(0.25, 2048, BLOCK)
    assert timer.limit(1) == 64
    told = []
    for _ in range(20):
        timer.observe(timer.limit(1) + 1, 1, 0.35)
        told.append(timer.limit(1))
    assert any(limit > BLOCK for limit in told) and all(limit < BLOCK or limit % BLOCK == 0 for limit in told)
    assert told[-1] == 4
