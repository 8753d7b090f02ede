"""The list of a model's weights: it names the tensors that transformers saves, and the decoder has exactly these weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.engines import make_core
from helpers.tiny_models import FAMILIES, make_model
from safetensors.torch import load_file


@pytest.mark.parametrize("family", FAMILIES)
def test_the_list_names_the_checkpoint_and_the_decoder(family: str, tmp_path: Path) -> None:
    saved = {name: list(t.shape) for name, t in load_file(make_model(family, tmp_path) / "model.safetensors").items()}
    decoder = make_core(tmp_path).runner.decoder
    specs = decoder.spec.weights()
    stored = [(tensor.name, tensor.rows, spec) for spec in specs for tensor in spec.stored]
    assert {name: [rows, *spec.shape[1:]] for name, rows, spec in stored} == saved
    assert len(stored) == len(saved)
    assert {name: tuple(weight.shape) for name, weight in decoder.weights().items()} == {
        spec.name: spec.shape for spec in specs
    }
    for spec in specs:
        assert sum(tensor.rows for tensor in spec.stored) == spec.shape[0]
