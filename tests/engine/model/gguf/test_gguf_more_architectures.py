"""Further families in GGUF files: the file gives the logits that the checkpoint it was made from gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_helpers.gguf_logits import derived, logits
from engine_helpers.gguf_more import convert
from helpers.tiny_models import make_model
from safetensors.torch import load_file

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.gguf_description import describe_gguf

# The family, and what GGUF cannot say of its tiny model, so that a conversion would drop it.
CASES: dict[str, dict[str, Any]] = {
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "starcoder2": {"sliding_window": None},
    "phi": {},
    "gpt_neox": {},
    "gpt_neox_in_turn": {},
    "stablelm": {},
    "stablelm_parallel": {},
    "nemotron": {"attention_bias": False, "mlp_bias": False},
    "falcon": {"bias": False, "tie_word_embeddings": True},
    "falcon_one_norm": {"tie_word_embeddings": True},
    "falcon_multi_query": {"bias": False},
    "olmo": {"attention_bias": False},
    "olmo2": {"attention_bias": False},
    "olmo3": {},
    "cohere": {"attention_bias": False},
    "cohere_normed": {},
    "cohere2": {},
    "granite": {},
    "granite4": {},
    "exaone4": {},
    "exaone4_full": {},
    "internlm2": {},
    "seed_oss": {"mlp_bias": False, "attention_out_bias": False},
    "arcee": {},
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


@pytest.mark.parametrize(
    ("family", "switch"),
    [
        ("falcon", "fused_in_parts"),
        ("gemma2", "norms_with_offset"),
        ("olmo", "interleaved"),
        ("internlm2", "interleaved"),
    ],
)
def test_what_was_done_to_the_tensors_counts(family: str, switch: str, tmp_path: Path) -> None:
    found = converted(make_model(family, tmp_path / "hf", **CASES[family]), tmp_path / "gguf")
    wanted = logits(found)
    index = json.loads((found / "gguf.json").read_text())
    assert index[switch] is True
    (found / "gguf.json").write_text(json.dumps({**index, switch: False}))
    assert (logits(found) - wanted).abs().max() > 1e-3 * wanted.abs().max()


def test_norms_of_a_falcon_are_told_apart_by_their_names(tmp_path: Path) -> None:
    source = make_model("falcon", tmp_path / "hf", **CASES["falcon"])
    described = describe_gguf([convert(source, tmp_path / "model.gguf")])
    assert described.config["num_ln_in_parallel_attn"] == 2
    tensors, data = described.index["tensors"], (tmp_path / "model.gguf").read_bytes()
    original = load_file(source / "model.safetensors")
    for norm in ("ln_attn", "ln_mlp"):
        name = f"transformer.h.1.{norm}.weight"
        entry = tensors[name]
        assert data[entry["begin"] : entry["end"]] == original[name].numpy().tobytes()


def test_a_granite_that_llama_cpp_would_not_rotate_is_refused(tmp_path: Path) -> None:
    source, name = make_model("granite", tmp_path / "hf"), "granite.rope.scaling.finetuned"
    describe_gguf([convert(source, tmp_path / "rotating.gguf", **{name: True})])
    with pytest.raises(LoadError, match=f"{name}=false, by which no layer rotates"):
        describe_gguf([convert(source, tmp_path / "still.gguf", **{name: False})])
