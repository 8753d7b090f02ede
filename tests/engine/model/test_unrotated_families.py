"""Models without rotation compared with transformers: whole, in chunks, with dropped tokens; and refused options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from engine_helpers.rewritten_weights import PROMPT, difference, logits, rewritten
from helpers.adapters import merged, save_adapter
from helpers.engines import greedy, make_core, run
from helpers.marks import slow_but
from helpers.tiny_unrotated import FAMILIES, exact_falcon_alibi, logits_of, make_unrotated, reference
from safetensors.torch import load_file, save_file

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.execution.attention_maps import attention_weights
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.request import PoolingRule
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.scoring import Scorer

# Families with ten or more vectors in a layer.
SLOW = [name for name in FAMILIES if name.startswith(("granite4_h", "nemotron_h")) and name != "nemotron_h_plain"]
TOLERANCE = 1e-5  # of the largest reference logit


@pytest.fixture(autouse=True)
def _exact_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.falcon.modeling_falcon.build_alibi_tensor", exact_falcon_alibi)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_unrotated(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_unrotated("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module", params=["bloom", "falcon_rw"])
def one_layer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a model of one layer, keys and values depend on their own token only, so dropped tokens have no effect."""
    return make_unrotated(request.param, tmp_path_factory.mktemp("one"), num_hidden_layers=1)


def error(core: EngineCore, directory: Path) -> float:
    result = run(core, [greedy("a", PROMPT, 9)])["a", 0]
    expected = logits_of(directory, PROMPT + result.token_ids)[len(PROMPT) - 1 : -1]
    assert torch.isfinite(expected).all() and float(expected.std()) > 0
    return float((torch.stack(result.logits) - expected).abs().max() / expected.abs().max())


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("budget", slow_but([64, 7, 1], 7))
def test_logits_equal_transformers(family: Path, budget: int) -> None:
    assert error(make_core(family, max_num_batched_tokens=budget), family) < TOLERANCE


@pytest.mark.quick_cases(3)
def test_deterministic_bits_are_equal_in_any_chunks(family: Path) -> None:
    found = []
    for budget in (64, 7):
        core = make_core(family, deterministic=True, max_num_batched_tokens=budget)
        found.append(torch.stack(run(core, [greedy("a", PROMPT, 3)])["a", 0].logits))
    assert torch.equal(*found)
    assert error(core, family) < TOLERANCE


@pytest.mark.quick_cases(6)
def test_batches_and_prefix_hits_give_equal_logits(family: Path) -> None:
    core = make_core(family)
    alone = run(core, [greedy("a", PROMPT, 6)])["a", 0]
    batched = run(core, [greedy("b", PROMPT, 6), greedy("c", PROMPT[5:], 9), greedy("d", PROMPT[:3], 9)])
    assert batched["b", 0].outputs[0].cached_tokens >= 32
    difference = torch.stack(batched["b", 0].logits) - torch.stack(alone.logits)
    assert difference.abs().max() / torch.stack(alone.logits).abs().max() < TOLERANCE
    expected = logits_of(family, PROMPT[:3] + batched["d", 0].token_ids)[2:-1]
    assert (torch.stack(batched["d", 0].logits) - expected).abs().max() / expected.abs().max() < TOLERANCE


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in sorted(FAMILIES)],
    indirect=True,
)
def test_every_vector_and_position_changes_logits(family: Path, tmp_path: Path) -> None:
    tensors = load_file(family / "model.safetensors")
    request = greedy("a", PROMPT, 1)
    expected = run(make_core(family), [request])["a", 0].logits[0]
    names = [name for name, tensor in tensors.items() if tensor.dim() == 1 and (".1." in name or ".h." not in name)]
    assert len(names) > 3
    for name in [*names, *(name for name in tensors if name.endswith("wpe.weight"))]:
        other = rewritten(family, tmp_path / "other", {**tensors, name: torch.zeros_like(tensors[name])})
        found = run(make_core(other), [request])["a", 0].logits[0]
        assert difference(found, expected) > 10 * TOLERANCE, name


def test_other_slopes_change_logits(one_layer: Path) -> None:
    core = make_core(one_layer)
    shared = core.runner.decoder._attention
    shared._kinds = [kind._replace(slopes=tuple(slope * 1.2 for slope in kind.slopes)) for kind in shared._kinds]
    assert error(core, one_layer) > 10 * TOLERANCE


def test_rounding_of_falcon_is_exact_for_slopes_that_are_powers_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the fixture of this file: four heads, and no distance that bfloat16 rounds."""
    monkeypatch.undo()
    directory = make_unrotated("falcon_rw", tmp_path)
    assert error(make_core(directory, max_num_batched_tokens=7), directory) < TOLERANCE


@torch.no_grad()
def test_falcon_subtracts_slopes_once_before_scaling(tmp_path: Path) -> None:
    """One layer by the formula of its authors: (q·k - slope * distance) / sqrt(d)."""
    directory = make_unrotated("falcon_rw", tmp_path, num_hidden_layers=1)
    model = reference(directory)
    layer, ids = model.transformer.h[0], torch.tensor([PROMPT])
    x = model.transformer.word_embeddings(ids)
    attention = layer.self_attention
    fused = attention.query_key_value(layer.input_layernorm(x)).view(1, len(PROMPT), 4, 3, 16)
    q, k, v = fused.permute(3, 0, 2, 1, 4)
    distance = torch.arange(len(PROMPT))[:, None] - torch.arange(len(PROMPT))
    slopes = 2.0 ** (-8 * torch.arange(1, 5) / 4)
    scores = (q @ k.transpose(-1, -2) - slopes[:, None, None] * distance) / 4
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(dim=-1)
    x = x + attention.dense((weights @ v).transpose(1, 2).reshape(1, len(PROMPT), 64))
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    expected = model.lm_head(model.transformer.ln_f(x))[0, -1]
    found = run(make_core(directory), [greedy("a", PROMPT, 1)])["a", 0].logits[0]
    assert difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon_rw"])
def test_classes_equal_transformers(name: str, head: str, tmp_path: Path) -> None:
    directory = make_unrotated(name, tmp_path, head=head, id2label={0: "a", 1: "b", 2: "c"}, pad_token_id=0)
    per_token = head == "ForTokenClassification"
    rule = PoolingRule("classify tokens" if per_token else "classify")
    core = make_core(directory, max_num_batched_tokens=16)
    (output,) = run(core, [replace(greedy("a", PROMPT, 0), pooling=rule)])["a", 0].outputs
    assert output.pooled is not None
    found = torch.from_numpy(np.frombuffer(output.pooled.values, "<f4").reshape(-1, 3).copy())
    auto = (
        transformers.AutoModelForTokenClassification if per_token else transformers.AutoModelForSequenceClassification
    )
    with torch.no_grad():
        expected = reference(directory, auto)(torch.tensor([PROMPT])).logits.reshape(-1, 3)
    assert difference(found, expected) < TOLERANCE


# -- Nemotron ----------------------------------------------------------------------------------------------------------


def test_dense_layers_and_biases_with_experts(tmp_path: Path) -> None:
    kinds = ["mlp", "moe", "full_attention", "linear_attention", "mlp"]
    model = make_unrotated("nemotron_h_experts", tmp_path, layers_block_type=kinds, mlp_bias=True, use_bias=True)
    assert error(make_core(model), model) < TOLERANCE


def test_quantized_experts_and_adapters_of_shared_experts(tmp_path: Path) -> None:
    of_experts = make_unrotated("nemotron_h_experts", tmp_path / "model")
    plain = logits(of_experts)[0]
    assert torch.cosine_similarity(logits(of_experts, quantization="int8")[0], plain, dim=0) > 0.99
    with pytest.raises(LoadError, match=r"experts\.0\.up_proj' that an adapter can change"):
        logits(of_experts, save_adapter(tmp_path / "all", of_experts, ["up_proj"]))
    adapter = only_shared(save_adapter(tmp_path / "adapter", of_experts, ["up_proj", "down_proj"]))
    wanted = logits(merged(of_experts, adapter, tmp_path / "merged"))
    assert (logits(of_experts, adapter) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (plain - wanted[0]).abs().max() > 1e-3 * wanted.abs().max()


def only_shared(adapter: Path) -> Path:
    """Remove the adapter's changes of routed experts."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name: one for name, one in tensors.items() if ".experts." not in name}, adapter / "adapter_model.safetensors"
    )
    return adapter


def test_attention_weights_of_layers_that_attend(tmp_path: Path) -> None:
    model = make_unrotated("nemotron_h", tmp_path)
    scorer = Scorer(make_core(model).runner.decoder, torch.float32)
    weights = attention_weights(scorer, [5, 6, 7, 8], 2)
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:2]))
    with pytest.raises(
        RequestError, match="layer 1 attends to nothing, as it is a feed-forward alone: ask for one of 2"
    ):
        attention_weights(scorer, [5, 6, 7, 8], 1)


# -- context changes ---------------------------------------------------------------------------------------------------


def test_context_shift_with_alibi(one_layer: Path) -> None:
    """Retained tokens move next to the rest: logits equal those of the remaining text."""
    core = make_core(one_layer, max_model_len=64)
    rule = ContextRule(overflow="shift", keep_tokens=16)
    result = run(core, [greedy("a", PROMPT, 60, context=rule)])["a", 0]
    text, dropped = PROMPT + result.token_ids, 0
    for step, found in enumerate(result.logits):
        length = len(PROMPT) + step
        while length - 1 - dropped >= 64:  # no slot is free: the oldest block after the kept one is dropped
            dropped += 16
        left = text[:16] + text[16 + dropped : length]
        expected = logits_of_last(one_layer, left)
        assert difference(found, expected) < TOLERANCE, step
    assert dropped == core.stats().dropped_tokens >= 32


_models: dict[Path, transformers.PreTrainedModel] = {}


@torch.no_grad()
def logits_of_last(directory: Path, ids: list[int]) -> torch.Tensor:
    if directory not in _models:
        _models[directory] = reference(directory)
    return _models[directory](torch.tensor([ids]), use_cache=False).logits[0, -1]


def test_passage_reuse_with_alibi(one_layer: Path) -> None:
    core = make_core(one_layer)
    passage = torch.randint(3, 128, (96,), generator=torch.Generator().manual_seed(5)).tolist()
    reuse = NonPrefixReuseParams(at_least=32, scope="s")
    run(core, [greedy("a", PROMPT[:7] + passage, 1, reuse=reuse)])
    prompt = PROMPT[:23] + passage + PROMPT[30:]
    result = run(core, [greedy("b", prompt, 5, reuse=reuse)])["b", 0]
    assert core.stats().reused_tokens >= 32
    expected = logits_of(one_layer, prompt + result.token_ids)[len(prompt) - 1 : -1]
    assert (torch.stack(result.logits) - expected).abs().max() / expected.abs().max() < TOLERANCE


def test_attention_window_with_alibi(one_layer: Path) -> None:
    core = make_core(one_layer)
    result = run(core, [greedy("a", PROMPT, 5, context=ContextRule(attention_window=8))])["a", 0]
    for step, found in enumerate(result.logits):
        expected = logits_of_last(one_layer, (PROMPT + result.token_ids)[: len(PROMPT) + step][-8:])
        assert difference(found, expected) < TOLERANCE
    with pytest.raises(RequestError, match="lose by the distance"):
        core.add(greedy("b", PROMPT, 5, context=ContextRule(attention_window=8, attention_sinks=16)))


# -- refused options ---------------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(6)
def test_rope_scaling_is_refused(family: Path) -> None:
    core = make_core(family)
    for kind in ({"rope_type": "yarn", "factor": 4.0}, {"rope_type": "default", "rope_theta": 5e5}):
        with pytest.raises(RequestError, match="does not rotate") as caught:
            core.add(greedy("a", PROMPT, rope_scaling=RopeScaling.from_dict(kind)))
        assert caught.value.param == "rope_scaling"
    run(core, [greedy("b", PROMPT, 1, rope_scaling=RopeScaling())])  # no scaling
    with pytest.raises(LoadError, match="does not rotate"):
        make_core(family, rope_scaling=RopeScaling.from_dict({"rope_type": "linear", "factor": 2.0}))
    assert core.info.rotary_ladder is None


def test_context_changes_of_learned_positions_are_refused(gpt2: Path) -> None:
    core = make_core(gpt2)
    with pytest.raises(RequestError, match="learned") as caught:
        core.add(greedy("a", PROMPT, context=ContextRule(overflow="shift")))
    assert caught.value.param == "context_overflow"
    with pytest.raises(RequestError, match="learned") as caught:
        core.add(greedy("a", PROMPT, reuse=NonPrefixReuseParams(at_least=32, scope="s")))
    assert caught.value.param == "cache_reuse"
    with pytest.raises(LoadError, match="a table of 256"):
        make_core(gpt2, max_model_len=257)
    assert core.info.max_model_len == 256
    window = run(core, [greedy("b", PROMPT, 5, context=ContextRule(attention_window=64))])["b", 0]
    assert window.token_ids == run(core, [greedy("c", PROMPT, 5)])["c", 0].token_ids
