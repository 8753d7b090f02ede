"""Encoders compared with transformers: hidden states, classes of texts and of tokens, and sensitivity of the comparison.

Reference: float32, eager attention, one text at a time, cos and sin from float64 angles.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers.rewritten_weights import reconfigured, rewritten, with_other_theta
from helpers.cpu_kernels import choose
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_encoders import FAMILIES, HEADS, EncoderReference, make_encoder
from safetensors.torch import load_file

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.outputs import PooledRows
from windlass.engine.interface.request import EngineRequest, PoolingRule
from windlass.engine.model.families import spec_reader
from windlass.engine.model.families.family import is_set
from windlass.engine.rotary.rope_scaling import RopeScaling

TOLERANCE = 1e-5  # of the largest number of the reference
TEXT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()
KINDS = {"ForSequenceClassification": "classify", "ForTokenClassification": "classify tokens"}


def asked(request_id: str, ids: list[int], kind: str = "all", **fields: Any) -> EngineRequest:
    return replace(greedy(request_id, ids, 0, **fields), pooling=PoolingRule(kind=kind))  # type: ignore[arg-type]


def rows_of(pooled: PooledRows | None) -> torch.Tensor:
    assert pooled is not None
    return torch.from_numpy(np.frombuffer(pooled.values, dtype="<f4").reshape(-1, pooled.width).copy())


def answers(core: EngineCore, requests: list[EngineRequest]) -> list[torch.Tensor]:
    finished = run(core, requests)
    for request in requests:
        assert finished[request.request_id, 0].outputs[-1].error is None
    return [rows_of(finished[request.request_id, 0].outputs[-1].pooled) for request in requests]


def error(core: EngineCore, directory: Path, head: str = "Model", **fields: Any) -> float:
    """Largest difference from the reference, relative to its largest number."""
    request = asked("a", TEXT, KINDS.get(head, "all"), **fields)
    (found,) = answers(core, [request])
    names = [group.name for group in core.runner.decoder.spec.rotary_groups]
    expected = EncoderReference(directory, specs_of(core, request), names, head)(TEXT)
    assert found.shape == expected.shape and torch.isfinite(expected).all() and float(expected.std()) > 0
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def encoder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(family, tmp_path_factory.mktemp(family))


def test_hidden_states_equal_transformers(encoder: Path) -> None:
    assert error(make_core(encoder), encoder) < TOLERANCE


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("head", HEADS)
def test_heads_equal_transformers(family: str, head: str, tmp_path: Path) -> None:
    directory = make_encoder(family, tmp_path, head, id2label={0: "a", 1: "b", 2: "c"})
    assert error(make_core(directory), directory, head) < TOLERANCE


def test_plain_torch_equals_transformers(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "turned off by this test")
    assert error(make_core(encoder), encoder) < TOLERANCE
    assert error(make_core(encoder, deterministic=True), encoder) < TOLERANCE


def test_batched_texts_equal_single_texts(encoder: Path) -> None:
    """Texts of several lengths, one of them a single token, in steps of a few texts each."""
    core = make_core(encoder, max_num_batched_tokens=64)
    texts = [TEXT[:n] for n in (40, 1, 7, 23, 16, 17, 40, 2)]
    alone = [answers(core, [asked("a", text)])[0] for text in texts]
    together = answers(core, [asked(str(i), text) for i, text in enumerate(texts)])
    for one, other in zip(alone, together, strict=True):
        assert (one - other).abs().max() / one.abs().max() < TOLERANCE


def test_deterministic_bits_are_equal_in_batches(encoder: Path) -> None:
    core = make_core(encoder, deterministic=True)
    texts = [TEXT[:n] for n in (40, 1, 7, 23)]
    alone = [answers(core, [asked("a", text)])[0] for text in texts]
    together = answers(core, [asked(str(i), text) for i, text in enumerate(texts)])
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert error(core, encoder) < TOLERANCE


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_scaling_of_a_request_equals_transformers(encoder: Path, kind: str) -> None:
    fields = {"original_max_position_embeddings": 16} if kind == "yarn" else {}
    scaling = RopeScaling.from_dict({"rope_type": kind, "factor": 4.0, **fields})
    core = make_core(encoder, max_model_len=256)
    assert error(core, encoder, rope_scaling=scaling) < TOLERANCE
    if kind != "dynamic":  # that changes nothing below the trained length
        plain, scaled = answers(core, [asked("a", TEXT), asked("b", TEXT, rope_scaling=scaling)])
        assert (plain - scaled).abs().max() / plain.abs().max() > 100 * TOLERANCE


def test_distance_based_attention_is_refused(encoder: Path) -> None:
    core = make_core(encoder)
    for kind in ("self_extend", "rerope", "dual_chunk", "log_n"):
        with pytest.raises(RequestError, match="those behind them"):
            core.add(asked("a", TEXT, rope_scaling=RopeScaling.from_dict({"rope_type": kind})))


# -- sensitivity --------------------------------------------------------------------------------------------------------


def test_causal_mask_changes_states(encoder: Path) -> None:
    core = make_core(encoder)
    for layer in core.runner.decoder.layers:
        layer.mixer.spec = replace(layer.mixer.spec, causal=True)
    shared = core.runner.decoder._attention
    shared._kinds = [kind._replace(causal=True) for kind in shared._kinds]
    assert error(core, encoder) > 100 * TOLERANCE


def test_other_pair_layout_changes_states(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((encoder / "config.json").read_text())
    flipped = [replace(one, interleaved=not is_set(config, one.interleaved)) for one in spec_reader.FAMILIES]
    monkeypatch.setattr(spec_reader, "FAMILIES", tuple(flipped))
    assert error(make_core(encoder), encoder) > 100 * TOLERANCE


def test_other_theta_changes_states(encoder: Path, tmp_path: Path) -> None:
    other = with_other_theta(encoder, tmp_path / "other")
    (ours,), (theirs,) = (answers(make_core(one), [asked("a", TEXT)]) for one in (other, encoder))
    assert (ours - theirs).abs().max() / theirs.abs().max() > 10 * TOLERANCE


@pytest.mark.slow
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("head", HEADS[1:])
def test_every_vector_changes_states(family: str, head: str, tmp_path: Path) -> None:
    """Zeros instead of a bias or a norm give other states, or another output of the head."""
    directory = make_encoder(family, tmp_path / "model", head, id2label={0: "a", 1: "b", 2: "c"})
    tensors = load_file(directory / "model.safetensors")
    wanted = [asked("a", TEXT, "all"), asked("b", TEXT, KINDS[head])]
    expected = answers(make_core(directory), wanted)
    names = [name for name, tensor in tensors.items() if tensor.dim() == 1 or "token_type" in name]
    assert len(names) > 3
    for name in names:
        if ".2." in name or ".3." in name:
            continue
        other = rewritten(directory, tmp_path / "other", {**tensors, name: torch.zeros_like(tensors[name])})
        found = answers(make_core(other), wanted)
        changes = [(ours - own).abs().max() / own.abs().max() for ours, own in zip(found, expected, strict=True)]
        assert max(changes) > 10 * TOLERANCE, name


@pytest.mark.parametrize("family", ["modernbert"], indirect=True)
def test_window_covers_both_sides(encoder: Path, tmp_path: Path) -> None:
    other = reconfigured(encoder, tmp_path / "other", local_attention=10)
    assert error(make_core(other), encoder) > 100 * TOLERANCE


# -- scheduling ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder("modernbert", tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("target_step_seconds", [0.0, 1e-6])
def test_text_is_computed_in_one_step(small: Path, target_step_seconds: float) -> None:
    """With the smallest step budget and other requests waiting; no cached block remains."""
    core = make_core(small, max_num_batched_tokens=64, max_num_seqs=4, target_step_seconds=target_step_seconds)
    plans, execute = [], core.runner.execute

    def recorded(plan: Any) -> Any:
        plans.append(plan)
        return execute(plan)

    core.runner.execute = recorded  # type: ignore[method-assign]
    lengths = [64, 1, 17, 30, 40, 2, 64, 33, 1, 16, 48, 5]
    texts = [torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    found = answers(core, [asked(str(i), text) for i, text in enumerate(texts)])
    assert [len(rows) for rows in found] == lengths
    chunks = [item for plan in plans for item in plan.sequences]
    assert len(chunks) == len(lengths)
    assert all(item.start == 0 and item.num_tokens == item.num_known_tokens for item in chunks)
    assert all(sum(item.num_tokens for item in plan.sequences) <= 64 + 4 for plan in plans)
    if not target_step_seconds:
        assert len(plans) < len(lengths)  # several at once
    assert core.stats().kv_blocks_used == 0 and core.stats().num_preemptions == 0


def test_equal_texts_share_no_blocks(small: Path) -> None:
    core = make_core(small)
    first, second = (answers(core, [asked("a", TEXT)])[0] for _ in range(2))
    assert torch.equal(first, second)
    (output,) = run(core, [asked("b", TEXT, "last")])["b", 0].outputs
    assert not output.cached_tokens


def test_step_size_bounds_text_and_cache(small: Path) -> None:
    core = make_core(small, max_num_batched_tokens=64, max_num_seqs=4)
    assert core.info.max_model_len == 64 and core.info.num_kv_blocks == (64 // 16 + 4,)
    assert any("scheduling.max_num_batched_tokens" in notice for notice in core.info.notices)
    with pytest.raises(RequestError, match="shorten the prompt"):
        core.add(asked("a", [5] * 65))
    with pytest.raises(LoadError, match="one step of at most 64 tokens"):
        make_core(small, max_num_batched_tokens=64, max_model_len=65)
    longer = make_core(small, max_num_batched_tokens=512, max_model_len=512)  # than the trained length
    assert longer.info.max_model_len == 512


def test_options_of_decoders_are_refused(small: Path) -> None:
    core = make_core(small)
    assert not core.info.generates and core.info.pooling.kind == "mean"
    for request, code in (
        (greedy("a", TEXT), "no_generation"),
        (asked("a", TEXT, "classify"), "no_classifier"),
        (asked("a", TEXT, context=ContextRule(attention_window=8)), "unsupported_value"),
        (asked("a", TEXT, context=ContextRule(overflow="shift")), "unsupported_value"),
        (asked("a", TEXT, reuse=NonPrefixReuseParams(at_least=32, scope="s")), "unsupported_value"),
    ):
        with pytest.raises(RequestError) as caught:
            core.add(request)
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("roformer", {"rotary_value": True}, "rotary_value"),
        ("roformer", {"is_decoder": True}, "is_decoder"),
        ("roformer", {"embedding_size": 32}, "embedding_size 32"),
        ("nomic_bert", {"prenorm": True}, "prenorm"),
        ("eurobert", {"classifier_pooling": "max"}, "classifier_pooling 'max'"),
        ("modernbert", {"classifier_activation": "relu2"}, "'relu2' of the classification head"),
    ],
)
def test_unsupported_config_is_refused(family: str, change: dict[str, Any], says: str, tmp_path: Path) -> None:
    directory = make_encoder(family, tmp_path, "ForSequenceClassification")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(LoadError, match=says):
        make_core(directory)


def test_key_names_of_nomic_files(tmp_path: Path) -> None:
    """The config.json of the original program gives the same model."""
    directory = make_encoder("nomic_bert", tmp_path / "new")
    (expected,) = answers(make_core(directory), [asked("a", TEXT)])
    config = json.loads((directory / "config.json").read_text())
    older = {
        "n_positions": config.pop("max_position_embeddings"),
        "n_embd": config.pop("hidden_size"),
        "n_layer": config.pop("num_hidden_layers"),
        "n_head": config.pop("num_attention_heads"),
        "n_inner": config.pop("intermediate_size"),
        "layer_norm_epsilon": config.pop("layer_norm_eps"),
        "rotary_emb_base": config.pop("rope_parameters")["rope_theta"],
        "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu",
        "qkv_proj_bias": False,
        "prenorm": False,
    }
    config = {key: value for key, value in config.items() if key not in ("hidden_act", "head_dim")}
    (directory / "config.json").write_text(json.dumps({**config, **older}))
    core = make_core(directory)
    assert torch.equal(answers(core, [asked("a", TEXT)])[0], expected)
    assert not core.info.notices


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}])
def test_narrower_dtypes_give_similar_states(encoder: Path, options: dict[str, str]) -> None:
    (expected,), (found,) = (answers(make_core(encoder, **more), [asked("a", TEXT)]) for more in ({}, options))
    near = torch.nn.functional.cosine_similarity(found, expected, dim=1)
    assert float(near.mean()) > 0.99 and not torch.equal(found, expected), near
