"""Adapters over GGUF files, whose q and k lie in another order than those that the adapter was trained beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.adapters import merged, save_adapter
from helpers.engines import greedy, make_core, run
from helpers.gguf_models import make_gguf
from helpers.tiny_models import make_model

from windlass.engine.api.adapters import AdapterSource


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
