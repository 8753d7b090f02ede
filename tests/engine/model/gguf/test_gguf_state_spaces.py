"""Falcon H1, Nemotron H and 3 in GGUF files: they give the logits that transformers gives of the checkpoint they are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from engine_helpers.gguf_logits import PROMPT, derived, logits
from engine_helpers.gguf_state_spaces import architecture, convert
from gguf.quants import dequantize
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from helpers.tiny_unrotated import logits_of, make_unrotated

from windlass.engine.cache.kv_cache_spec import KVGroupSpec, StateGroupSpec
from windlass.engine.errors import LoadError
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.gguf.gguf_description import describe_gguf, read_gguf_config
from windlass.engine.model.gguf.tensor_mapping import map_tensors
from windlass.engine.model.loading.gguf_index import GGUFLayout, to_gguf_spec
from windlass.engine.model.loading.safetensors_header import TensorLocation

FALCON = ("falcon_h1", "falcon_h1_normed")
NEMOTRON = ("nemotron_h", "nemotron_h_plain", "nemotron_h_experts")
# What GGUF cannot say: it has the groups of experts and not how many of them are chosen.
NOT_WRITTEN: dict[str, dict[str, Any]] = {"nemotron_h_experts": {"n_group": 1, "topk_group": 1}}


def checkpoint(family: str, directory: Path) -> Path:
    return (make_unrotated if family in NEMOTRON else make_model)(family, directory, **NOT_WRITTEN.get(family, {}))


@pytest.mark.parametrize("family", [*FALCON, *NEMOTRON])
def test_the_file_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    source = checkpoint(family, tmp_path / "hf")
    core = make_core(derived(convert(source, tmp_path / "model.gguf"), tmp_path / "derived"))
    request = greedy("a", PROMPT, 3)
    result = run(core, [request])["a", 0]
    text = PROMPT + result.token_ids
    if family in NEMOTRON:
        reference = logits_of(source, text)
    else:
        names = [group.name for group in core.runner.decoder.spec.rotary_groups]
        reference = Reference(source, specs_of(core, request), names).logits(text)
    wanted = reference[len(PROMPT) - 1 : -1]
    assert (torch.stack(result.logits) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_a_head_with_a_factor_that_nobody_tells_is_noticed(tmp_path: Path) -> None:
    """As llama.cpp has it: the embedding has its own factor in it, and lacks the head's."""
    source = make_model(FALCON[0], tmp_path / "hf", tie_word_embeddings=True)
    core = make_core(derived(convert(source, tmp_path / "model.gguf"), tmp_path / "derived"))
    (notice,) = core.runner.decoder.spec.notices
    assert "a factor in it that the file does not name" in notice and not make_core(source).runner.decoder.spec.notices
    config = json.loads((source / "config.json").read_text())
    found = run(core, [greedy("a", PROMPT, 1)])["a", 0].logits[0]
    wanted = logits(source)[0] * config["embedding_multiplier"] / config["lm_head_multiplier"]
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_a_published_file() -> None:
    """In the shape of nvidia/NVIDIA-Nemotron-3-Nano-4B-GGUF: layers attend by their heads of keys, and no width is a multiple."""
    attending, dense = (12, 17, 24, 32), (1, 3, 5, 8, 10, 13, 15, 18, 20, 22, 25, 27, 29, 33, 37, 39, 41)
    sizes = {
        **{"block_count": 42, "context_length": 2**20, "embedding_length": 3136, "vocab_size": 131_072},
        **{"attention.head_count": 40, "attention.key_length": 128, "attention.value_length": 128},
        "attention.head_count_kv": [8 if i in attending else 0 for i in range(42)],
        "feed_forward_length": [12_544 if i in dense else 0 for i in range(42)],
        **{"attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 78, "rope.scaling.finetuned": False},
        **{"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 8},
        **{"ssm.inner_size": 7680, "ssm.time_step_rank": 96},
    }
    shapes = {"token_embd.weight": (131_072, 3136), "output.weight": (131_072, 3136), "output_norm.weight": (3136,)}
    for i in range(42):
        own: dict[str, tuple[int, ...]] = {"attn_norm.weight": (3136,)}
        if i in attending:
            own |= {"attn_q.weight": (5120, 3136), "attn_k.weight": (1024, 3136), "attn_v.weight": (1024, 3136)}
            own |= {"attn_output.weight": (3136, 5120)}
        elif i in dense:
            own |= {"ffn_up.weight": (12_544, 3136), "ffn_down.weight": (3136, 12_544)}
        else:
            own |= {"ssm_in.weight": (17_504, 3136), "ssm_conv1d.weight": (9728, 4), "ssm_conv1d.bias": (9728,)}
            own |= {"ssm_a": (96, 1), "ssm_d": (96, 1), "ssm_dt.bias": (96,), "ssm_norm.weight": (8, 960)}
            own |= {"ssm_out.weight": (3136, 7680)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    tensors = {name: TensorLocation(name, Path(), "F32", shape, 0, 0) for name, shape in shapes.items()}
    metadata = {f"nemotron_h.{key}": value for key, value in sizes.items()} | {"general.architecture": "nemotron_h"}
    facts = read_gguf_config(metadata, tensors, {})
    assert not any("rope" in key or "rotary" in key for key in facts.config)
    spec = read_spec(facts.config)
    assert not spec.notices and spec.kv_groups == (KVGroupSpec(attending, 8, 128, None),)
    states = tuple(i for i in range(42) if i not in attending + dense)
    assert spec.state_group == StateGroupSpec(states, 9728, 4, 96, 128, 80)
    held = to_gguf_spec(spec, GGUFLayout())
    assert len(map_tensors(tensors, facts.family, held, {})) == len(tensors) == 263


@pytest.mark.parametrize("family", [FALCON[0], NEMOTRON[0], NEMOTRON[2]])
def test_blocks_count_as_the_numbers_they_hold(family: str, tmp_path: Path) -> None:
    """Beside the file of the dequantized numbers, from which rounded activations alone tell it apart."""
    source = checkpoint(family, tmp_path / "hf")
    blocks = convert(source, tmp_path / "blocks.gguf", kind="Q4_0")
    tensors = gguf.GGUFReader(blocks).tensors
    assert {"F32", "Q4_0"} == {tensor.tensor_type.name for tensor in tensors}
    held = {one.name: dequantize(one.data, one.tensor_type).reshape(one.shape[::-1]) for one in tensors}
    numbers = convert(source, tmp_path / "numbers.gguf", tensors=held)
    found, wanted, unrounded = (
        logits(directory)[0]
        for directory in (derived(blocks, tmp_path / "blocks"), derived(numbers, tmp_path / "numbers"), source)
    )
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.9995 > torch.cosine_similarity(wanted, unrounded, dim=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.inner_size": 100}, "ssm.inner_size 100 is not a multiple of falcon-h1.ssm.time_step_rank 6"),
        ({"ssm.inner_size": 192}, "has the shape"),
        ({"ssm.time_step_rank": 12}, "has the shape"),
        ({"ssm.group_count": 4}, "mamba_n_heads 6 is not a multiple of mamba_n_groups 4"),
        ({"ssm.group_count": 2}, "has the shape"),
        ({"ssm.state_size": None}, "ssm.state_size is missing"),
        ({"ssm.conv_kernel": 9}, "mamba_d_conv 9 is not supported: it may be 2 to 8"),
        ({"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms=true, which makes it another model"),
        ({"attention.head_count_kv": [2, 2, 0, 2]}, "head_count_kv differs from layer to layer"),
        ({"expert_count": 4}, "which makes it a mixture of experts"),
        ({"mlp_gate_multiplier": 0.75}, "has falcon-h1.mlp_gate_multiplier, which does not show whether its weights"),
        ({"block_count": 3}, r"tensor blk\.3\.\S+ is of a layer after the 3 of falcon-h1.block_count"),
    ],
    ids=str,
)
def test_what_makes_no_sense_of_falcon_h1_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(FALCON[0], changes, message, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count_kv": [0, 2]}, "head_count_kv has 2 entries for 6 layers"),
        ({"feed_forward_length": [0, 96]}, "feed_forward_length has 2 entries for 6 layers"),
        ({"feed_forward_length": [0, 96, 0, 0, 0, 48]}, "feed_forward_length differs from layer to layer"),
        ({"feed_forward_length": [0] * 6}, "feed_forward_length is missing"),
        (
            {"feed_forward_length": 96},
            "layer 2 has nemotron_h.attention.head_count_kv and nemotron_h.feed_forward_length",
        ),
        ({"attention.head_count_kv": [0] * 6}, "no layer is full_attention"),
        ({"attention.head_count_kv": [0, 0, 0, 2, 0, 0]}, "does not belong to the model|is missing"),
        ({"ssm.time_step_rank": 5}, "ssm.inner_size 96 is not a multiple of nemotron_h.ssm.time_step_rank 5"),
        ({"ssm.group_count": 4}, "mamba_num_heads 6 is not a multiple of n_groups 4"),
        ({"expert_count": 8}, "which makes it a mixture of experts"),
    ],
    ids=str,
)
def test_what_makes_no_sense_of_nemotron_h_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(NEMOTRON[0], changes, message, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": 6}, "for 6 experts"),
        ({"expert_used_count": 9}, "do not go together"),
        ({"expert_shared_feed_forward_length": 40}, "has the shape"),
        ({"expert_gating_func": 1}, "experts of this architecture are chosen by sigmoids"),
        ({"expert_weights_norm": 1}, "norm_topk_prob must be true or false"),
        ({"expert_group_count": 4}, "expert_group_used_count is missing"),
        ({"moe_latent_size": 32}, "moe_latent_size is 32: experts whose input is narrower"),
        ({"feed_forward_length": [0, 40, 0, 0, 0]}, "does not belong to the model|is missing"),
    ],
    ids=str,
)
def test_what_makes_no_sense_of_experts_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(NEMOTRON[2], changes, message, tmp_path)


def test_what_is_said_of_a_block_that_predicts_further_tokens_is_left_out(tmp_path: Path) -> None:
    source = checkpoint(NEMOTRON[2], tmp_path / "hf")
    longer = {"block_count": 6, "nextn_predict_layers": 1}
    longer |= {"attention.head_count_kv": [0, 0, 2, 0, 0, 2], "feed_forward_length": [0, 40, 0, 0, 40, 40]}
    files = [
        convert(
            source, tmp_path / f"{len(changes)}.gguf", **{f"nemotron_h_moe.{key}": one for key, one in changes.items()}
        )
        for changes in ({}, longer)
    ]
    shorter, found = (describe_gguf([file]) for file in files)
    assert found.config == shorter.config and found.index["tensors"].keys() == shorter.index["tensors"].keys()


def refused(family: str, changes: dict[str, Any], message: str, directory: Path) -> None:
    source = checkpoint(family, directory / "hf")
    prefix = architecture(json.loads((source / "config.json").read_text()))
    file = convert(source, directory / "model.gguf", **{f"{prefix}.{key}": value for key, value in changes.items()})
    with pytest.raises(LoadError, match=message) as caught:
        describe_gguf([file])
    assert "\n" not in str(caught.value)
