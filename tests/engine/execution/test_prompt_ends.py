"""With 8-bit rows, in the default modes, a prompt gives the same bits with and without cached blocks, and in any chunks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device import ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run
from helpers.marks import slow_after, slow_but
from helpers.tiny_models import make_model

import windlass
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.scheduling.chunked_prefill import NO_BOUNDARIES, ChunkBoundaries, split_prefill_budget
from windlass.kernels.cpu import library

DEMO = Path(windlass.__file__).parent / "models" / "demo"
BLOCK = 16

needs_kernels = pytest.mark.skipif(
    library.unavailable_reason() is not None, reason="plain torch rounds no rows to 8 bits"
)
# This backend multiplies many rows differently from few.
no_matrix_unit = pytest.mark.skipif(
    library.unavailable_reason() is None and library.load().linear_blocks_amx is not None,
    reason="the processor's matrix unit rounds many rows",
)


def core_of(model: Path, **options: Any) -> EngineCore:
    return make_core(model, **{"max_model_len": 512, "quantization": "int8", **options})


def prompt(length: int) -> list[int]:
    return torch.randint(3, 120, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def logits(core: EngineCore, tokens: list[int]) -> tuple[torch.Tensor, int]:
    """Logits of four tokens after a prompt, and the number of cached tokens."""
    found = run(core, [greedy("a", tokens, 4)])["a", 0]
    return torch.stack(found.logits), found.outputs[0].cached_tokens


@ON_A_CPU
@needs_kernels
@no_matrix_unit
@pytest.mark.parametrize("model", slow_but(["demo", "gemma3", "qwen3"], "gemma3"))
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
@pytest.mark.parametrize("budget", slow_after(1, [61, 40, 100]))
def test_a_chunked_prompt_next_to_streams_gives_the_same_bits(budget: int) -> None:
    tokens = prompt(150)
    right, _ = logits(core_of(DEMO), tokens)
    core = core_of(DEMO, max_num_batched_tokens=budget)
    sent = [greedy("stream", prompt(20), 40), greedy("another", prompt(33), 60), greedy("a", tokens, 4)]
    assert torch.equal(torch.stack(run(core, sent)["a", 0].logits), right)


@ON_A_CPU
@needs_kernels
@no_matrix_unit
def test_verified_proposals_give_the_same_bits() -> None:
    tokens = prompt(40) * 3
    sent = [greedy("a", tokens, 60, logprobs=3)]
    right = run(core_of(DEMO), sent)["a", 0]
    core = core_of(DEMO, speculative_ngram=4, speculative_ngram_min=1)
    got = run(core, sent, every_logit=False)["a", 0]
    assert core.scheduler.counters.spec_decode_num_accepted_tokens > 0
    assert got.token_ids == right.token_ids
    assert logprobs_of(got) == logprobs_of(right)


def logprobs_of(found: Finished) -> list[object]:
    return [each for output in found.outputs for each in output.logprobs or ()]


CUTS = ChunkBoundaries(min_tokens=16, block_size=BLOCK)


@pytest.mark.parametrize(
    ("start", "due", "tokens", "taken"),
    [
        (0, 100, 40, 40),
        (5, 95, 20, 20),
        (0, 100, 100, 100),
        (0, 100, 99, 96),  # the end is one part
        (0, 100, 90, 80),  # without a short part before it
        (0, 40, 31, 16),
        (5, 31, 26, 0),  # two parts would be too short
        (0, 100, 15, 0),
        (0, 10, 10, 10),
        (96, 4, 3, 0),
    ],
)
def test_chunks_have_a_minimum_length(start: int, due: int, tokens: int, taken: int) -> None:
    assert CUTS.max_chunk(start, due, tokens) == taken
    assert NO_BOUNDARIES.max_chunk(start, due, tokens) == min(due, tokens)


def test_the_prefill_budget_is_used_up_to_two_short_chunks() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        count, budget = rng.randrange(1, 9), rng.randrange(1, 200)
        needs, starts = ([rng.randrange(low, 300) for _ in range(count)] for low in (1, 0))
        grants = split_prefill_budget(needs, budget, starts, CUTS)
        left = budget - sum(grants)
        assert (
            grants[0] > 0 and left >= 0 and all(0 <= grant <= need for grant, need in zip(grants, needs, strict=True))
        )
        if budget < CUTS.min_tokens * min(count, 2):
            assert grants == split_prefill_budget(needs, budget)
        elif grants != needs:
            assert left < 2 * CUTS.min_tokens


def test_any_chunks_of_a_prompt_have_the_same_segments() -> None:
    """For any limits and other requests, as long as two chunks fit into a step."""
    rng = random.Random(2)
    for _ in range(500):
        lengths = [rng.randrange(2, 300) for _ in range(rng.randrange(1, 6))]
        starts, seen = [rng.randrange(length) // BLOCK * BLOCK for length in lengths], []
        while any(start < length for start, length in zip(starts, lengths, strict=True)):
            live = [i for i, length in enumerate(lengths) if starts[i] < length]
            needs = [lengths[i] - starts[i] for i in live]
            grants = split_prefill_budget(needs, rng.randrange(32, 150), [starts[i] for i in live], CUTS)
            for i, grant in zip(live, grants, strict=True):
                if grant:
                    seen += [(i, *part) for part in _parts(starts[i], grant, lengths[i])]
                starts[i] += grant
        for i, first, count in seen:
            end = CUTS.tail_start(lengths[i])
            assert (first == end and first + count == lengths[i]) or (first + count <= end and count >= CUTS.min_tokens)


def _parts(start: int, count: int, known: int) -> list[tuple[int, int]]:
    return CUTS.attention_segments(start, count, known) if start + count == known else [(start, count)]
