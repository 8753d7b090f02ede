"""Dynamic frequencies depend on the length of the request, not on the batch, a chunk, another request or the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines import Finished, greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from windlass.engine.model.families.spec_reader import read_rotary_groups
from windlass.engine.rotary.rope_scaling import RopeScaling, resolve

M = 64  # the trained length of the models here
DYNAMIC = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 4.0})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=M)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def uncached(directory: Path, n: float, tokens: list[int]) -> torch.Tensor:
    """Return the logits of transformers with its dynamic frequencies of length n, in one pass."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=M)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=n)
    model = Reference(directory, [resolve(RopeScaling(), read_rotary_groups(config.to_dict())[0].base, 1)], ["x"])

    def rotary(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = position_ids[..., None].double() * inv_freq.double()
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().float(), angle.sin().float()

    model.model.model.rotary_emb.forward = rotary
    return model.logits(tokens)


def agrees(directory: Path, tokens: list[int], result: Finished, n: float) -> None:
    expected = uncached(directory, n, tokens + result.token_ids)[len(tokens) - 1 : -1]
    # float32 frequencies of transformers cause errors up to 1e-5 here; another length causes 1e-1 and more.
    assert (torch.stack(result.logits) - expected).abs().max() / expected.abs().max() < 5e-5


def test_a_short_request_with_a_long_one_in_its_batch(llama: Path) -> None:
    """The maximum of the batch would give both the frequencies of the long one."""
    core = make_core(llama, rope_scaling=DYNAMIC, max_model_len=256, max_num_batched_tokens=64)
    tokens = {"long": prompt(120, 1), "short": prompt(30, 2)}
    results = run(core, [greedy(name, ids, 8) for name, ids in tokens.items()])
    agrees(llama, tokens["short"], results["short", 0], M)
    agrees(llama, tokens["long"], results["long", 0], 2 * M)  # 128 tokens


def test_a_short_request_after_a_long_one(llama: Path) -> None:
    """transformers retains the longer request's base for later requests, down to half the trained length."""
    core = make_core(llama, rope_scaling=DYNAMIC, max_model_len=256)
    long, short = prompt(120, 1), prompt(M - 8, 2)
    agrees(llama, long, run(core, [greedy("long", long, 8)])["long", 0], 2 * M)
    agrees(llama, short, run(core, [greedy("short", short, 8)])["short", 0], M)
    agrees(llama, long, run(core, [greedy("again", long, 8)])["again", 0], 2 * M)


@pytest.mark.parametrize("budget", [5, 32, 256])
def test_chunked_prefill_uses_the_length_of_the_request(budget: int, llama: Path) -> None:
    """The lengths of early chunks would give other frequencies."""
    core = make_core(llama, rope_scaling=DYNAMIC, max_model_len=256, max_num_batched_tokens=budget)
    tokens = prompt(100, 3)
    # 140 tokens at the end, one grid point above the 100 of the prompt.
    agrees(llama, tokens, run(core, [greedy("a", tokens, 40)])["a", 0], M * 2**1.25)


@pytest.mark.parametrize("key", ["rope_scaling", "top"])
def test_dynamic_scaling_starts_at_the_trained_length(key: str) -> None:
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    config |= {"max_position_embeddings": M, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    (config if key == "top" else config["rope_scaling"])["original_max_position_embeddings"] = 16
    (group,) = read_rotary_groups(config)
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=M)
    theirs.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    for length in (17, M, 2 * M, 4 * M):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, "cpu", seq_len=length)
        np.testing.assert_allclose(resolve(group.scaling, group.base, length).inv_freq, expected, rtol=3e-6)


def test_the_context_of_the_server_is_not_the_trained_length(llama: Path) -> None:
    request = greedy("a", prompt(100), 28)
    specs = [
        specs_of(make_core(llama, rope_scaling=DYNAMIC, max_model_len=length), request) for length in (128, 200, 1000)
    ]
    assert specs[0] == specs[1] == specs[2]
