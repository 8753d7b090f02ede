"""Sixteen requests under eight scalings in one batch equal single requests and transformers with the scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.cache_invariants import assert_balanced
from helpers.engines import Finished, greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling

M = 64  # the trained length of the model
THETA, DIM = 10_000.0, 16

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {"rope_type": "ntk", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn_mscale": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.5 * i for i in range(8)],
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("mixed"), max_position_embeddings=M)


def requests() -> list[EngineRequest]:
    """Return two requests of different lengths for each scaling. Those of one scaling share their first 33 tokens."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(3, 128, (33,), generator=generator).tolist()
    made = []
    for i, scaling in enumerate([*SCALINGS.values(), *SCALINGS.values()]):
        prompt = common + torch.randint(3, 128, (5 + 3 * i,), generator=generator).tolist()
        made.append(greedy(f"r{i}", prompt, 10, rope_scaling=RopeScaling.from_dict(scaling), rope_update="frozen"))
    return made


def core_of(model: Path, **options: Any) -> EngineCore:
    return make_core(model, max_num_seqs=16, max_model_len=256, **options)


def transformers_frequencies(kind: str, length: float) -> tuple[list[float], float]:
    """Return inv_freq and attention factor of transformers; kinds that it does not have use another base."""
    parameters = {"rope_theta": THETA, **SCALINGS[kind]}
    if kind == "ntk":
        parameters = {"rope_type": "default", "rope_theta": THETA * 4.0 ** (DIM / (DIM - 2))}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=DIM, max_position_embeddings=M, rope_parameters=parameters
    )
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        theta = parameters["rope_theta"]
        return [theta ** (-2 * j / DIM) for j in range(DIM // 2)], 1.0
    if rope_type == "longrope":
        config.rope_parameters["original_max_position_embeddings"] = M
    inv_freq, attention = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=length)
    return inv_freq.tolist(), attention


def worst(got: list[torch.Tensor], right: torch.Tensor) -> float:
    return float((torch.stack(got) - right).abs().max() / right.abs().max())


def test_mixed_scalings_equal_single_requests_and_transformers(model: Path) -> None:
    core = core_of(model)
    together = run(core, requests())
    outcomes: dict[str, Finished] = {}
    for i, request in enumerate(requests()):
        result = together[f"r{i}", 0]
        kind = list(SCALINGS)[i % 8]
        (spec,) = specs_of(core, request)
        report = result.outputs[-1].rotary
        assert report is not None and report.fingerprint == spec.fingerprint
        length = report.effective_length or len(request.prompt_token_ids) + 10
        inv_freq, attention = transformers_frequencies(kind, length)
        assert list(spec.inv_freq) == pytest.approx(inv_freq, rel=1e-6)
        assert spec.rotary_scale == pytest.approx(attention, rel=1e-6)
        tokens = request.prompt_token_ids + result.token_ids
        right = Reference(model, [spec], ["full_attention"]).logits(tokens)[len(request.prompt_token_ids) - 1 : -1]
        assert worst(result.logits, right) < 1e-5
        assert result.token_ids == right.argmax(-1).tolist()
        if i in (1, 3, 5, 14):
            alone = run(core_of(model), [request])[f"r{i}", 0]
            assert alone.token_ids == result.token_ids
            assert worst(result.logits, torch.stack(alone.logits)) < 1e-5
        outcomes[kind] = result
    # Sensitivity: scalings change logits.
    first = outcomes["default"].logits[0]
    for kind in list(SCALINGS)[1:]:
        assert float((outcomes[kind].logits[0] - first).abs().max()) > 1e-2


def test_prefix_cache_is_shared_by_equal_frequencies_only(model: Path) -> None:
    core = core_of(model)
    prompt = torch.randint(3, 128, (49,), generator=torch.Generator().manual_seed(6)).tolist()

    def cached(scaling: dict[str, Any] | None, salt: str | None = None) -> int:
        parsed = None if scaling is None else RopeScaling.from_dict(scaling)
        request = greedy("x", prompt, 2, rope_scaling=parsed, rope_update="frozen", cache_salt=salt)
        return run(core, [request])["x", 0].outputs[-1].cached_tokens

    assert cached(None) == 0
    for scaling in list(SCALINGS.values())[1:]:
        # 51 tokens: dynamic is still at its first grid point, which equals no scaling.
        assert cached(scaling) == (48 if scaling["rope_type"] == "dynamic" else 0)
        assert cached(scaling) == 48
        assert cached(scaling, salt="mine") == 0
    assert cached({"type": "linear", "factor": 4}) == 48
    assert cached({"rope_type": "linear", "factor": 4, "rope_theta": THETA}) == 48
    assert cached({"rope_type": "dynamic", "alpha": 4.0}) == 48  # the frequencies of ntk with factor 4
    assert cached({"rope_type": "linear", "factor": 1}) == 48
    assert cached({"rope_type": "yarn", "factor": 4, "beta_fast": 32, "attention_factor": 1.0}) == 0
    assert cached({"rope_type": "linear", "factor": 4.0001}) == 0
    assert_balanced(core.blocks)
