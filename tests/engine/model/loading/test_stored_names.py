"""Checkpoints with other tensor names than the family's: saved without a head, or as part of another model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from helpers.adapters import merged, save_adapter
from helpers.engines import greedy, make_core, run
from helpers.prediction_layers import make_predicting
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.request import PoolingRule

PROMPT = [3, 17, 42, 8, 99]


def logits(directory: Path, adapter: Path | None = None) -> torch.Tensor:
    lora = () if adapter is None else (AdapterSource(1, "a", str(adapter)),)
    request = greedy("a", PROMPT, 3, adapter=None if adapter is None else 1)
    return torch.stack(run(make_core(directory, lora=lora), [request])["a", 0].logits)


def without_head(model: Path, target: Path) -> Path:
    """Save a model without its head, as transformers does."""
    transformers.AutoModelForCausalLM.from_pretrained(model).base_model.save_pretrained(target)
    return target


def renamed(model: Path, prefix: str) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, model / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "gptj", "falcon"])
def test_tied_model_without_a_head(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model", tie_word_embeddings=True)
    if family == "gptj":  # its head has a bias, which is missing then
        with pytest.raises(LoadError, match=r"lm_head\.bias"):
            logits(without_head(model, tmp_path / "base"))
        return
    base = without_head(model, tmp_path / "base")
    assert not any(
        name.startswith(("model.", "transformer.", "gpt_neox.")) for name in load_file(base / "model.safetensors")
    )
    assert torch.equal(logits(base), logits(model))


@pytest.mark.parametrize("prefix", ["wrapped.", "a.b."])
def test_model_from_inside_another_model(prefix: str, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    wanted = logits(model)
    renamed(model, prefix)
    assert torch.equal(logits(model), wanted)


def test_model_without_a_head_has_no_mtp(tmp_path: Path) -> None:
    """Its files contain the complete MTP layer with its own embedding, and names have no prefix."""
    model = make_predicting("deepseek_v3", tmp_path)
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    bare = {name.removeprefix("model."): one for name, one in tensors.items()}
    save_file(bare, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["DeepseekV3Model"]}))
    info = make_core(model).info
    assert not info.generates and not any("speculation.mtp" in notice for notice in info.notices)
    with pytest.raises(LoadError, match=r"speculation\.mtp`: the model is a DeepseekV3Model, which generates nothing"):
        make_core(model, speculative_mtp=True)


def test_adapter_of_the_entire_model_fits(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model", tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", model)
    wanted = logits(merged(model, adapter, tmp_path / "merged"))
    found = logits(without_head(model, tmp_path / "base"), adapter)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_model_without_a_head_gives_embeddings(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    core, prompt = make_core(without_head(model, tmp_path / "base")), [5, 6, 7, 8, 9]
    assert core.info.architecture == "LlamaModel" and not core.info.generates
    assert any("without its language-model head" in notice for notice in core.info.notices)
    with pytest.raises(RequestError, match="generates nothing: use /v1/embeddings"):
        core.add(greedy("a", prompt))
    ours, theirs = (
        run(one, [replace(greedy("b", prompt, 0), pooling=PoolingRule("mean"))])["b", 0].outputs[-1].pooled
        for one in (core, make_core(model))
    )
    assert ours is not None and ours == theirs


def test_missing_head_is_named(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    base = without_head(model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(
        LoadError, match=r"hold no lm_head\.weight.*without its language-model head.*tie_word_embeddings"
    ):
        make_core(base)
