"""Checkpoints whose files and config.json contradict each other or use unusual values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file

from windlass import kernels
from windlass.engine.errors import LoadError


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
