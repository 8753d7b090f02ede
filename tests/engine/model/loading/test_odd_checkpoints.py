"""Checkpoints that contradict config.json, use unusual values or names, or change while they are read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.adapters import merged, save_adapter
from helpers.configs import engine_config
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run, specs_of
from helpers.prediction_layers import make_predicting
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file

from windlass import kernels
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.request import PoolingRule
from windlass.engine.model.loading import loader


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model("llama", tmp_path / "model")


def edit_config(model: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    path = model / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))


@ON_A_CPU
@pytest.mark.skipif(not kernels.reads_16bit_weights("cpu"), reason="weights are always widened here")
@pytest.mark.parametrize(("stored", "named"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", None)])
def test_matrices_have_the_dtype_of_the_files(model: Path, stored: str, named: str | None) -> None:
    tensors = {name: t.to(getattr(torch, stored)) for name, t in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    edit_config(model, drop=("dtype",), torch_dtype=named)
    core = make_core(model)
    assert core.info.weight_dtype == stored and core.info.dtype == "float32"
    embedding = tensors["model.embed_tokens.weight"]
    assert torch.equal(core.runner.decoder.embedding.float(), embedding.float())


def test_head_that_differs_from_the_embedding_is_used(model: Path) -> None:
    edit_config(model, tie_word_embeddings=True)
    with pytest.raises(LoadError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
        make_core(model)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert run(make_core(model), [greedy("a", [5, 6], 2)])["a", 0].finish_reason == "length"


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "rms_norm_eps", "small"),
        ("llama", "hidden_act", ["silu"]),
        ("llama", "eos_token_id", "</s>"),
        ("qwen2", "max_window_layers", "two"),
        ("gemma3", "query_pre_attn_scalar", "x"),
        ("gemma3", "attn_logit_softcapping", "x"),
        ("gemma3", "final_logit_softcapping", -1),
    ],
)
def test_config_values_of_a_wrong_type_are_named(tmp_path: Path, family: str, key: str, value: Any) -> None:
    model = make_model(family, tmp_path / "model")
    (model / "generation_config.json").unlink(missing_ok=True)
    edit_config(model, drop=("layer_types",), **{key: value})
    with pytest.raises(LoadError, match=key if key != "hidden_act" else "activation"):
        make_core(model)


def test_gemma3_without_layer_types_reads_one_pattern_everywhere(tmp_path: Path) -> None:
    # transformers writes `_sliding_window_pattern`, and reads only `sliding_window_pattern`.
    model = make_model("gemma3", tmp_path / "model")
    edit_config(model, drop=("layer_types", "rope_parameters"), _sliding_window_pattern=2, rope_local_base_freq=10_000)
    spec = make_core(model).runner.decoder.spec
    assert [layer.mixer.window for layer in spec.layers] == [8, 8, 8, 8]
    assert [group.name for group in spec.rotary_groups] == ["sliding_attention"]


def test_rotary_groups_of_different_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("gemma3", tmp_path / "model")
    parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }
    edit_config(model, rope_parameters=parameters)

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        half = torch.cat((-second, first), dim=-1)
        return torch.cat((turned * cos[:, None] + half * sin[:, None], rest), dim=-1)

    monkeypatch.setattr(
        "transformers.models.gemma3.modeling_gemma3.apply_rotary_pos_emb",
        lambda q, k, cos, sin, *_, **__: (rotate(q, cos, sin), rotate(k, cos, sin)),
    )
    core = make_core(model)
    assert [group.base.rotary_dim for group in core.runner.decoder.spec.rotary_groups] == [16, 8]
    request = greedy("a", range(3, 40), 6)
    result = run(core, [request])["a", 0]
    reference = Reference(model, specs_of(core, request), ["full_attention", "sliding_attention"])
    expected = reference.logits(request.prompt_token_ids + result.token_ids)[36:-1]
    assert (torch.stack(result.logits) - expected).abs().max() / expected.abs().max() < 1e-5


def test_biases_are_permuted_with_rows(tmp_path: Path) -> None:
    """An interleaved checkpoint whose matrices are permuted and whose biases are not."""
    helium = make_model("helium", tmp_path)
    tensors, decoder = load_file(helium / "model.safetensors"), make_core(helium).runner.decoder
    for i, layer in enumerate(decoder.layers):
        bias = layer.mixer.weights.qkv_bias
        assert bias is not None
        for name, heads, view in zip("qk", (4, 2), torch.split(bias.cpu(), [64, 32, 32])[:2], strict=True):
            stored = tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"]
            pairs = stored.view(heads, 8, 2)  # (2j, 2j + 1)
            assert torch.equal(view.view(heads, 2, 8), pairs.transpose(1, 2))
            assert not torch.equal(view, stored)


# -- changing checkpoints ----------------------------------------------------------------------------------------------

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("replaced", ["before the weights are read", "behind that"])
@pytest.mark.parametrize("of", ["model", "draft model"])
def test_replaced_checkpoint_is_refused(
    of: str, replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = make_model("llama", tmp_path / "model"), make_model("llama", tmp_path / "other", seed=1)
    fill = loader.fill_decoder

    def swapped(*given: Any) -> tuple[str, ...]:
        notices = fill(*given) if replaced == "behind that" else None
        shutil.copy(other / WEIGHTS, model / "new")
        (model / "new").rename(model / WEIGHTS)
        return fill(*given) if notices is None else notices

    config = engine_config(model, **({"speculative_model": str(model)} if of == "draft model" else {}))
    beside = loader.load_model(engine_config(model))

    def load(config: EngineConfig) -> loader.LoadedModel | None:
        return loader.load_draft(config, beside) if of == "draft model" else loader.load_model(config)

    load(config)
    monkeypatch.setattr(loader, "fill_decoder", swapped)
    with pytest.raises(LoadError, match="changed while it was read") as refused:
        load(config)
    assert str(refused.value).startswith("the draft model: ") == (of == "draft model")
    monkeypatch.setattr(loader, "fill_decoder", fill)
    assert load(config) is not None


# -- other tensor names ------------------------------------------------------------------------------------------------

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
    with pytest.raises(
        LoadError, match=r"speculation\.mtp`: the model is a DeepseekV3Model, which does not generate text"
    ):
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
    with pytest.raises(RequestError, match="does not generate text: use /v1/embeddings"):
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
        LoadError, match=r"contain no lm_head\.weight.*without its language-model head.*tie_word_embeddings"
    ):
        make_core(base)
