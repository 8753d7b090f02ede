"""Files of state-space models (Mamba 2): hostile and quantized ones."""

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
    return make_model("granite4_h", tmp_path_factory.mktemp("granite4_h"))


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("conv1d.weight", (224, 4)),
        ("conv1d.weight", (224, 1, 3)),
        ("conv1d.bias", (224, 1)),
        ("in_proj.weight", (352, 64)),
        ("in_proj.bias", (224,)),
        ("A_log", (8, 1)),
        ("D", (4,)),
        ("dt_bias", (16,)),
        ("norm.weight", (4, 32)),
        ("out_proj.weight", (128, 64)),
    ],
)
def test_tensors_of_another_shape_are_refused(tensor: str, shape: tuple[int, ...], model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    other = rewritten(model, tmp_path / "other", {**weights, f"model.layers.3.mamba.{tensor}": torch.zeros(shape)})
    with pytest.raises(LoadError, match=rf"layers\.3\.mamba\.{tensor}' has shape"):
        describe_model(engine_config(other))


@pytest.mark.parametrize("missing", ["1.mamba.A_log", "1.mamba.conv1d.bias", "2.self_attn.q_proj.weight"])
def test_tensors_that_are_missing_are_named(missing: str, model: Path, tmp_path: Path) -> None:
    weights = {n: w for n, w in load_file(model / "model.safetensors").items() if n != f"model.layers.{missing}"}
    with pytest.raises(LoadError, match=f"{missing}' is missing"):
        describe_model(engine_config(rewritten(model, tmp_path / "other", weights)))


def test_what_fades_is_float32_whatever_matrices_are(model: Path, tmp_path: Path) -> None:
    weights = {name: one.bfloat16() for name, one in load_file(model / "model.safetensors").items()}
    loaded = load_model(engine_config(rewritten(model, tmp_path / "narrow", weights), device="cpu", dtype="bfloat16"))
    found = loaded.decoder.weights()
    for layer in (0, 1, 3):
        own = {name.removeprefix(f"model.layers.{layer}.mamba."): one.float() for name, one in weights.items()}
        expected = {
            "convolution": own["conv1d.weight"][:, 0],
            "convolution_bias": own["conv1d.bias"],
            "rate": own["A_log"].exp(),
            "step_bias": own["dt_bias"],
            "skip": own["D"],
            "norm": own["norm.weight"],
        }
        for name, wanted in expected.items():
            one = found[f"layers.{layer}.{name}"]
            assert isinstance(one, Tensor) and torch.equal(one, wanted), name
