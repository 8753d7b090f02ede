"""Recurrent models of each kind: quantized, from the weight cache, with random weights, with adapters, and refused splits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers.rewritten_weights import logits
from helpers.adapters import merged, save_adapter
from helpers.configs import engine_config
from helpers.engines import make_core
from helpers.tiny_models import make_model

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.preflight import DeviceCapabilities, prepare_model

TOLERANCE = 1e-5  # of the largest logit
MATRICES = {
    "lfm2": ("q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"),
    "granite4_h": ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "input_linear", "output_linear"),
}


@pytest.fixture(scope="module", params=sorted(MATRICES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(family, tmp_path_factory.mktemp(family))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_from_the_cache_are_the_same(quantization: str, model: Path, tmp_path: Path) -> None:
    options = {"quantization": quantization, "weight_cache": str(tmp_path)}
    first = logits(model, **options)
    assert any("quantized weights read from" in notice for notice in make_core(model, **options).info.notices)
    assert torch.equal(logits(model, **options), first)


def test_random_weights_give_logits(model: Path) -> None:
    found = logits(model, load_format="dummy")
    assert found.isfinite().all() and float(found.std()) > 0.1


@pytest.mark.parametrize("chosen", ["all", "in_proj", "out_proj"])
def test_an_adapter_changes_every_matrix(chosen: str, family: str, model: Path, tmp_path: Path) -> None:
    targets = list(MATRICES[family]) if chosen == "all" else [chosen]
    adapter = save_adapter(tmp_path / "adapter", model, targets)
    wanted = logits(merged(model, adapter, tmp_path / "merged"))
    assert (logits(model, adapter) - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    assert (logits(model) - wanted).abs().max() > 100 * TOLERANCE * wanted.abs().max()


def test_ranks_are_refused(model: Path) -> None:
    with pytest.raises(LoadError, match="a layer that carries a state is not split: leave it out"):
        prepare_model(engine_config(model, tensor_parallel=2), DeviceCapabilities("cpu", True))
