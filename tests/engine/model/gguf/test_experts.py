"""Mixtures of experts in GGUF files: the file gives the logits that the checkpoint it was made from gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import greedy, make_core, run
from helpers.gguf_experts import convert
from helpers.tiny_models import make_model

from windlass.engine.model.families.reading import read_spec
from windlass.engine.model.gguf.description import describe_gguf
from windlass.kernels import FORMS, BlockWeight

PROMPT = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(0)).tolist()
# The family, and what GGUF cannot say of its tiny model, so that a conversion would drop it.
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": False, "mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "olmoe": {},
}


def derived(source: Path, directory: Path, **options: Any) -> Path:
    """The directory that the server derives from the file."""
    directory.mkdir()
    described = describe_gguf([convert(source, directory / "model.gguf", **options)])
    assert not read_spec(described.config, described.generation).notices
    (directory / "config.json").write_text(json.dumps(described.config))
    (directory / "gguf.json").write_text(json.dumps(described.index))
    return directory


def logits(directory: Path) -> torch.Tensor:
    return torch.stack(run(make_core(directory), [greedy("a", PROMPT, 3)])["a", 0].logits)


@pytest.mark.parametrize("family", CASES)
def test_the_file_gives_the_logits_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    source = make_model(family, tmp_path / "hf", **CASES[family])
    wanted, found = logits(source), logits(derived(source, tmp_path / "gguf"))
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_files_from_before_experts_were_one_tensor(tmp_path: Path) -> None:
    source = make_model("mixtral", tmp_path / "hf", **CASES["mixtral"])
    wanted, found = logits(source), logits(derived(source, tmp_path / "gguf", stacked=False))
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_blocks_of_experts_are_kept_as_they_are(tmp_path: Path) -> None:
    source = make_model("qwen3_moe", tmp_path / "hf", **CASES["qwen3_moe"], moe_intermediate_size=64)
    core = make_core(derived(source, tmp_path / "gguf", kind="Q8_0"), dtype="auto")
    weight = core.runner.decoder.weights()["layers.1.experts.4.gate_up"]
    assert isinstance(weight, BlockWeight) and weight.form == FORMS["q8_0"]
    found, wanted = run(core, [greedy("a", PROMPT, 1)])["a", 0].logits[0], logits(source)[0]
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.99
