"""Mixtures of experts in GGUF files: the file gives the logits that the checkpoint it was made from gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.gguf_experts import convert
from engine_helpers.gguf_logits import PROMPT, derived, logits
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.kernels import FORMS, BlockWeight

# The family, and what GGUF cannot say of its tiny model, so that a conversion would drop it.
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": False, "mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "olmoe": {},
}


def converted(source: Path, directory: Path, **options: Any) -> Path:
    """The directory that the server derives from a file of the model in `source`."""
    directory.mkdir()
    return derived(convert(source, directory / "model.gguf", **options), directory)


@pytest.mark.parametrize("family", CASES)
def test_the_file_gives_the_logits_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    source = make_model(family, tmp_path / "hf", **CASES[family])
    wanted, found = logits(source), logits(converted(source, tmp_path / "gguf"))
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_files_from_before_experts_were_one_tensor(tmp_path: Path) -> None:
    source = make_model("mixtral", tmp_path / "hf", **CASES["mixtral"])
    wanted, found = logits(source), logits(converted(source, tmp_path / "gguf", stacked=False))
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gates_of_experts_beside_what_they_gate(kind: str, tmp_path: Path) -> None:
    source = make_model("qwen3_moe", tmp_path / "hf", **CASES["qwen3_moe"], moe_intermediate_size=64)
    wanted, found = (
        logits(converted(source, tmp_path / str(beside), kind=kind, gate_beside_up=beside)) for beside in (False, True)
    )
    assert torch.equal(found, wanted)


def test_blocks_of_experts_are_kept_as_they_are(tmp_path: Path) -> None:
    source = make_model("qwen3_moe", tmp_path / "hf", **CASES["qwen3_moe"], moe_intermediate_size=64)
    core = make_core(converted(source, tmp_path / "gguf", kind="Q8_0"), dtype="auto")
    weight = core.runner.decoder.weights()["layers.1.experts.4.gate_up"]
    assert isinstance(weight, BlockWeight) and weight.form == FORMS["q8_0"]
    found, wanted = run(core, [greedy("a", PROMPT, 1)])["a", 0].logits[0], logits(source)[0]
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.99
