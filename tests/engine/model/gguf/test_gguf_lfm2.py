"""LFM2 in GGUF files: they give the logits of the checkpoint they are of, and say what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.gguf_lfm2 import convert
from engine_helpers.gguf_logits import derived, logits
from helpers.tiny_models import make_model

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.gguf_description import describe_gguf

# The family, and what GGUF cannot say of its tiny model, so that a conversion would drop it.
CASES: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "lfm2_plain": {},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "lfm2_moe_unbiased": {"norm_topk_prob": True},
}


def converted(family: str, directory: Path, **options: Any) -> tuple[Path, Path]:
    """A checkpoint, and the directory that the server derives from a file of it."""
    source = make_model(family, directory / "hf", **CASES[family])
    return source, derived(convert(source, directory / "model.gguf", **options), directory / "derived")


@pytest.mark.parametrize("family", CASES)
def test_the_file_gives_the_logits_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    source, found = converted(family, tmp_path)
    wanted = logits(source)
    assert (logits(found) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_blocks_are_loaded(tmp_path: Path) -> None:
    source, found = converted("lfm2", tmp_path, kind="Q8_0")
    assert torch.nn.functional.cosine_similarity(logits(found), logits(source), dim=1).min() > 0.99


def test_a_file_all_of_whose_layers_attend(tmp_path: Path) -> None:
    source = make_model("lfm2_plain", tmp_path / "hf", layer_types=["full_attention"] * 5)
    found = derived(
        convert(source, tmp_path / "model.gguf", **{"lfm2.attention.head_count_kv": 2}), tmp_path / "derived"
    )
    wanted = logits(source)
    assert (logits(found) - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 2]}, "head_count_kv has 2 entries for 5 layers"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 0, 2, 0, 1]}, "head_count_kv differs from layer to layer"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0] * 5}, "no layer is full_attention"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 2, 2, 0, 2]}, "does not belong to the model|is missing"),
        ("lfm2", {"lfm2.shortconv.l_cache": 0}, "shortconv.l_cache must be a positive integer"),
        ("lfm2", {"lfm2.shortconv.l_cache": 4}, "has the shape"),
        ("lfm2", {"lfm2.attention.sliding_window": 8}, "sliding_window=8, which makes it another model"),
        ("lfm2_moe", {"lfm2moe.expert_gating_func": 1}, "experts of this architecture are chosen by sigmoids"),
        ("lfm2_moe", {"lfm2moe.expert_used_count": 9}, "do not go together"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = make_model(family, tmp_path / "hf", **CASES[family])
    with pytest.raises(LoadError, match=message) as caught:
        describe_gguf([convert(source, tmp_path / "model.gguf", **changes)])
    assert "\n" not in str(caught.value)
