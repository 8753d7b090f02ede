"""Requests with every option that affects sampling, and comparison of two engines' answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cache_invariants import assert_consistent
from helpers.engines import Finished, greedy, run
from helpers.tiny_models import make_model

import windlass
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.request import DryParams, EngineRequest

DEMO = Path(windlass.__file__).parent / "models" / "demo"
Results = dict[tuple[str, int], Finished]
ALIKE = ("llama", "qwen3")  # all layers are equal: two are sufficient


def small_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that creates the directory of a model on first use: a family trained on 64 tokens, or the bundled one."""
    made: dict[str, Path] = {"demo": DEMO}

    def get(model: str) -> Path:
        if model not in made:
            layers = {"num_hidden_layers": 2} if model in ALIKE else {}
            made[model] = make_model(model, tmp_path_factory.mktemp(model), max_position_embeddings=64, **layers)
        return made[model]

    return get


def prompt(seed: int, length: int, vocab: int = 128, period: int | None = None) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, vocab, (period or length,), generator=generator).tolist()
    return (tokens * length)[:length]


def traffic(vocab: int = 128) -> list[EngineRequest]:
    """Return prompts with and without repetition, with every option that affects sampling or ends a sample."""
    fields: list[dict[str, Any]] = [
        {},
        {"logprobs": 3},
        {"repetition_penalty": 1.2, "logprobs": 0},
        {"presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"repeats": DryParams(1.0, 1.3, 2), "logprobs": 0},
        {"temperature": 0.7, "seed": 5, "xtc_probability": 0.4, "xtc_threshold": 0.05},
        {"logit_bias": {5: 2.0, 9: -3.0}},
        {"allowed_token_ids": tuple(range(20, 40))},
        {"bad_words": ((30,), (31, 32))},
        {"temperature": 0.4, "seed": 7, "n": 3, "logprobs": 1},
        {"temperature": 1.0, "seed": 8, "top_k": 4, "top_p": 0.9},
        {"stop_token_ids": tuple(range(40, 60)), "min_tokens": 9},
        {"ignore_eos": False, "min_tokens": 3},
        {"prompt_logprobs": 1},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"n": 2},
        {"cache_salt": "s", "priority": -1},
    ]
    return [
        greedy(f"{i}", prompt(i, 9 + 4 * i, vocab, period=None if i % 3 else 5), **{"max_tokens": 30, **given})
        for i, given in enumerate(fields)
    ]


def same(got: Results, want: Results, tolerance: float = 1e-5) -> None:
    """Compare tokens and finish reasons exactly, and log-probabilities up to the rounding of different batch sizes."""
    assert got.keys() == want.keys()
    for key, wanted in want.items():
        found = got[key]
        assert found.token_ids == wanted.token_ids, key
        assert found.finish_reason == wanted.finish_reason
        assert found.outputs[-1].stop_token_id == wanted.outputs[-1].stop_token_id
        entries = [entry for output in found.outputs for entry in output.logprobs or ()]
        wanted_entries = [entry for output in wanted.outputs for entry in output.logprobs or ()]
        assert [e.token_id for e in entries] == [e.token_id for e in wanted_entries]
        for entry, other in zip(entries, wanted_entries, strict=True):
            assert entry.rank == other.rank
            assert entry.logprob == pytest.approx(other.logprob, rel=tolerance, abs=tolerance)
            assert [t for t, _ in entry.top] == [t for t, _ in other.top]
        for mine, theirs in zip(found.logits, wanted.logits, strict=False):
            assert float((mine - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


def run_checked(core: EngineCore, sent: list[EngineRequest], *, every_logit: bool = True) -> Results:
    """Run like `run`, with the invariants checked after every step."""
    step = core.step

    def checked() -> Any:
        outputs = step()
        assert_consistent(core.blocks, (seq.cache for seq in core.scheduler.live_sequences()))
        return outputs

    core.step = checked  # type: ignore[method-assign]
    return run(core, sent, every_logit=every_logit)
