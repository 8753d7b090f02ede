"""Rotary scalings of models compared with transformers: from config.json, server option and request, mixed in one batch."""

from __future__ import annotations

import json
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
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling

M = 64  # the trained length of the models here

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_mscale": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 2.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "proportional": {"rope_type": "proportional", "factor": 4.0},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("plain"), max_position_embeddings=M)


def with_scaling(plain: Path, directory: Path, kind: str) -> Path:
    """Copy a model with another config.json."""
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").symlink_to(plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 10000.0, **KINDS[kind]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_config_server_and_request_agree_with_transformers(kind: str, plain: Path, tmp_path: Path) -> None:
    scaled = with_scaling(plain, tmp_path / kind, kind)
    prompt = torch.randint(3, 128, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    scaling = RopeScaling.from_dict(KINDS[kind])
    request = greedy("a", prompt, 10)
    cores = {
        "config": (make_core(scaled), request),
        "server": (make_core(plain, rope_scaling=scaling), request),
        "request": (make_core(plain), greedy("a", prompt, 10, rope_scaling=scaling)),
    }
    specs = specs_of(cores["config"][0], request)
    reference = Reference(scaled, specs, ["full_attention"])
    # Below M the frozen dynamic frequencies are the plain ones, as in transformers. The others do not depend on length,
    # except longrope, whose long factors transformers uses above the original length.
    rotary = reference.model.model.rotary_emb
    expected = rotary.long_inv_freq if hasattr(rotary, "long_inv_freq") else rotary.inv_freq
    if kind == "longrope":
        init = __import__("transformers.modeling_rope_utils", fromlist=["x"]).ROPE_INIT_FUNCTIONS["longrope"]
        expected, _ = init(reference.model.config, "cpu", seq_len=60)
    assert torch.allclose(torch.tensor(specs[0].inv_freq, dtype=torch.float32), expected, rtol=1e-6, atol=0)
    assert specs[0].rotary_scale == pytest.approx(rotary.attention_scaling, rel=1e-6)
    for core, sent in cores.values():
        result = run(core, [sent])["a", 0]
        logits = reference.logits(prompt + result.token_ids)[49:-1]
        assert (torch.stack(result.logits) - logits).abs().max() / logits.abs().max() < 1e-5
        assert result.token_ids == logits.argmax(-1).tolist()


def shortened(kind: str, pairs: int) -> dict[str, Any]:
    return {key: value[:pairs] if isinstance(value, list) else value for key, value in KINDS[kind].items()}


# Partial and interleaved; interleaved; layers without rotation; query and key norms after the rotation.
PAIRS = {"glm": 4, "helium": 8, "smollm3": 8, "hunyuan": 8}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("family", sorted(PAIRS))
def test_every_kind_with_every_pair_layout(family: str, tmp_path: Path) -> None:
    """One batch with a request of each kind, compared with transformers at the frequencies of that kind."""
    model = make_model(family, tmp_path, max_position_embeddings=M)
    core = make_core(model, max_num_batched_tokens=70)
    prompt = torch.randint(3, 128, (50,), generator=torch.Generator().manual_seed(4)).tolist()
    requests = {}
    for kind in KINDS:
        if kind == "proportional" and family == "glm":
            continue  # its heads have dimensions that never rotate
        scaling = RopeScaling.from_dict(shortened(kind, PAIRS[family]))
        requests[kind] = greedy(kind, prompt, 6, rope_scaling=scaling)
    # A factor far from 1 makes the place of a norm visible: after the rotation, its epsilon weighs a hundred times more.
    small = RopeScaling.from_dict({"rope_type": "yarn", "factor": 4, "attention_factor": 0.1})
    requests["small"] = greedy("small", prompt, 6, rope_scaling=small)
    results = run(core, requests.values())
    for kind, request in requests.items():
        specs = specs_of(core, request)
        assert len(specs[0].inv_freq) == PAIRS[family]
        logits = Reference(model, specs, ["full_attention"]).logits(prompt + results[kind, 0].token_ids)[49:-1]
        assert (torch.stack(results[kind, 0].logits) - logits).abs().max() / logits.abs().max() < 1e-5
        assert results[kind, 0].token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("family", ["glm", "phi3", "hunyuan"])
def test_unsupported_kinds_are_refused(family: str, tmp_path: Path) -> None:
    core = make_core(make_model(family, tmp_path, max_position_embeddings=M))
    cases = [("learned", {"rope_type": "learned"}), ("longrope", KINDS["longrope"] | {"short_factor": [1.0] * 3})]
    if family != "hunyuan":
        cases.append(("proportional", {"rope_type": "proportional"}))
    for name, fields in cases:
        fields = fields | ({"long_factor": [1.0] * 3} if name == "longrope" else {})
        with pytest.raises(RequestError) as caught:
            core.add(greedy(name, [5, 6, 7], 2, rope_scaling=RopeScaling.from_dict(fields)))
        assert caught.value.param == f"rope_scaling.{'short_factor' if name == 'longrope' else 'rope_type'}"
    assert not core.has_work()


def test_two_scalings_share_no_prefix(plain: Path) -> None:
    """Equal tokens under two scalings give separate answers, with prefix hits only within a scaling."""
    core = make_core(plain)
    prompt = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    names = ["default", "linear", "yarn", "llama3"]
    requests = {n: greedy(n, prompt, 8, rope_scaling=RopeScaling.from_dict(KINDS[n])) for n in names}
    results = run(core, requests.values())
    for name in names[1:]:  # sensitivity: scalings change logits
        first = results["default", 0].logits[0]
        assert (results[name, 0].logits[0] - first).abs().max() / first.abs().max() > 1e-2
    for name, request in requests.items():
        result = results[name, 0]
        reference = Reference(plain, specs_of(core, request), ["full_attention"])
        logits = reference.logits(prompt + result.token_ids)[39:-1]
        assert (torch.stack(result.logits) - logits).abs().max() / logits.abs().max() < 1e-5
        assert result.outputs[0].cached_tokens == 0
    again = greedy("again", prompt, 8, rope_scaling=RopeScaling.from_dict({"type": "linear", "factor": 4}))
    assert run(core, [again])["again", 0].outputs[0].cached_tokens == 32


def test_unknown_scaling_in_config_is_refused(plain: Path, tmp_path: Path) -> None:
    scaled = with_scaling(plain, tmp_path / "bad", "linear")
    config = json.loads((scaled / "config.json").read_text())
    config["rope_parameters"]["rope_type"] = "spiral"
    (scaled / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"spiral.*linear"):
        make_core(scaled)


# -- mixed scalings ----------------------------------------------------------------------------------------------------

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


@pytest.mark.slow
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
