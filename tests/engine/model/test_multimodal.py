"""Text parts of multimodal models: logits equal those of the entire model on text, for all layouts of files.

Reference: transformers' class of the entire model, float32, eager attention, one pass over the whole sequence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.quantized_checkpoints import AWQ, as_awq, as_packed, compressed, make_quantized, quantize
from engine_helpers.rewritten_weights import PROMPT, logits, reconfigured, rewritten
from helpers.adapters import merged, save_adapter
from helpers.engines import greedy, make_core, run
from helpers.tiny_multimodal import MODELS, TextLogits, make_multimodal
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.model.families.multimodal import MULTIMODAL, text_config_of
from windlass.engine.model.families.spec_reader import read_rotary_groups

TOLERANCE = 1e-5  # of the largest reference logit


def test_every_class_is_compared() -> None:
    compared = {MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name.partition(" ")[0]] for name in MODELS}
    assert compared == {kind.architecture for kind in MULTIMODAL}


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_multimodal(request.param, tmp_path_factory.mktemp(request.param.replace(" ", "_")))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_multimodal("gemma3", tmp_path_factory.mktemp("gemma3"))


def error(core: EngineCore, reference: Path) -> float:
    """Return the largest difference of the logits after the prompt, relative to the largest logit."""
    result = run(core, [greedy("a", PROMPT, 9)])["a", 0]
    expected = TextLogits(reference)(PROMPT + result.token_ids)[len(PROMPT) - 1 : -1]
    assert torch.isfinite(expected).all() and float(expected.std()) > 0
    return float((torch.stack(result.logits) - expected).abs().max() / expected.abs().max())


@pytest.mark.quick_cases(4)
def test_logits_equal_the_entire_model(model: Path) -> None:
    core = make_core(model, max_num_batched_tokens=7)
    assert any("only the text part of this multimodal model" in notice for notice in core.info.notices)
    assert error(core, model) < TOLERANCE
    config = json.loads((model / "config.json").read_text())
    assert read_rotary_groups(config) == core.runner.decoder.spec.rotary_groups


def renamed(model: Path, target: Path, old: str, new: str) -> Path:
    """Copy the model with another prefix of tensor names."""
    weights = load_file(model / "model.safetensors")
    moved = {new + name.removeprefix(old) if name.startswith(old) else name: one for name, one in weights.items()}
    assert moved.keys() != weights.keys()
    return rewritten(model, target, moved)


def test_other_tensor_prefixes_give_the_same_bits(gemma: Path, tmp_path: Path) -> None:
    one = renamed(gemma, tmp_path / "one", "language_model.model.", "model.language_model.")
    two = renamed(one, tmp_path / "two", "vision_tower.", "model.vision_tower.")
    assert torch.equal(logits(two), logits(gemma))


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_text_part_and_text_model_give_the_same_bits(gemma: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    weights = load_file(gemma / "model.safetensors")
    prefix = "language_model."
    own = {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}
    assert 0 < len(own) < len(weights)
    save_file(own, alone / "model.safetensors")
    config = json.loads((gemma / "config.json").read_text())["text_config"]
    (alone / "config.json").write_text(json.dumps({**config, "architectures": ["Gemma3ForCausalLM"]}))
    assert torch.equal(logits(gemma, **options), logits(alone, **options))


def test_transposed_experts_give_the_same_bits(tmp_path: Path) -> None:
    """The first files of Qwen 3 VL store them like this."""
    model = make_multimodal("qwen3_vl_moe", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    stacks = [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(stacks) == 8
    other = rewritten(model, tmp_path / "other", weights | {name: weights[name].transpose(1, 2) for name in stacks})
    assert torch.equal(logits(other), logits(model))


def test_head_in_the_files_has_priority_over_config_json(tmp_path: Path) -> None:
    model = make_multimodal("mistral3", tmp_path / "model")
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"] is True
    tied = make_core(model)
    assert tied.runner.decoder.spec.tied_embeddings and error(tied, model) < TOLERANCE
    weights = load_file(model / "model.safetensors")
    head = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)) * 0.1
    save_file({**weights, "language_model.lm_head.weight": head}, model / "model.safetensors")
    own = make_core(model)
    assert not own.runner.decoder.spec.tied_embeddings and error(own, model) < TOLERANCE


def test_missing_head_is_refused(tmp_path: Path) -> None:
    model = make_multimodal("llava", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    save_file({n: w for n, w in weights.items() if "lm_head" not in n}, model / "model.safetensors")
    with pytest.raises(LoadError, match=r"contain no lm_head\.weight"):
        make_core(model)


def test_older_config_with_keys_at_the_top_level(tmp_path: Path) -> None:
    model = make_multimodal("qwen2_5_vl", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    flat = {**text, **config, "rope_theta": rope["rope_theta"], "tie_word_embeddings": False}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    other = reconfigured(model, tmp_path / "other", **{**flat, "text_config": None})
    assert torch.equal(logits(other), logits(model))


def test_end_tokens_of_the_entire_model_are_used(gemma: Path, tmp_path: Path) -> None:
    other = reconfigured(gemma, tmp_path / "other", eos_token_id=[1, 106])
    (other / "generation_config.json").unlink()
    assert make_core(other).info.eos_token_ids == (1, 106)


SPARSE = ["cohere2", "gemma3_text", "lfm2", "llama", "mistral", "ministral3", "qwen2", "qwen3"]


@pytest.mark.parametrize("model_type", SPARSE)
def test_omitted_sizes_have_the_defaults_of_the_class(model_type: str) -> None:
    asked = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": model_type}}
    config, theirs = text_config_of(asked).config, AutoConfig.for_model(model_type)
    for key in "vocab_size intermediate_size hidden_size num_hidden_layers num_attention_heads".split():
        assert config[key] == getattr(theirs, key), key


@pytest.mark.parametrize(
    "keys, reason",
    [
        ({"text_config": None}, "needs the object text_config"),
        ({"text_config": [1]}, "needs the object text_config"),
        ({"text_config": {"model_type": "opt"}}, "is of model_type 'opt', which is not supported"),
        ({"text_config": {"model_type": ["llama"]}}, "is of model_type a list, which is not supported"),
        ({"text_config": {"model_type": "modernbert"}}, "which is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "is a multimodal model, which is not supported"),
    ],
)
def test_unsupported_text_part_is_refused(gemma: Path, tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(LoadError, match=reason):
        make_core(reconfigured(gemma, tmp_path / "other", **keys))


def test_unexpected_tensor_is_refused(gemma: Path, tmp_path: Path) -> None:
    more = {"language_model.model.gates.weight": torch.zeros(2)}
    other = rewritten(gemma, tmp_path / "other", load_file(gemma / "model.safetensors") | more)
    with pytest.raises(LoadError, match=r"unexpected tensor 'language_model\.model\.gates\.weight'"):
        make_core(other)


@pytest.mark.parametrize(
    "name, further",
    [("glm4v_moe", "model.language_model.layers.4.eh_proj.weight"), ("exaone4_5", "mtp.layers.0.eh_proj.weight")],
)
def test_mtp_tensors_are_omitted(tmp_path: Path, name: str, further: str) -> None:
    model = make_multimodal(name, tmp_path / "model")
    wanted = logits(model)
    weights = load_file(model / "model.safetensors")
    save_file({**weights, further: torch.zeros(2, 2)}, model / "model.safetensors")
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_adapter_of_the_text_part_gives_merged_logits(tmp_path: Path, prefix: str) -> None:
    """With the tensor names of the files, of transformers 5, and of a text model."""
    model = make_multimodal("mistral3", tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model, ["up_proj"], alpha=9.0)
    found = load_file(adapter / "adapter_model.safetensors")
    module = "language_model.model.layers.1.mlp.up_proj"
    own = {name: one for name, one in found.items() if f".{module}." in name}
    save_file(own, adapter / "adapter_model.safetensors")
    wanted = logits(merged(model, adapter, tmp_path / "merged"))
    other = {name.replace("language_model.model.", prefix): one for name, one in own.items()}
    save_file(other, adapter / "adapter_model.safetensors")
    written = json.loads((adapter / "adapter_config.json").read_text())
    scaled = {"lora_alpha": 1.0, "alpha_pattern": {module.replace("language_model.model.", prefix): 9.0}}
    (adapter / "adapter_config.json").write_text(json.dumps(written | scaled))
    ours = logits(model, adapter)
    assert (ours - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (ours - logits(model)).abs().max() > 1e-2 * wanted.abs().max()


@pytest.mark.parametrize("method", ["awq", "compressed-tensors"])
def test_quantized_text_part_gives_the_logits_of_its_numbers(tmp_path: Path, method: str) -> None:
    """The other parts and the head are not quantized, as in published files."""
    model = make_multimodal("llava", tmp_path / "model")
    names = [name.removesuffix(".weight") for name in load_file(model / "model.safetensors")]
    leave = [name for name in names if ".layers." not in name or not name.startswith("language_model.")]

    def layout(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        w = quantize(weight, 4, 32, symmetric=method != "awq", dtype=torch.float16)
        made = as_awq(module, w) if method == "awq" else as_packed(module, w, symmetric=True, padded=False)
        return made, w.numbers()

    method_config = AWQ if method == "awq" else compressed("pack-quantized")
    stored, plain = make_quantized(model, tmp_path, method_config, layout, leave=leave)
    exact = {"dtype": "float32", "activations": "float32"}
    assert make_core(stored, **exact).info.quantization == ("AWQ (q4_k)" if method == "awq" else f"{method} (q4_0)")
    ours, wanted = logits(stored, **exact), logits(plain, **exact)
    assert (ours - wanted).abs().max() < TOLERANCE * wanted.abs().max()
