"""Gemma 4 in GGUF files: the file gives the logits that the checkpoint it was made from gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers.gguf_gemma4 import convert
from engine_helpers.gguf_logits import PROMPT, derived, logits
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file

from windlass.engine.errors import LoadError
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.gguf.gguf_description import describe_gguf
from windlass.kernels import FORMS, BlockWeight

# What a conversion drops: there are no biases in such files.
CASES: dict[str, dict[str, Any]] = {"gemma4_31b": {}, "gemma4_e2b": {"attention_bias": False}, "gemma4_26b": {}}
# Every width is a multiple of 32, the blocks of Q8_0.
BLOCKS = {"hidden_size_per_layer_input": 32}


def converted(source: Path, directory: Path, **options: Any) -> Path:
    """The directory that the server derives from a file of the model in `source`."""
    directory.mkdir()
    return derived(convert(source, directory / "model.gguf", **options), directory)


def made(family: str, directory: Path, **changes: Any) -> Path:
    return make_model(family, directory, **CASES[family], **changes)


@pytest.mark.parametrize("family", CASES)
def test_the_file_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    source = made(family, tmp_path / "hf")
    request, original = greedy("a", PROMPT, 3), make_core(source)
    result = run(make_core(converted(source, tmp_path / "gguf")), [request])["a", 0]
    names = [group.name for group in original.runner.decoder.spec.rotary_groups]
    reference = Reference(source, specs_of(original, request), names)
    wanted = reference.logits(PROMPT + result.token_ids)[len(PROMPT) - 1 : -1]
    assert (torch.stack(result.logits) - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", CASES)
def test_the_spec_is_that_of_the_original(family: str, tmp_path: Path) -> None:
    source = made(family, tmp_path / "hf")
    wanted = read_spec(json.loads((source / "config.json").read_text()))
    described = describe_gguf([convert(source, tmp_path / "model.gguf")])
    assert read_spec(described.config, described.generation) == wanted


@pytest.mark.parametrize(
    ("family", "options"), [("gemma4_26b", {"apart": True}), ("gemma4_e2b", {"unused": True})], ids=str
)
def test_other_forms_are_the_same_model(family: str, options: dict[str, bool], tmp_path: Path) -> None:
    """Experts' gate and up as two tensors; keys and values of layers that read those of others."""
    source = made(family, tmp_path / "hf")
    found = converted(source, tmp_path / "gguf", **options)
    names = json.loads((found / "gguf.json").read_text())["tensors"]
    assert "model.layers.5.self_attn.k_proj.weight" not in names
    assert torch.equal(logits(found), logits(converted(source, tmp_path / "plain")))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gemma4_31b", "attention.sliding_window", 5),
        ("gemma4_31b", "final_logit_softcapping", 3.0),
        ("gemma4_31b", "rope.freq_base", 100.0),
        ("gemma4_31b", "rope.freq_base_swa", 100.0),
        ("gemma4_26b", "expert_used_count", 2),
    ],
)
def test_what_the_file_says_counts(family: str, key: str, value: Any, tmp_path: Path) -> None:
    source = made(family, tmp_path / "hf")
    wanted = logits(converted(source, tmp_path / "plain"))
    found = logits(converted(source, tmp_path / "gguf", **{f"gemma4.{key}": value}))
    assert (found - wanted).abs().max() > 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("share", [1 / 16, 0.3125, 1.0])
def test_factors_tell_the_pairs_that_turn(share: float, tmp_path: Path) -> None:
    source = made("gemma4_31b", tmp_path / "hf")
    turning = int(16 * share)
    factors = np.array([1.0] * turning + [1e30] * (16 - turning), dtype=np.float32)
    described = describe_gguf([convert(source, tmp_path / "model.gguf", more={"rope_freqs.weight": factors})])
    assert described.config["rope_parameters"]["full_attention"] == {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": share,
    }
    group = next(one for one in read_spec(described.config).rotary_groups if one.name == "full_attention")
    assert group.base.rotating_pairs == (turning if turning < 16 else None)


FACTORS = np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32)
_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads of fewer layers": ("31b", {"attention.head_count_kv": [2, 1]}, "head_count_kv has 2 entries for 4 layers"),
    "heads of more": ("31b", {"attention.head_count_kv": [2, 1] * 3}, "head_count_kv has 6 entries for 4 layers"),
    "heads that differ": ("31b", {"attention.head_count_kv": [2, 1, 4, 1]}, "differs among layers of one kind"),
    "no heads": ("31b", {"attention.head_count_kv": [2, 0, 2, 0]}, "head_count_kv must be a positive integer, got 0"),
    "texts": ("31b", {"attention.head_count_kv": ["2", "1"] * 2}, "head_count_kv must be a positive integer, got '2'"),
    "other heads": ("31b", {"attention.head_count_kv": [2, 2, 2, 2]}, r"1.self_attn.k_proj.weight has the shape"),
    "flags of fewer layers": ("31b", {"attention.sliding_window_pattern": [True, False]}, "has 2 entries for 4 layers"),
    "an interval": ("31b", {"attention.sliding_window_pattern": 2}, "must be a list of flags, got 2"),
    "no flags": ("31b", {"attention.sliding_window_pattern": None}, "must be a list of flags, got null"),
    "a last window": ("31b", {"attention.sliding_window_pattern": [False, True] * 2}, "gives the last layer a window"),
    "more layers": ("31b", {"block_count": 5}, "has 4 entries for 5 layers"),
    "many layers": ("31b", {"block_count": 2**31 - 1}, "block_count must be between"),
    "no window": ("31b", {"attention.sliding_window": None}, "attention.sliding_window is missing"),
    "no width of local heads": ("31b", {"attention.key_length_swa": None}, "attention.key_length_swa is missing"),
    "no width of heads": ("31b", {"attention.key_length": None}, "attention.key_length is missing"),
    "another width": ("31b", {"attention.key_length": 64, "attention.value_length": 64}, "dimension_count is 32, not the 64"),
    "widths": ("31b", {"attention.value_length": 16}, "keys and values of different widths"),
    "local widths": ("31b", {"attention.value_length_swa": 32}, "keys and values of different widths"),
    "a part that turns": ("31b", {"rope.dimension_count": 8}, "rope.dimension_count is 8, not the 32 of a head"),
    "a local part": ("31b", {"rope.dimension_count_swa": 8}, "rope.dimension_count_swa is 8, not the 16 of a head"),
    "no base": ("31b", {"rope.freq_base": None}, "rope.freq_base is missing"),
    "no local base": ("31b", {"rope.freq_base_swa": None}, "rope.freq_base_swa is missing"),
    "a scaling": ("31b", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, r"sets gemma4.rope.scaling"),
    "yarn": ("31b", {"rope.scaling.type": "yarn"}, r"sets gemma4.rope.scaling"),
    "widths of fewer layers": ("e2b", {"feed_forward_length": [96, 192]}, "feed_forward_length has 2 entries for 6"),
    "other widths": ("e2b", {"feed_forward_length": [96, 96, 192, 192, 192, 192]}, "or twice as much for the last 3"),
    "three times": ("e2b", {"feed_forward_length": [96] * 3 + [288] * 3}, "or twice as much for the last 3"),
    "single widths": ("e2b", {"feed_forward_length": 96}, r"mlp.gate_proj.weight has the shape \[192, 64\]"),
    "all shared": ("e2b", {"attention.shared_kv_layers": 6}, "shared_kv_layers is 6 of 6 layers"),
    "more than all": ("e2b", {"attention.shared_kv_layers": 7}, "shared_kv_layers is 7 of 6 layers"),
    "a kind without keys": (
        "e2b",
        {"attention.shared_kv_layers": 5, "feed_forward_length": 96},
        "leaves none of a kind whose keys are read",
    ),
    "shared of a number": ("e2b", {"attention.shared_kv_layers": 1.5}, "shared_kv_layers must be a positive integer"),
    "fewer shared": ("e2b", {"attention.shared_kv_layers": 2, "feed_forward_length": 96}, "layers.3.self_attn.k_proj"),
    "another input": ("e2b", {"embedding_length_per_layer_input": 10}, r"embed_tokens_per_layer.weight has the shape"),
    "no input": ("e2b", {"embedding_length_per_layer_input": 0}, "tensor .* does not belong to the model"),
    "an input": ("31b", {"embedding_length_per_layer_input": 12}, "embed_tokens_per_layer.weight .* is missing"),
    "fewer experts": ("26b", {"expert_count": 7}, "for 7 experts"),
    "no experts": ("26b", {"expert_count": 0}, "tensor .* does not belong to the model"),
    "narrow experts": ("26b", {"expert_feed_forward_length": 16}, "ffn_gate_up_exps has the shape"),
    "experts used": ("26b", {"expert_used_count": 9}, "do not go together"),
    "nobody says how many": ("26b", {"expert_used_count": None}, "expert_used_count is missing"),
    "an unknown key": ("31b", {"attention.sink": 1}, "gemma4.attention.sink=1"),
}  # fmt: skip


def refusal(family: str, tmp_path: Path, says: str, **options: Any) -> None:
    file = convert(made(f"gemma4_{family}", tmp_path / "hf"), tmp_path / "model.gguf", **options)
    with pytest.raises(LoadError, match=says) as refused:
        describe_gguf([file])
    assert str(refused.value).startswith(f"{file}: ") and str(refused.value).isprintable()


@pytest.mark.parametrize("case", _REFUSED)
def test_what_makes_no_sense_is_refused(case: str, tmp_path: Path) -> None:
    family, changes, says = _REFUSED[case]
    refusal(family, tmp_path, says, **{f"gemma4.{key}": value for key, value in changes.items()})


_TENSORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no factors": ("31b", {"rope_freqs.weight": None}, "tensor rope_freqs.weight is missing, which gives the rotated pairs"),
    "fewer factors": ("31b", {"rope_freqs.weight": FACTORS[:8]}, "rope_freqs.weight must hold 16 numbers"),
    "none that turns": ("31b", {"rope_freqs.weight": FACTORS[4:]}, "rope_freqs.weight must hold 16 numbers"),
    "none at first": ("31b", {"rope_freqs.weight": FACTORS[::-1].copy()}, "rope_freqs.weight must hold 16 numbers"),
    "slower pairs": ("31b", {"rope_freqs.weight": np.minimum(FACTORS, 8)}, "rope_freqs.weight must hold 16 numbers"),
    "NaN": ("31b", {"rope_freqs.weight": np.where(FACTORS > 1, np.nan, FACTORS)}, "must hold 16 numbers"),
    "infinite": ("31b", {"rope_freqs.weight": np.where(FACTORS > 1, np.inf, FACTORS)}, "must hold 16 numbers"),
    "long factors": ("31b", {"rope_factors_long.weight": FACTORS}, "rope_factors_long.weight is not the one that gives"),
    "no scalar": ("31b", {"blk.2.layer_output_scale.weight": None}, "layers.2.layer_scalar .* is missing"),
    "values of one layer": (
        "31b",
        {"blk.1.attn_v.weight": np.zeros((32, 64), np.float32)},
        "layers.1.self_attn.v_proj.weight .* does not belong to this model",
    ),
    "values missing": ("31b", {"blk.2.attn_v.weight": None}, "layers.2.self_attn.v_proj.weight .* is missing"),
    "a scale": ("31b", {"blk.0.ffn_down.scale": np.ones(1, np.float32)}, "tensor blk.0.ffn_down.scale does not belong"),
    "a scale of no experts": ("31b", {"blk.0.ffn_gate_inp.scale": np.ones(64, np.float32)}, "ffn_gate_inp.scale does not belong"),
    "fewer rows": (
        "e2b",
        {"per_layer_token_embd.weight": np.zeros((100, 72), np.float32)},
        "vocab_size_per_layer_input 100 is less than vocab_size 128",
    ),
    "no table": ("e2b", {"per_layer_token_embd.weight": None}, "embed_tokens_per_layer.weight .* is missing"),
    "a long table": ("e2b", {"per_layer_token_embd.weight": np.zeros(9216, np.float32)}, "has the shape|none that"),
    "no scales of experts": ("26b", {"blk.1.ffn_down_exps.scale": None}, "router.per_expert_scale .* is missing"),
    "scales of more": ("26b", {"blk.1.ffn_down_exps.scale": np.ones(9, np.float32)}, r"has the shape \[9\]"),
    "gate and up twice": (
        "26b",
        {"blk.1.ffn_up_exps.weight": np.zeros((8, 32, 64), np.float32)},
        "ffn_up_exps.weight appears under another name",
    ),
    "flat experts": ("26b", {"blk.1.ffn_gate_up_exps.weight": np.zeros(8, np.float32)}, "for 8 experts"),
}  # fmt: skip


@pytest.mark.parametrize("case", _TENSORS)
def test_other_tensors_are_refused(case: str, tmp_path: Path) -> None:
    family, more, says = _TENSORS[case]
    refusal(family, tmp_path, says, more=more)


def test_a_turn_and_a_call_of_a_tool_end_an_answer(tmp_path: Path) -> None:
    tokens = {
        "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<|tool_call>", "<turn|>", "<|tool_response>", "a"],
        "tokenizer.ggml.token_type": [3, 3, 4, 3, 4, 1],
        "tokenizer.ggml.eos_token_id": 1,
    }
    described = describe_gguf([convert(made("gemma4_31b", tmp_path / "hf"), tmp_path / "model.gguf", **tokens)])
    assert described.generation == {"eos_token_id": [1, 3, 4]}


def dequantized(source: Path, directory: Path, kind: str) -> Path:
    """The same model with the numbers that a file of this type holds."""
    directory.mkdir()
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            rows = quantize(tensor.float().numpy(), GGMLQuantizationType[kind])
            tensors[name] = torch.from_numpy(np.ascontiguousarray(dequantize(rows, GGMLQuantizationType[kind])))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    return directory


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", CASES)
def test_blocks_are_kept_as_they_are(family: str, kind: str, tmp_path: Path) -> None:
    source = made(family, tmp_path / "hf", **(BLOCKS if family == "gemma4_e2b" else {}))
    found = converted(source, tmp_path / "gguf", kind=kind)
    wanted = logits(dequantized(source, tmp_path / "plain", kind))
    core = make_core(found, dtype="float32", activations="float32")
    result = run(core, [greedy("a", PROMPT, 3)])["a", 0]
    assert (torch.stack(result.logits) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    weights = core.runner.decoder.weights()
    names = {
        "gemma4_31b": ["embedding", "layers.1.gate_up"],
        "gemma4_e2b": ["layer_inputs_table", "layer_inputs", "layers.5.input_gate"],
        "gemma4_26b": ["layers.1.beside.experts.4.gate_up", "layers.1.beside.experts.7.down"],
    }
    for name in names[family]:
        weight = weights[name]
        assert isinstance(weight, BlockWeight) and weight.form == FORMS[kind.lower()], name
    assert core.info.quantization == f"GGUF {kind}"
