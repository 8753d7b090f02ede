"""Granite 4 H in GGUF files: they give the logits of the checkpoint they are of, and say what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.gguf_granite_hybrid import convert
from engine_helpers.gguf_logits import derived, logits
from helpers.tiny_models import make_model
from helpers.tiny_unrotated import make_unrotated

from windlass.engine.errors import LoadError
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.gguf.gguf_description import describe_gguf

FAMILIES = ["granite4_h", "granite4_h_experts", "granite4_h_nope", "granite4_h_nope_experts"]
PREFIX = "granitehybrid"


def checkpoint(family: str, directory: Path) -> Path:
    return (make_unrotated if "nope" in family else make_model)(family, directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_gives_the_logits_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    source = checkpoint(family, tmp_path / "hf")
    file = convert(source, tmp_path / "model.gguf")
    wanted, found = logits(source), logits(derived(file, tmp_path / "derived"))
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    described = describe_gguf([file])
    rotates = read_spec(described.config, described.generation).rotary_groups[0].base.unrotated is None
    assert rotates == ("nope" not in family)


def test_blocks_are_loaded(tmp_path: Path) -> None:
    source = checkpoint("granite4_h_nope", tmp_path / "hf")
    found = derived(convert(source, tmp_path / "model.gguf", kind="Q8_0"), tmp_path / "derived")
    assert torch.nn.functional.cosine_similarity(logits(found), logits(source), dim=1).min() > 0.99


def test_where_a_file_does_not_say_layers_that_attend_rotate(tmp_path: Path) -> None:
    source = checkpoint("granite4_h_nope", tmp_path / "hf")
    file = convert(source, tmp_path / "model.gguf", **{f"{PREFIX}.rope.scaling.finetuned": None})
    assert describe_gguf([file]).config["position_embedding_type"] == "rope"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count_kv": [0, 2]}, "head_count_kv has 2 entries for 5 layers"),
        ({"attention.head_count_kv": [0] * 5}, "no layer is full_attention"),
        ({"attention.head_count_kv": [0, 0, 2, 0, 1]}, "head_count_kv differs from layer to layer"),
        ({"attention.head_count_kv": [0, 2, 2, 0, 2]}, "does not belong to this model|is missing"),
        ({"ssm.inner_size": 100}, "ssm.inner_size 100 is not a multiple of granitehybrid.ssm.time_step_rank 8"),
        ({"ssm.inner_size": 96}, "recurrent layers have 96 values, which is not a multiple of the model's 64"),
        ({"ssm.inner_size": 192}, "has the shape"),
        ({"ssm.time_step_rank": 3}, "ssm.inner_size 128 is not a multiple of granitehybrid.ssm.time_step_rank 3"),
        ({"ssm.time_step_rank": 16}, "has the shape"),
        ({"ssm.group_count": 3}, "mamba_n_heads 8 is not a multiple of mamba_n_groups 3"),
        ({"ssm.group_count": 0}, "ssm.group_count must be a positive integer"),
        ({"ssm.state_size": 2**31}, "ssm.state_size must be a positive integer"),
        ({"ssm.state_size": 2**20}, "mamba_d_state must be a positive integer up to 65536"),
        ({"ssm.conv_kernel": 9}, "mamba_d_conv 9 is not supported: it may be 2 to 8"),
        ({"ssm.conv_kernel": 3}, "has the shape"),
        ({"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms=true, which makes it another model"),
        ({"attention.sliding_window": 8}, "sliding_window=8, which makes it another model"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = checkpoint("granite4_h", tmp_path / "hf")
    file = convert(source, tmp_path / "model.gguf", **{f"{PREFIX}.{key}": value for key, value in changes.items()})
    with pytest.raises(LoadError, match=message) as caught:
        describe_gguf([file])
    assert "\n" not in str(caught.value)
