"""Adapters with GGUF files, whose rows of q and k have another order than in the model that the adapter was trained with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_helpers.gguf_checkpoints import convert, derived
from engine_helpers.rewritten_weights import logits
from helpers import gguf_conversion
from helpers.adapters import merged, save_adapter
from helpers.engines import greedy, make_core, run
from helpers.gguf_models import make_gguf
from helpers.tiny_models import make_model
from helpers.tiny_unrotated import make_unrotated

from windlass.engine.errors import LoadError
from windlass.engine.interface.model_info import AdapterSource


@pytest.mark.parametrize("interleaved", [True, False])
def test_rows_follow_the_original_order(tmp_path: Path, interleaved: bool) -> None:
    model = make_model("llama", tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model)
    made = make_gguf(model, tmp_path / "gguf", lambda name: "F32", interleaved=interleaved)
    core = make_core(made.derived, lora=(AdapterSource(1, "a", str(adapter)),))
    found = run(core, [greedy("r", range(3, 20), adapter=1)])["r", 0]
    wanted = run(make_core(merged(model, adapter, tmp_path / "merged")), [greedy("r", range(3, 20))])["r", 0]
    assert found.token_ids == wanted.token_ids
    a, b = torch.stack(found.logits), torch.stack(wanted.logits)
    assert (a - b).abs().max() < 1e-5 * b.abs().max()


def smollm3(family: str, directory: Path) -> Path:
    """As in GGUF, which does not specify which layers do not rotate."""
    return make_model(family, directory, no_rope_layer_interval=4, use_sliding_window=False, num_hidden_layers=5)


@pytest.mark.parametrize(
    ("family", "make", "convert"),
    [
        ("smollm3", smollm3, gguf_conversion.convert),
        ("cohere2", make_model, convert),
        ("granite4_h_nope", make_unrotated, convert),
        ("nemotron_h", make_unrotated, convert),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_rows_of_layers_that_do_not_rotate_follow_it_too(
    family: str, make: Callable[[str, Path], Path], convert: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """The converter also reorders rows of SmolLM3, Granite and Nemotron H; Cohere's have the same order in both."""
    model = make(family, tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model, ["q_proj", "k_proj"])
    found = logits(derived(convert(model, tmp_path / "model.gguf"), tmp_path / "derived"), adapter)
    wanted = logits(merged(model, adapter, tmp_path / "merged"))
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_adapters_are_refused_for_weights_with_factors(tmp_path: Path) -> None:
    model = make_model("falcon_h1", tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model)
    directory = derived(convert(model, tmp_path / "model.gguf"), tmp_path / "derived")
    with pytest.raises(LoadError, match="multiplied by factors that it does not name"):
        logits(directory, adapter)
