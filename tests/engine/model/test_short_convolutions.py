"""Files of models whose only states are inputs of short convolutions: hostile and quantized ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers.rewritten_weights import rewritten
from helpers.configs import engine_config
from helpers.tiny_models import make_model
from safetensors.torch import load_file
from torch import Tensor

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.model_description import describe_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("lfm2", tmp_path_factory.mktemp("lfm2"))


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("conv.conv.weight", (64, 3)),
        ("conv.conv.weight", (64, 1, 4)),
        ("conv.conv.bias", (64, 1)),
        ("conv.in_proj.weight", (128, 64)),
        ("conv.in_proj.bias", (64,)),
        ("conv.out_proj.weight", (64, 192)),
    ],
)
def test_tensors_of_another_shape_are_refused(tensor: str, shape: tuple[int, ...], model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    other = rewritten(model, tmp_path / "other", {**weights, f"model.layers.3.{tensor}": torch.zeros(shape)})
    with pytest.raises(LoadError, match=rf"layers\.3\.{tensor}' has shape"):
        describe_model(engine_config(other))


@pytest.mark.parametrize("missing", ["1.conv.conv.bias", "1.conv.conv.weight", "2.self_attn.q_layernorm.weight"])
def test_tensors_that_are_missing_are_named(missing: str, model: Path, tmp_path: Path) -> None:
    weights = {n: w for n, w in load_file(model / "model.safetensors").items() if n != f"model.layers.{missing}"}
    with pytest.raises(LoadError, match=f"{missing}' is missing"):
        describe_model(engine_config(rewritten(model, tmp_path / "other", weights)))


def test_convolutions_are_float32_whatever_matrices_are(model: Path, tmp_path: Path) -> None:
    weights = {name: one.bfloat16() for name, one in load_file(model / "model.safetensors").items()}
    loaded = load_model(engine_config(rewritten(model, tmp_path / "narrow", weights), device="cpu", dtype="bfloat16"))
    found = loaded.decoder.weights()
    for layer in (0, 1, 3):
        stored = f"model.layers.{layer}.conv.conv"
        taps, bias = found[f"layers.{layer}.convolution"], found[f"layers.{layer}.convolution_bias"]
        assert isinstance(taps, Tensor) and torch.equal(taps, weights[f"{stored}.weight"].float()[:, 0])
        assert isinstance(bias, Tensor) and torch.equal(bias, weights[f"{stored}.bias"].float())
