"""gpt-oss, Granite's mixtures and DeepSeek's models in GGUF files: they give the logits of the checkpoint they are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_helpers.gguf_further_experts import YARN, convert
from engine_helpers.gguf_logits import PROMPT, derived, logits
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.gguf_description import describe_gguf
from windlass.kernels import FORMS, BlockWeight

# The family, and what GGUF cannot say of its tiny model, so that a conversion would drop it.
CASES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "granitemoe": {"attention_bias": False},
    "granitemoeshared": {"attention_bias": False},
    "deepseek_v2": {"attention_bias": False},
    "deepseek_v2_lite": {"n_group": 1, "topk_group": 1, **YARN},
    "deepseek_v3": {"attention_bias": False, **YARN},
    "youtu": {},
    "glm4_moe": {"use_qk_norm": False, "attention_bias": False},
}
LATENT = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "youtu")


def converted(source: Path, directory: Path, **options: Any) -> Path:
    """The directory that the server derives from a file of the model in `source`."""
    directory.mkdir()
    return derived(convert(source, directory / "model.gguf", **options), directory)


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", CASES)
def test_the_file_gives_the_logits_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    source = make_model(family, tmp_path / "hf", **CASES[family])
    assert_same(logits(converted(source, tmp_path / "gguf")), logits(source))


@pytest.mark.parametrize("family", LATENT)
def test_older_files_have_keys_and_values_in_one_tensor(family: str, tmp_path: Path) -> None:
    source = make_model(family, tmp_path / "hf", **CASES[family])
    assert_same(logits(converted(source, tmp_path / "gguf", in_parts=False)), logits(source))


def test_latent_parts_count(tmp_path: Path) -> None:
    """A head whose keys or values were another's would be seen."""
    found = converted(make_model("deepseek_v3", tmp_path / "hf", **CASES["deepseek_v3"]), tmp_path / "gguf")
    index, wanted = json.loads((found / "gguf.json").read_text()), logits(found)
    assert index["latent_in_parts"] is True
    for part in ("k_b_proj", "v_b_proj"):
        names = [f"model.layers.2.self_attn.{part}[{head}].weight" for head in (0, 3)]
        swapped = {**index["tensors"], names[0]: index["tensors"][names[1]], names[1]: index["tensors"][names[0]]}
        (found / "gguf.json").write_text(json.dumps({**index, "tensors": swapped}))
        assert (logits(found) - wanted).abs().max() > 1e-3 * wanted.abs().max()


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("deepseek_v3", "deepseek2.expert_weights_scale", 1.0),
        ("deepseek_v3", "deepseek2.expert_weights_norm", False),
        ("deepseek_v3", "deepseek2.expert_group_count", 2),
        ("deepseek_v3", "deepseek2.rope.scaling.yarn_log_multiplier", 0.03),
        ("deepseek_v2_lite", "deepseek2.rope.scaling.yarn_log_multiplier", 0.03),
        ("gpt_oss", "gpt-oss.attention.sliding_window", 5),
        ("gpt_oss", "gpt-oss.expert_used_count", 3),
        ("granitemoe", "granitemoe.residual_scale", 0.5),
    ],
)
def test_what_the_file_says_counts(family: str, key: str, value: Any, tmp_path: Path) -> None:
    source = make_model(family, tmp_path / "hf", **CASES[family])
    wanted, found = logits(source), logits(converted(source, tmp_path / "gguf", **{key: value}))
    assert (found - wanted).abs().max() > 1e-4 * wanted.abs().max()


def test_four_bit_floats_are_kept_as_codes_of_five(tmp_path: Path) -> None:
    source = make_model("gpt_oss", tmp_path / "hf", **CASES["gpt_oss"])
    directory = converted(source, tmp_path / "gguf", kind="MXFP4")
    core = make_core(directory, dtype="auto")
    assert core.info.quantization == "GGUF MXFP4"
    reader = gguf.GGUFReader(directory / "model.gguf")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights = core.runner.decoder.weights()
    for name, rows in (("gate", slice(0, 96)), ("up", slice(96, None))):
        tensor = stored[f"blk.2.ffn_{name}_exps.weight"]
        assert tensor.tensor_type == GGMLQuantizationType.MXFP4
        want = torch.from_numpy(np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type)))
        for expert in range(6):
            mine = weights[f"layers.2.experts.{expert}.gate_up"]
            assert isinstance(mine, BlockWeight) and mine.form == FORMS["q5_0"]
            assert torch.equal(mine.dequantize()[rows].cpu(), want[expert])
    found, wanted = run(core, [greedy("a", PROMPT, 1)])["a", 0].logits[0], logits(source)[0]
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.9


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        (
            "glm4_moe",
            {"glm4moe.expert_gating_func": 1},
            "expert_gating_func is 1: experts of this architecture are chosen by sigmoids",
        ),
        ("deepseek_v3", {"deepseek2.expert_gating_func": 3}, r"expert_gating_func is 3: 1 \(softmax\) and 2"),
        ("deepseek_v3", {"deepseek2.rope.dimension_count": 64}, "rope.dimension_count is 64, not less than"),
        ("deepseek_v3", {"deepseek2.expert_count": 12}, "has the shape .* for 12 experts"),
        ("deepseek_v2", {"deepseek2.expert_weights_norm": True}, "norm_topk_prob false"),
        ("gpt_oss", {"gpt-oss.expert_count": 7}, "for 7 experts"),
        ("granitemoe", {"granitemoe.rope.scaling.finetuned": False}, "finetuned=false, by which no layer rotates"),
    ],
)
def test_what_does_not_fit_is_told(family: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = convert(make_model(family, tmp_path / "hf", **CASES[family]), tmp_path / "model.gguf", **changes)
    with pytest.raises(LoadError, match=says) as refused:
        describe_gguf([file])
    assert "\n" not in str(refused.value)


@ON_A_CPU
def test_heads_in_blocks_are_read_in_half_the_bytes(tmp_path: Path) -> None:
    """As float16, as near to the file's numbers as that is; deterministic steps have them whole."""
    wide = {
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "moe_intermediate_size": 32,
    }
    source = make_model("deepseek_v3", tmp_path / "hf", **CASES["deepseek_v3"], **wide)
    directory = converted(source, tmp_path / "gguf", kind="Q8_0")
    cores = [make_core(directory, dtype="auto", deterministic=exact) for exact in (False, True)]
    narrow, whole = (core.runner.decoder.layers[1].mixer.weights.kv_up for core in cores)
    assert narrow.dtype == torch.float16 and whole.dtype == torch.float32
    assert torch.equal(narrow, whole.half())
    found, wanted = (core.runner.decoder for core in cores)
    assert found.weight_dtype == wanted.weight_dtype == torch.float32
