"""MTP layers of GGUF files: they propose the same tokens as those of the checkpoint, and answers are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.gguf_checkpoints import YARN, convert, derived, tensors_of
from engine_helpers.proposals import Proposed, mtp_engine, predictor_of
from helpers.configs import engine_config
from helpers.engines import greedy, make_core, run, specs_of
from helpers.every_request import prompt, same
from helpers.prediction_layers import PredictionOracle, make_predicting
from safetensors.torch import load_file

from windlass.engine.errors import LoadError
from windlass.engine.interface.request import EngineRequest
from windlass.engine.model.gguf.gguf_description import describe_gguf
from windlass.engine.model.loading.model_size import size_model
from windlass.kernels import FORMS, BlockWeight

# Families with the settings that GGUF cannot store, so that a conversion loses them.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"attention_bias": False},
    "qwen3_5_moe": {},
    "qwen3_next": {"norm_topk_prob": True, "mlp_only_layers": []},
    "deepseek_v3": {"attention_bias": False, **YARN},
    "glm4_moe": {},
    "nemotron_h_experts": {"n_group": 1, "topk_group": 1},
}
NEXTN = [f"blk.5.nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")]


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_predicting(family, tmp_path_factory.mktemp(family), seed=1, **FAMILIES[family])
        return made[family]

    return get


def sent() -> list[EngineRequest]:
    return [greedy("a", prompt(1, 5), 24), greedy("b", prompt(2, 40), 24)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_proposals_and_answers_are_those_of_the_checkpoint(
    family: str, source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = source_of(family)
    directory = derived(convert(source, tmp_path / "model.gguf"), tmp_path / "derived")
    core = mtp_engine(directory, speculative_tokens=3)
    proposed = Proposed(core)
    answers = run(core, sent())
    stats = core.stats()
    accepted, drafted = stats.spec_decode_model_num_accepted_tokens, stats.spec_decode_model_num_draft_tokens
    assert 5 < accepted < drafted - 5
    proposed.check(PredictionOracle(family, source, specs_of(core, sent()[0])), 10)
    same(answers, run(make_core(directory), sent()), 1e-5)
    same(answers, run(make_core(source), sent()), 1e-5)
    sizes = [size_model(engine_config(one, speculative_mtp=True, device="cpu"), None) for one in (source, directory)]
    assert sizes[0].draft_bytes == sizes[1].draft_bytes > 4 * 64 * 128
    assert sizes[0].weight_bytes == sizes[1].weight_bytes
    assert sizes[0].kv_bytes_per_token == sizes[1].kv_bytes_per_token


def test_blocks_are_stored_unchanged(source_of: Callable[[str], Path], tmp_path: Path) -> None:
    source = source_of("qwen3_5")
    core = mtp_engine(
        derived(convert(source, tmp_path / "model.gguf", kind="Q8_0"), tmp_path / "derived"), dtype="auto"
    )
    weight = predictor_of(core).decoder.weights()["joined"]
    assert isinstance(weight, BlockWeight) and weight.form == FORMS["q8_0"]
    wanted = load_file(source / "model.safetensors")["mtp.fc.weight"]
    assert (weight.dequantize(torch.arange(64)) - wanted).abs().max() < wanted.abs().max() / 200
    run(core, sent())
    assert core.stats().spec_decode_model_num_accepted_tokens > 5


def test_incomplete_mtp_layer_is_refused_on_use(source_of: Callable[[str], Path], tmp_path: Path) -> None:
    source = source_of("qwen3_5")
    block = [name for name in tensors_of(source) if name.startswith("blk.5.")]
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "dropped": (dict.fromkeys(block), r"speculation\.mtp`: the files contain no layer .* names contain nextn"),
        "incomplete": ({NEXTN[1]: None}, r"tensor 'mtp\.pre_fc_norm_embedding\.weight' is missing"),
        "beyond": (
            {"blk.5.attn_sinks.weight": torch.zeros(4)},
            r"unexpected tensor 'mtp\.layers\.0\.attn_sinks\.weight'",
        ),
        "longer": ({NEXTN[0]: torch.zeros(64, 96)}, r"'mtp\.fc\.weight' has shape \[64, 96\]"),
        "damaged": ({NEXTN[0]: torch.full((64, 128), torch.nan)}, r"'mtp\.fc\.weight' contains numbers that are NaN"),
    }
    own = run(make_core(source), sent()[:1])
    for name, (more, message) in cases.items():
        directory = derived(convert(source, tmp_path / f"{name}.gguf", more=more), tmp_path / name)
        with pytest.raises(LoadError, match=message):
            mtp_engine(directory)
        same(run(make_core(directory), sent()[:1]), own, 1e-5)


def test_too_large_number_of_mtp_layers_is_refused(source_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The second to last layer belongs to the model."""
    file = convert(source_of("qwen3_5"), tmp_path / "model.gguf", **{"qwen35.nextn_predict_layers": 2})
    with pytest.raises(
        LoadError, match=r"blk\.4\.\w+\.weight.* of the last 2 layers.*according to qwen35\.nextn_predict_layers"
    ):
        describe_gguf([file])


@pytest.mark.parametrize("recurrent", [True, [True, False], [1, 1, 2, 1, 0, 0]], ids=str)
def test_invalid_kinds_of_layers_are_refused(recurrent: Any, source_of: Callable[[str], Path], tmp_path: Path) -> None:
    changes = {"qwen35.attention.recurrent_layers": recurrent}
    with pytest.raises(LoadError, match=r"recurrent_layers must have true or false for each of 6 blocks"):
        describe_gguf([convert(source_of("qwen3_5"), tmp_path / "model.gguf", **changes)])
