"""Compiled draws equal those of plain torch for mixed batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from windlass.engine.interface.request import DryParams, SamplingParams
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.sampling.sampler import Sampler
from windlass.kernels import cpu, select_backend
from windlass.kernels.backend import BackendOptions
from windlass.kernels.cpu.elementwise_bindings import MAX_VOCAB, CompiledSampler
from windlass.kernels.torch.torch_backend import TorchBackend
from windlass.kernels.torch.torch_sampler import TorchSampler


@pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="nothing is drawn by compiled kernels")
def test_unsupported_draws_use_torch() -> None:
    assert isinstance(select_backend("cpu").token_sampler(MAX_VOCAB), CompiledSampler)
    assert isinstance(select_backend("cpu").token_sampler(MAX_VOCAB + 1), TorchSampler)
    assert isinstance(select_backend("meta").token_sampler(100), TorchSampler)


@pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="it compares with compiled draws")
def test_mixed_batches_draw_the_same_with_and_without_the_compiled_draw() -> None:
    """Compare requests of every kind in batches that change from step to step with each request alone."""
    rng = np.random.default_rng(1)
    variety: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 20, "min_p": 0.01, "logprobs": 2},
        {"typical_p": 0.8, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1},
        {"logit_bias": {3: 2.5, 40: -100.0}, "top_p": 0.5},
        {"allowed_token_ids": (1, 5, 9, 300), "temperature": 2.0},
        {"bad_words": ((7,), (5, 9), (9, 9, 1)), "temperature": 3.0, "frequency_penalty": -1.5},
        {"min_tokens": 6, "top_k": 5},
        {"temperature": 1.7},
        {"temperature": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05, "top_p": 0.95},
        {"temperature": 2.0, "repeats": DryParams(4.0, 1.75, 0, 20), "repetition_penalty": 1.2},
    ]
    vocab, stops = 417, tuple(range(0, 400, 2))
    compiled, plain_torch = select_backend("cpu"), TorchBackend(BackendOptions(torch.device("cpu")))
    fast, plain = Sampler(vocab, compiled), Sampler(vocab, plain_torch)
    slots = [
        SampleSlot(
            i,
            i % 2,
            SamplingParams(**v),
            100 + i,
            4,
            [int(t) for t in rng.integers(0, vocab, 4)],
            stops if i == 8 else (),
        )
        for i, v in enumerate(variety * 2)
    ]
    for step in range(30):
        chosen = [one for one in slots if rng.random() < 0.7] or slots
        logits = 3 * torch.randn(len(chosen), vocab, generator=torch.Generator().manual_seed(step))
        if step % 5 == 0:
            logits[0, 3] = math.nan
        rows = [int(r) for r in rng.permutation(len(chosen))]
        pairs = list(zip(rows, chosen, strict=True))
        got = fast.sample(logits, pairs)
        want = plain.sample(logits, pairs)
        assert [(d.token_id, str(d.error)) for d in got] == [(d.token_id, str(d.error)) for d in want]
        for d, other in zip(got, want, strict=True):
            assert (d.logprobs is None) == (other.logprobs is None)
            if d.logprobs is not None and other.logprobs is not None:
                assert [token for token, _ in d.logprobs.top] == [token for token, _ in other.logprobs.top]
                assert d.logprobs.rank == other.logprobs.rank
                assert d.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
        for (row, one), d in zip(pairs, got, strict=True):
            assert Sampler(vocab, compiled).sample(logits[row : row + 1], [(0, one)])[0].token_id == d.token_id
            if d.error is None:
                one.token_ids.append(d.token_id)
        if step == 15:
            for sampler in (fast, plain):
                for seq_id in (3, *range(15, len(slots))):
                    sampler.forget(seq_id)
