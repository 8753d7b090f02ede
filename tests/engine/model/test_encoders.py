"""Encoders against transformers: hidden states, classes of texts and of tokens; and that the tests would notice mistakes.

Reference: float32, eager attention, one text at a time, cos and sin from float64 angles.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_encoders import FAMILIES, HEADS, EncoderReference, make_encoder
from safetensors.torch import load_file, save_file

from windlass.engine.api.pooling import PooledRows, PoolingRule
from windlass.engine.api.request import EngineRequest
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import RequestError
from windlass.engine.model.families import reading
from windlass.engine.model.families.family import is_set
from windlass.engine.rotary.scaling import RopeScaling
from windlass.kernels.cpu import library

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


def test_states_are_those_of_transformers(encoder: Path) -> None:
    assert error(make_core(encoder), encoder) < TOLERANCE


@pytest.mark.parametrize("head", HEADS)
def test_heads_are_those_of_transformers(family: str, head: str, tmp_path: Path) -> None:
    directory = make_encoder(family, tmp_path, head, id2label={0: "a", 1: "b", 2: "c"})
    assert error(make_core(directory), directory, head) < TOLERANCE


def test_without_compiled_kernels(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_attempt", lambda: (None, "turned off by this test"))
    assert error(make_core(encoder), encoder) < TOLERANCE
    assert error(make_core(encoder, deterministic=True), encoder) < TOLERANCE


def test_batched_is_as_alone(encoder: Path) -> None:
    """Texts of other lengths beside it, one of a single token among them, in steps that hold a few of them each."""
    core = make_core(encoder, max_num_batched_tokens=64)
    texts = [TEXT[:n] for n in (40, 1, 7, 23, 16, 17, 40, 2)]
    alone = [answers(core, [asked("a", text)])[0] for text in texts]
    together = answers(core, [asked(str(i), text) for i, text in enumerate(texts)])
    for one, other in zip(alone, together, strict=True):
        assert (one - other).abs().max() / one.abs().max() < TOLERANCE


def test_the_same_bits_beside_others(encoder: Path) -> None:
    core = make_core(encoder, deterministic=True)
    texts = [TEXT[:n] for n in (40, 1, 7, 23)]
    alone = [answers(core, [asked("a", text)])[0] for text in texts]
    together = answers(core, [asked(str(i), text) for i, text in enumerate(texts)])
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert error(core, encoder) < TOLERANCE


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_a_scaling_of_the_request(encoder: Path, kind: str) -> None:
    fields = {"original_max_position_embeddings": 16} if kind == "yarn" else {}
    scaling = RopeScaling.from_dict({"rope_type": kind, "factor": 4.0, **fields})
    core = make_core(encoder, max_model_len=256)
    assert error(core, encoder, rope_scaling=scaling) < TOLERANCE
    if kind != "dynamic":  # that changes nothing below the trained length
        plain, scaled = answers(core, [asked("a", TEXT), asked("b", TEXT, rope_scaling=scaling)])
        assert (plain - scaled).abs().max() / plain.abs().max() > 100 * TOLERANCE


def test_distances_of_an_encoder_are_its_own(encoder: Path) -> None:
    core = make_core(encoder)
    for kind in ("self_extend", "rerope", "dual_chunk", "log_n"):
        with pytest.raises(RequestError, match="those behind them"):
            core.add(asked("a", TEXT, rope_scaling=RopeScaling.from_dict({"rope_type": kind})))


# -- that mistakes show ------------------------------------------------------------------------------------------------


def test_a_causal_mask_shows(encoder: Path) -> None:
    core = make_core(encoder)
    for layer in core.runner.decoder.layers:
        layer.mixer.spec = replace(layer.mixer.spec, causal=True)
    shared = core.runner.decoder._attention
    shared._kinds = [kind._replace(causal=True) for kind in shared._kinds]
    assert error(core, encoder) > 100 * TOLERANCE


def test_other_pairs_show(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((encoder / "config.json").read_text())
    flipped = [replace(one, interleaved=not is_set(config, one.interleaved)) for one in reading.FAMILIES]
    monkeypatch.setattr(reading, "FAMILIES", tuple(flipped))
    assert error(make_core(encoder), encoder) > 100 * TOLERANCE


def skewed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: v * 1.3 if k == "rope_theta" else skewed(v) for k, v in value.items()}


def test_another_theta_shows(encoder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(encoder, tmp_path / "other")
    config = json.loads((encoder / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": 10_000.0}
    (other / "config.json").write_text(json.dumps({**config, "rope_parameters": skewed(rope)}))
    (ours,), (theirs,) = (answers(make_core(one), [asked("a", TEXT)]) for one in (other, encoder))
    assert (ours - theirs).abs().max() / theirs.abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("head", HEADS[1:])
def test_every_vector_counts(family: str, head: str, tmp_path: Path) -> None:
    """Each bias and each norm: where one is left out (read as zeros), states are others, or what a head makes of them."""
    directory = make_encoder(family, tmp_path / "model", head, id2label={0: "a", 1: "b", 2: "c"})
    tensors = load_file(directory / "model.safetensors")
    wanted = [asked("a", TEXT, "all"), asked("b", TEXT, KINDS[head])]
    expected = answers(make_core(directory), wanted)
    names = [name for name, tensor in tensors.items() if tensor.dim() == 1 or "token_type" in name]
    assert len(names) > 3
    for name in names:
        if ".2." in name or ".3." in name:
            continue
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(directory, other)
        save_file({**tensors, name: torch.zeros_like(tensors[name])}, other / "model.safetensors")
        found = answers(make_core(other), wanted)
        changes = [(ours - own).abs().max() / own.abs().max() for ours, own in zip(found, expected, strict=True)]
        assert max(changes) > 10 * TOLERANCE, name


@pytest.mark.parametrize("family", ["modernbert"], indirect=True)
def test_the_window_is_that_of_both_sides(encoder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(encoder, tmp_path / "other")
    config = json.loads((encoder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "local_attention": 10}))
    assert error(make_core(other), encoder) > 100 * TOLERANCE
