"""Rotary scalings of models compared with transformers: from config.json, server option and request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model

from windlass.engine.errors import LoadError, RequestError
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
