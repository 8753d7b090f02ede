"""Models with layers that carry a state in GGUF files: the file gives the logits that the checkpoint it was made from gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.gguf_delta import convert, tensors_of
from engine_helpers.gguf_logits import PROMPT, derived, logits
from helpers.adapters import merged, save_adapter
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.model.gguf.gguf_description import describe_gguf
from windlass.kernels import FORMS, BlockWeight

# The family, and what GGUF cannot say of its tiny model, so that a conversion would drop it.
_INTERVAL = ["linear_attention", "linear_attention", "full_attention"] * 2
CASES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"num_hidden_layers": 6, "layer_types": _INTERVAL},
    "qwen3_5_moe": {"num_hidden_layers": 6, "layer_types": _INTERVAL},
    "qwen3_next": {
        "num_hidden_layers": 6,
        "layer_types": _INTERVAL,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}


def made(family: str, directory: Path, **changes: Any) -> Path:
    return make_model(family, directory, **{"attention_bias": False, **CASES[family], **changes})


def converted(source: Path, directory: Path, **options: Any) -> Path:
    """The directory that the server derives from a file of the model in `source`."""
    directory.mkdir()
    return derived(convert(source, directory / "model.gguf", **options), directory)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() < 1e-5 * wanted.abs().max())


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("heads", [4, 6])
def test_the_file_gives_the_logits_of_the_checkpoint(family: str, heads: int, tmp_path: Path) -> None:
    source = made(family, tmp_path / "hf", linear_num_value_heads=heads)
    found = converted(source, tmp_path / "gguf")
    assert near(logits(found), logits(source))
    if family != "qwen3_next":  # whose heads lie as they did
        index = json.loads((found / "gguf.json").read_text())
        assert index["values_in_turns"] is True
        (found / "gguf.json").write_text(json.dumps({**index, "values_in_turns": False}))
        assert not near(logits(found), logits(source))


def test_blocks_are_kept_as_they_are(tmp_path: Path) -> None:
    source = made("qwen3_5", tmp_path / "hf", linear_value_head_dim=16)
    core = make_core(converted(source, tmp_path / "gguf", kind="Q8_0"), dtype="auto")
    weight = core.runner.decoder.weights()["layers.0.projections"]
    assert isinstance(weight, BlockWeight) and weight.form == FORMS["q8_0"]
    found, wanted = run(core, [greedy("a", PROMPT, 1)])["a", 0].logits[0], logits(source)[0]
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.99


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    source = made("qwen3_5", tmp_path / "hf")
    own = tensors_of(source, json.loads((source / "config.json").read_text()))
    further = {name.replace("blk.5.", "blk.6."): one for name, one in own.items() if name.startswith("blk.5.")}
    further["blk.6.nextn.eh_proj.weight"] = torch.zeros(64, 128)
    changes = {"qwen35.block_count": 7, "qwen35.nextn_predict_layers": 1}
    assert near(logits(converted(source, tmp_path / "gguf", more=further, **changes)), logits(source))


def test_a_bias_of_decays_without_an_ending(tmp_path: Path) -> None:
    """As some files have it."""
    source = made("qwen3_next", tmp_path / "hf")
    own = tensors_of(source, json.loads((source / "config.json").read_text()))
    biases = {name: one for name, one in own.items() if name.endswith("ssm_dt.bias")}
    more = {**dict.fromkeys(biases), **{name.removesuffix(".bias"): one for name, one in biases.items()}}
    assert near(logits(converted(source, tmp_path / "gguf", more=more)), logits(source))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"more": {"blk.1.ssm_a": None}}, r"linear_attn\.A_log .* is missing"),
        ({"more": {"blk.1.ssm_a": torch.zeros(3)}}, r"linear_attn\.A_log has the shape \[3\], \[4\] is expected"),
        ({"more": {"blk.0.ssm_conv1d.weight": torch.zeros(88, 3)}}, r"conv1d\.weight has the shape"),
        ({"more": {"blk.2.ssm_a": torch.zeros(4)}}, "does not belong to this model"),
        ({"more": {"blk.0.ssm_d": torch.zeros(4)}}, "does not belong to the model"),
        ({"qwen35.ssm.inner_size": 42}, "inner_size 42 is not a multiple of"),
        ({"qwen35.ssm.group_count": 3}, "4 is not a multiple of linear_num_key_heads 3"),
        ({"qwen35.ssm.conv_kernel": None}, "ssm.conv_kernel is missing"),
        ({"qwen35.full_attention_interval": 9}, "no layer is full_attention"),
        ({"qwen35.full_attention_interval": 2}, "is missing"),
        ({"qwen35.ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms"),
    ],
)
def test_what_is_amiss_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = made("qwen3_5", tmp_path / "hf")
    with pytest.raises(LoadError, match=message):
        describe_gguf([convert(source, tmp_path / "model.gguf", **options)])


def test_adapters_change_what_lies_as_in_the_original(tmp_path: Path) -> None:
    source = made("qwen3_5", tmp_path / "hf")
    found = converted(source, tmp_path / "gguf")

    def changed(directory: Path, adapter: Path) -> torch.Tensor:
        core = make_core(directory, lora=(AdapterSource(1, "tuned", str(adapter)),))
        return torch.stack(run(core, [greedy("a", PROMPT, 3, adapter=1)])["a", 0].logits)

    plain = save_adapter(tmp_path / "plain", source, ["q_proj", "k_proj", "o_proj", "up_proj"])
    assert near(changed(found, plain), logits(merged(source, plain, tmp_path / "merged")))
    of_states = save_adapter(tmp_path / "states", source, ["in_proj_qkv", "up_proj"])
    with pytest.raises((LoadError, RequestError), match="no linear layer"):
        changed(found, of_states)
    # Where no heads lie otherwise, these too.
    source = made("qwen3_next", tmp_path / "next")
    joined = save_adapter(tmp_path / "joined", source, ["in_proj_qkvz", "in_proj_ba", "out_proj"])
    found = converted(source, tmp_path / "gguf next")
    assert near(changed(found, joined), logits(merged(source, joined, tmp_path / "merged next")))
