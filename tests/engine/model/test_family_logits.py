"""Logits of further families compared with transformers, in chunks of any size, and sensitivity of this comparison.

Reference: float32, eager attention, one pass over the whole sequence, cos and sin from float64 angles.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_helpers.rewritten_weights import PROMPT, difference, rewritten, with_other_theta
from helpers import tiny_experts, tiny_families, tiny_plain, tiny_unrotated
from helpers.cpu_kernels import choose
from helpers.engines import greedy, make_core, run, specs_of
from helpers.marks import slow_but
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import RequestError
from windlass.engine.interface.request import PoolingRule
from windlass.engine.model.families import spec_reader
from windlass.engine.model.families.family import is_set

FAMILIES = tiny_families.FAMILIES | tiny_plain.FAMILIES | tiny_experts.FAMILIES
TOLERANCE = 1e-5  # of the largest reference logit
# Families with operations that no other has.
OWN_OPERATIONS = (
    "apertus",
    "bitnet",
    "cohere_normed",
    "falcon_h1_normed",
    "granite4_h",
    "lfm2",
    "llama4",
    "nanochat",
    "olmo",
    "persimmon",
    "qwen3_5",
)
# By family: changes of config.json that change logits and no tensor's shape.
SWITCHES: dict[str, list[dict[str, Any]]] = {
    "falcon_h1": [
        {"key_multiplier": 0.9},
        {"attention_in_multiplier": 1.0},
        {"attention_out_multiplier": 1.0},
        {"ssm_in_multiplier": 1.0},
        {"ssm_out_multiplier": 1.0},
        {"embedding_multiplier": 1.0},
        {"lm_head_multiplier": 1.0},
        {"mlp_multipliers": [0.75, 1.0]},
        {"time_step_limit": [0.0, 1.0]},
        {"ssm_multipliers": [0.9 * 1.3, 0.8, 1.1, 1.3, 0.7]},
        {"ssm_multipliers": [0.9, 0.8 * 1.3, 1.1, 1.3, 0.7]},
        {"ssm_multipliers": [0.9, 0.8, 1.1 * 1.3, 1.3, 0.7]},
        {"ssm_multipliers": [0.9, 0.8, 1.1, 1.3 * 1.3, 0.7]},
        {"ssm_multipliers": [0.9, 0.8, 1.1, 1.3, 0.7 * 1.3]},
    ],
    "chatglm": [{"rope_ratio": 2.0}],
    "glm4_moe": [
        {"num_experts_per_tok": 1},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 1.0},
        {"n_group": 1, "topk_group": 1},
        {"topk_group": 3},
    ],
    "granite4_h": [{"time_step_limit": [0.0, 1.0]}, {"rms_norm_eps": 0.01}],
    "lfm2": [{"norm_eps": 0.01}],
    "lfm2_moe": [{"routed_scaling_factor": 1.0}, {"norm_topk_prob": False}],
    "llama4": [{"attention_chunk_size": 16}, {"attn_scale": 0.1}, {"floor_scale": 20}, {"use_qk_norm": False}],
    "nanochat": [{"final_logit_softcapping": None}],
    "nemotron_h_experts": [
        {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 2},
        {"topk_group": 4},
        {"mlp_hidden_act": "silu"},
    ],
    "olmo": [{"clip_qkv": None}],
    "qwen3_5": [{"rms_norm_eps": 0.01}],
    "qwen3_next": [{"norm_topk_prob": True}],
}
# The quick tests run one family for each set of operations.
QUICK = slow_but(sorted(FAMILIES), *OWN_OPERATIONS, "gemma2", "glm4_moe", "gpt_oss")


@pytest.fixture(scope="module", params=QUICK)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = tiny_unrotated.make_unrotated if request.param in tiny_unrotated.FAMILIES else make_model
    return make(request.param, tmp_path_factory.mktemp(request.param))


def error(core: EngineCore, directory: Path) -> float:
    """Return the largest difference of the logits after the prompt, relative to the largest logit."""
    request = greedy("a", PROMPT, 9)
    result = run(core, [request])["a", 0]
    names = [group.name for group in core.runner.decoder.spec.rotary_groups]
    reference = Reference(directory, specs_of(core, request), names).logits(PROMPT + result.token_ids)
    expected = reference[len(PROMPT) - 1 : -1]
    assert torch.isfinite(expected).all() and float(expected.std()) > 0
    return float((torch.stack(result.logits) - expected).abs().max() / expected.abs().max())


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("budget", slow_but([64, 7, 1], 7))
def test_logits_equal_transformers(family: Path, budget: int) -> None:
    assert error(make_core(family, max_num_batched_tokens=budget), family) < TOLERANCE


@pytest.mark.quick_cases(6)
def test_other_theta_changes_logits(family: Path, tmp_path: Path) -> None:
    request = greedy("a", PROMPT, 1)
    other = with_other_theta(family, tmp_path / "other")
    ours, theirs = (run(make_core(one), [request])["a", 0].logits[0] for one in (other, family))
    assert difference(ours, theirs) > 10 * TOLERANCE


@pytest.mark.quick_cases(6)
def test_other_pair_layout_changes_logits(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((family / "config.json").read_text())
    flipped = [replace(one, interleaved=not is_set(config, one.interleaved)) for one in spec_reader.FAMILIES]
    monkeypatch.setattr(spec_reader, "FAMILIES", tuple(flipped))
    assert error(make_core(family), family) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["nanochat"], indirect=True)
def test_other_direction_of_rotation_changes_logits(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_reader, "FAMILIES", tuple(replace(one, swapped=False) for one in spec_reader.FAMILIES))
    assert error(make_core(family), family) > 10 * TOLERANCE


@pytest.mark.slow
def test_every_vector_changes_logits(family: Path, tmp_path: Path) -> None:
    """Each bias and norm of a layer, and those after the layers: zeros instead give other logits."""
    tensors = load_file(family / "model.safetensors")
    request = greedy("a", PROMPT, 1)
    expected = run(make_core(family), [request])["a", 0].logits[0]
    names = [
        name
        for name, tensor in tensors.items()
        if (tensor.dim() == 1 or name.endswith("norm.weight")) and (".1." in name or ".layers." not in name)
    ]
    assert names
    for name in names:
        other = rewritten(family, tmp_path / "other", {**tensors, name: torch.zeros_like(tensors[name])})
        logits = run(make_core(other), [request])["a", 0].logits[0]
        assert difference(logits, expected) > 10 * TOLERANCE, name


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("family", "changes"),
    [(family, changes) for family, rows in SWITCHES.items() for changes in rows],
    indirect=["family"],
    ids=str,
)
def test_config_key_changes_logits(family: Path, changes: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads((family / "config.json").read_text())
    assert all(config[key] != value for key, value in changes.items())
    changed = shutil.copytree(family, tmp_path / "other")  # None stays in the file
    (changed / "config.json").write_text(json.dumps({**config, **changes}))
    request = greedy("a", PROMPT, 1)
    ours, theirs = (run(make_core(one), [request])["a", 0].logits[0] for one in (changed, family))
    limit = 1e-3 if "NemotronHForCausalLM" in config["architectures"] else 10 * TOLERANCE
    assert difference(ours, theirs) > limit


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("family", OWN_OPERATIONS, indirect=True)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain torch"])
def test_deterministic_bits_are_equal_in_any_chunks(
    family: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both backends, and the logits equal the reference."""
    if not compiled:
        choose(monkeypatch, "turned off by this test")
        assert error(make_core(family), family) < TOLERANCE
    found = []
    for budget in (64, 7):
        core = make_core(family, deterministic=True, max_num_batched_tokens=budget)
        found.append(torch.stack(run(core, [greedy("a", PROMPT, 3)])["a", 0].logits))
    assert torch.equal(*found)
    assert error(core, family) < TOLERANCE


@pytest.mark.quick_cases(6)
def test_prefix_hits_give_equal_logits(family: Path) -> None:
    core = make_core(family)
    first = run(core, [greedy("a", PROMPT, 12)])["a", 0]
    second = run(core, [greedy("b", PROMPT, 12)])["b", 0]
    assert second.outputs[0].cached_tokens >= 32
    assert second.token_ids == first.token_ids
    largest = torch.stack(first.logits).abs().max()
    assert (torch.stack(second.logits) - torch.stack(first.logits)).abs().max() / largest < TOLERANCE


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_quantized_weights_give_similar_logits(family: Path, quantization: str) -> None:
    request = greedy("a", PROMPT, 1)
    expected = run(make_core(family), [request])["a", 0].logits[0]
    actual = run(make_core(family, quantization=quantization), [request])["a", 0].logits[0]
    near = torch.nn.functional.cosine_similarity(actual, expected, dim=0)
    assert near > (0.99 if quantization == "int8" else 0.7), near


# -- token classification ------------------------------------------------------------------------------------------------

CLASSIFIER_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "Llama": _GROUPED,
    "Qwen3": _GROUPED,
    "Mistral": {**_GROUPED, "sliding_window": 8, "token_classification_bias": False},
    "GPTNeoX": {"intermediate_size": 96},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_token_classes_equal_transformers(family: str, tmp_path: Path) -> None:
    labels = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    config = getattr(transformers, f"{family}Config")(**CLASSIFIER_SIZES, **CLASSIFIERS[family], **labels)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForTokenClassification")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0, 0.3) if parameter.dim() == 1 else parameter.mul_(4.0)
    model.config._attn_implementation = "eager"
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    for budget in (64, 7):
        core = make_core(tmp_path, max_num_batched_tokens=budget)
        assert core.info.classifier is not None and core.info.classifier.per_token
        request = replace(greedy("a", PROMPT, 0), pooling=PoolingRule("classify tokens"))
        (output,) = run(core, [request])["a", 0].outputs
        assert output.pooled is not None
        found = torch.from_numpy(np.frombuffer(output.pooled.values, "<f4").reshape(-1, 3).copy())
        assert difference(found, expected) < 2e-5  # angles are float32 in the reference
    with pytest.raises(RequestError, match="classifies each token"):
        core.add(replace(greedy("b", PROMPT, 0), pooling=PoolingRule("classify")))
    with pytest.raises(RequestError, match="does not generate text"):
        core.add(greedy("c", PROMPT))
