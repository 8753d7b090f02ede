"""Every kind of rotary scaling against independent float64 formulas, transformers, and published examples."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from helpers.rotary_formulas import by_formula as formula
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from windlass.engine.errors import RequestError
from windlass.engine.rotary.rope_scaling import (
    RopeScaling,
    RotaryBase,
    RotarySpec,
    check,
    effective_length,
    last_length,
    resolve,
    runnable_kinds,
)
from windlass.engine.rotary.scaling_fields import KINDS

DIM = 64
BASE = RotaryBase(rope_theta=500_000.0, head_dim=DIM, rotary_dim=DIM, trained_len=4096)
SHORT = [1.0 + 0.01 * j for j in range(DIM // 2)]
LONG = [1.0 + 0.7 * j for j in range(DIM // 2)]


def by_formula(obj: dict[str, Any], length: int = 1, base: RotaryBase = BASE) -> tuple[np.ndarray, float]:
    return formula(obj, length, base)


def spec(obj: dict[str, Any], length: int = 1, base: RotaryBase = BASE) -> RotarySpec:
    return resolve(RopeScaling.from_dict(obj), base, length)


LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# (object, length the request may reach)
CASES: list[tuple[dict[str, Any], int]] = [
    ({"rope_type": "default"}, 1),
    ({"rope_type": "default", "rope_theta": 1234.5}, 1),
    ({"rope_type": "linear", "factor": 4}, 1),
    ({"rope_type": "ntk", "factor": 8}, 1),
    ({"rope_type": "dynamic", "factor": 4.0}, 100),
    ({"rope_type": "dynamic", "factor": 4.0}, 4096),
    ({"rope_type": "dynamic", "factor": 4.0}, 4097),
    ({"rope_type": "dynamic", "factor": 2.5}, 9000),
    ({"rope_type": "dynamic", "alpha": 1000.0}, 9000),
    ({"rope_type": "yarn", "factor": 4.0}, 1),
    ({"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 2048}, 1),
    ({"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5}, 1),
    ({"rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.0}, 1),
    ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2}, 1),
    ({"rope_type": "yarn", "original_max_position_embeddings": 512}, 1),
    ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e-6, "beta_slow": 1e-7}, 1),
    ({"rope_type": "yarn", "factor": 1.5}, 1),
    # Both ends of the ramp coincide: a step.
    ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}, 1),
    (LLAMA3, 1),
    ({**LLAMA3, "original_max_position_embeddings": 1024, "factor": 32.0}, 1),
    (LONGROPE, 4096),
    ({**LONGROPE, "original_max_position_embeddings": 1024}, 1024),
    ({**LONGROPE, "original_max_position_embeddings": 1024}, 1025),
    ({**LONGROPE, "factor": 16.0}, 10_000),
    ({**LONGROPE, "attention_factor": 1.5}, 10_000),
    ({**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}, 10),
    ({**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}, 10_000),
    # On a model that rotates every dimension, proportional leaves no zeros.
    ({"rope_type": "proportional", "factor": 8.0}, 1),
    ({"rope_type": "proportional"}, 1),
    # Chunks change distances. The frequencies are plain, or those of YaRN.
    ({"rope_type": "dual_chunk"}, 1),
    ({"rope_type": "dual_chunk", "chunk_size": 3000, "local_size": 64, "rope_theta": 5e4}, 100_000),
    ({"rope_type": "dual_chunk", "factor": 4.0, "beta_fast": 16.0, "length_scores": True}, 100_000),
    ({"rope_type": "self_extend", "group_size": 8}, 100_000),
    ({"rope_type": "rerope", "window": 100, "factor": 3.0}, 100_000),
    ({"rope_type": "log_n"}, 100_000),
    # Sections divide the pairs among three positions, which are equal on text.
    ({"rope_type": "default", "mrope_section": [8, 12, 12]}, 1),
    ({"rope_type": "yarn", "factor": 4.0, "mrope_section": [16, 8, 8], "mrope_interleaved": True}, 1),
]


@pytest.mark.parametrize(("obj", "length"), CASES)
def test_scaling_equals_its_formula(obj: dict[str, Any], length: int) -> None:
    expected, attention = by_formula(obj, length)
    got = spec(obj, length)
    np.testing.assert_allclose(got.inv_freq, expected, rtol=1e-12)
    assert got.rotary_scale == pytest.approx(attention, rel=1e-14)


def transformers_frequencies(obj: dict[str, Any], length: int) -> tuple[np.ndarray, float]:
    """Call the function of transformers on a new config, since its dynamic state is kept between calls of a module."""
    factor = 1.0 if obj["rope_type"] == "proportional" else None
    given = {"rope_theta": BASE.rope_theta, "original_max_position_embeddings": BASE.trained_len, "factor": factor}
    given |= obj
    config = LlamaConfig(hidden_size=DIM, num_attention_heads=1, head_dim=DIM, max_position_embeddings=BASE.trained_len)
    config.rope_parameters = given
    inv_freq, attention = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, "cpu", seq_len=length)
    return inv_freq.double().numpy(), attention


@pytest.mark.parametrize(
    ("obj", "length"),
    [
        (obj, length)
        for obj, length in CASES
        # transformers has no ntk, no alpha in this function, and ignores the magnitudes of PhiMoE.
        # The plain frequencies are in each of its models: see test_config_names.
        if obj["rope_type"] not in ("default", "ntk", "dual_chunk", "self_extend", "rerope", "log_n")
        and "alpha" not in obj
        and "short_mscale" not in obj
    ],
)
def test_scaling_equals_transformers(obj: dict[str, Any], length: int) -> None:
    at = length
    if obj["rope_type"] == "dynamic":
        at = effective_length(RopeScaling.from_dict(obj), BASE, length)
    expected, attention = transformers_frequencies(obj, at)
    got = spec(obj, length)
    np.testing.assert_allclose(got.inv_freq, expected, rtol=3e-6)
    assert got.rotary_scale == pytest.approx(attention, rel=1e-7)


@pytest.mark.parametrize("rotary_dim", [2, 4, 32])
@pytest.mark.parametrize("kind", ["default", "linear", "ntk", "dynamic", "yarn"])
def test_partial_and_tiny_rotations_stay_finite(kind: str, rotary_dim: int) -> None:
    base = RotaryBase(1e4, 64, rotary_dim, 128)
    obj = {"rope_type": kind} if kind == "default" else {"rope_type": kind, "factor": 4.0}
    got = np.array(spec(obj, 1000, base).inv_freq)
    assert got.shape == (rotary_dim // 2,)
    assert np.isfinite(got).all()
    assert (got > 0).all()
    if rotary_dim > 2:
        np.testing.assert_allclose(got, by_formula(obj, 1000, base)[0], rtol=1e-12)


# --- bases: some pairs that never rotate, and learned frequencies -------------------------------------------------------

PROPORTIONAL = RotaryBase(1e6, 32, 32, 4096, rotating_pairs=4)
LEARNED_W = tuple(0.9**j for j in range(16))
LEARNED = RotaryBase(1e4, 32, 32, 4096, inv_freq=LEARNED_W)


@pytest.mark.parametrize(
    ("obj", "stretch"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "proportional"}, None),
        ({"rope_type": "proportional", "factor": 8.0}, 8.0),
        ({"rope_type": "linear", "factor": 8.0}, 8.0),
    ],
)
def test_proportional_uses_the_exponents_of_the_entire_head(obj: dict[str, Any], stretch: float | None) -> None:
    w = 1e6 ** (-np.arange(0, 32, 2) / 32) / (stretch or 1.0)
    w[4:] = 0
    np.testing.assert_allclose(spec(obj, base=PROPORTIONAL).inv_freq, w, rtol=1e-13)
    config = LlamaConfig(hidden_size=32, num_attention_heads=1, head_dim=32)
    config.rope_parameters = {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "factor": stretch or 1.0}
    theirs, attention = ROPE_INIT_FUNCTIONS["proportional"](config, "cpu")
    np.testing.assert_allclose(spec(obj, base=PROPORTIONAL).inv_freq, theirs.double().numpy(), rtol=3e-7)
    assert attention == 1.0


@pytest.mark.parametrize("obj", [case for case, _ in CASES if case["rope_type"] != "longrope"])
def test_unrotated_pairs_stay_unrotated_under_every_scaling(obj: dict[str, Any]) -> None:
    obj = {key: value for key, value in obj.items() if key != "mrope_section"}
    got = np.array(spec(obj, 9000, PROPORTIONAL).inv_freq)
    whole = np.array(spec(obj, 9000, RotaryBase(1e6, 32, 32, 4096)).inv_freq)
    np.testing.assert_array_equal(got, np.where(np.arange(16) < 4, whole, 0))


def test_learned_frequencies_replace_the_base() -> None:
    w = np.array(LEARNED_W)
    assert spec({"rope_type": "default"}, base=LEARNED).inv_freq == LEARNED_W
    assert spec({"rope_type": "learned"}, base=LEARNED).inv_freq == LEARNED_W
    np.testing.assert_allclose(spec({"rope_type": "linear", "factor": 4}, base=LEARNED).inv_freq, w / 4)
    turns = 4096 * w / (2 * np.pi)
    blend = np.clip((turns - 1) / 3, 0, 1)
    np.testing.assert_allclose(spec(LLAMA3, base=LEARNED).inv_freq, (1 - blend) * w / 8 + blend * w)
    lists = {"short_factor": SHORT[:16], "long_factor": LONG[:16]}
    np.testing.assert_allclose(
        spec({"rope_type": "longrope", **lists}, 5000, LEARNED).inv_freq, w / np.array(LONG[:16])
    )
    with pytest.raises(ValueError, match="have not been read"):
        spec({"rope_type": "default"}, base=RotaryBase(1e4, 32, 32, 4096, inv_freq=()))


PARTIAL = RotaryBase(1e4, 64, 32, 4096)


@pytest.mark.parametrize(
    ("base", "refused"),
    [
        (BASE, {"learned"}),
        (PROPORTIONAL, {"learned"}),
        (PARTIAL, {"learned", "proportional"}),
        (LEARNED, {"ntk", "dynamic", "yarn", "proportional"}),
    ],
)
def test_refusals_list_the_supported_kinds(base: RotaryBase, refused: set[str]) -> None:
    examples = {obj["rope_type"]: obj for obj, _ in CASES} | {"learned": {"rope_type": "learned"}}
    examples["dual_chunk"] = {"rope_type": "dual_chunk"}
    examples["longrope"] = {
        "rope_type": "longrope",
        "short_factor": [1.0] * (base.rotary_dim // 2),
        "long_factor": [2.0] * (base.rotary_dim // 2),
    }
    assert set(examples) == set(KINDS)
    for kind, obj in examples.items():
        scaling = RopeScaling.from_dict({key: v for key, v in obj.items() if not key.startswith("mrope")})
        assert (kind in runnable_kinds(base)) == (kind not in refused)
        if kind not in refused:
            check(scaling, base)
            continue
        with pytest.raises(RequestError, match="cannot run on this model: use one of default, linear") as caught:
            check(scaling, base, param="x")
        assert caught.value.param == "x.rope_type"
        assert not any(f" {kind}" in caught.value.message.split("use one of")[1].split(",") for kind in refused)


def test_theta_is_refused_with_learned_frequencies() -> None:
    with pytest.raises(RequestError, match="learned") as caught:
        check(RopeScaling.from_dict({"rope_type": "default", "rope_theta": 1e5}), LEARNED, param="x")
    assert caught.value.param == "x.rope_theta"


def test_mrope_equals_the_plain_rotation_on_text() -> None:
    old = {"type": "mrope", "mrope_section": [8, 12, 12]}
    assert RopeScaling.from_dict(old) == RopeScaling.from_dict({**old, "type": "default"})
    assert spec(old).fingerprint == spec({"rope_type": "default"}).fingerprint
    with pytest.raises(RequestError, match="add up to the 32 rotated pairs") as caught:
        check(RopeScaling.from_dict({**old, "mrope_section": [8, 12, 13]}), BASE, param="x")
    assert caught.value.param == "x.mrope_section"


def test_llama3_with_equal_low_and_high_stays_finite() -> None:
    obj = {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.0}
    got = np.array(spec(obj).inv_freq)
    w = np.array(spec({"rope_type": "default"}).inv_freq)
    turns = BASE.trained_len * w / (2 * np.pi)
    np.testing.assert_allclose(got, np.where(turns < 2.0, w / 8, w), rtol=1e-12)


# --- Llama-2 from 4,096 to 100,000 tokens, the published worked example ----------------------------------------------

LLAMA2 = RotaryBase(1e4, 128, 128, 4096)
STRETCH = 100_000 / 4096


def test_llama2_slow_pairs() -> None:
    wavelengths = 2 * np.pi / np.array(spec({"rope_type": "default"}, base=LLAMA2).inv_freq)
    assert int((wavelengths > 4096).sum()) == 18
    assert int(np.argmax(wavelengths > 4096)) == 46
    assert wavelengths[-1] == pytest.approx(54_410, abs=1)
    code_llama = spec({"rope_type": "default", "rope_theta": 1e6}, base=LLAMA2)
    assert 2 * np.pi / code_llama.inv_freq[-1] == pytest.approx(5.06e6, rel=1e-3)


def test_llama2_ntk_base() -> None:
    stretched = spec({"rope_type": "ntk", "factor": STRETCH}, base=LLAMA2)
    by_base = spec({"rope_type": "default", "rope_theta": 256_842.0}, base=LLAMA2)
    np.testing.assert_allclose(stretched.inv_freq, by_base.inv_freq, rtol=1e-5)


def test_llama2_yarn_ramp() -> None:
    yarn = spec({"rope_type": "yarn", "factor": STRETCH}, base=LLAMA2)
    ratio = np.array(spec({"rope_type": "default"}, base=LLAMA2).inv_freq) / np.array(yarn.inv_freq)
    assert yarn.rotary_scale == pytest.approx(1.3195, abs=1e-4)
    np.testing.assert_allclose(ratio[:21], 1.0, rtol=1e-12)
    np.testing.assert_allclose(ratio[46:], STRETCH, rtol=1e-12)
    assert (np.diff(ratio[20:47]) > 0).all()


# --- length -----------------------------------------------------------------------------------------------------------


def test_dynamic_frequencies_change_at_grid_points() -> None:
    scaling = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2.0})
    for length, expected in [
        (1, 4096),
        (4096, 4096),
        (4097, 4096 * 2**0.25),
        (8191, 8192),
        (8192, 8192),
        (8193, 8192 * 2**0.25),
        (4096 * 1024, 4096 * 1024),
    ]:
        assert effective_length(scaling, BASE, length) == pytest.approx(expected, rel=1e-15)
    same = {resolve(scaling, BASE, length).fingerprint for length in (6889, 7000, 8000, 8192)}
    assert len(same) == 1
    assert resolve(scaling, BASE, 8193).fingerprint not in same
    assert resolve(scaling, BASE, 10) == spec({"rope_type": "default"})


def test_kinds_that_depend_on_the_length() -> None:
    depends = {
        "default": False,
        "linear": False,
        "ntk": False,
        "yarn": False,
        "llama3": False,
        "dynamic": True,
        "longrope": True,
        "proportional": False,
        "dual_chunk": False,
        "self_extend": False,
        "rerope": False,
        "log_n": False,
    }
    for obj, _ in CASES:
        scaling = RopeScaling.from_dict(obj)
        assert scaling.depends_on_length == (depends[scaling.rope_type] and "alpha" not in obj)
        fingerprints = {resolve(scaling, BASE, length).fingerprint for length in (1, 100_000)}
        assert (len(fingerprints) == 2) == (scaling.depends_on_length or "length_scores" in obj)


# --- the object -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("obj", "length"), CASES)
def test_old_names_are_equivalent(obj: dict[str, Any], length: int) -> None:
    old = {("type" if key == "rope_type" else key): value for key, value in obj.items()}
    assert RopeScaling.from_dict(old) == RopeScaling.from_dict(obj) == RopeScaling.from_dict({**obj, **old})
    if obj["rope_type"] == "longrope":
        assert RopeScaling.from_dict({**old, "type": "su"}) == RopeScaling.from_dict(obj)


@pytest.mark.parametrize(("obj", "length"), CASES)
def test_objects_are_equal_after_a_round_trip_and_pickling(obj: dict[str, Any], length: int) -> None:
    scaling = RopeScaling.from_dict(obj)
    assert scaling.to_dict() == obj
    again = RopeScaling.from_dict(scaling.to_dict())
    assert again == scaling
    assert hash(again) == hash(scaling)
    assert pickle.loads(pickle.dumps(scaling)) == scaling
    resolved = resolve(scaling, BASE, length)
    assert pickle.loads(pickle.dumps(resolved)).fingerprint == resolved.fingerprint


def test_null_equals_absent() -> None:
    obj = {"rope_type": "yarn", "factor": 4.0, "attention_factor": None, "beta_fast": None, "type": None}
    assert RopeScaling.from_dict(obj).to_dict() == {"rope_type": "yarn", "factor": 4.0}


def test_nested_objects() -> None:
    obj = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default"},
    }
    scaling = RopeScaling.from_dict(obj)
    assert scaling.rope_type == "nested"
    assert scaling.to_dict() == obj
    assert pickle.loads(pickle.dumps(scaling)) == scaling
    assert dict(scaling.groups)["full_attention"] == RopeScaling.from_dict(obj["full_attention"])
    assert not scaling.depends_on_length
    assert RopeScaling.from_dict({"sliding_attention": {"type": "dynamic", "factor": 2}}).depends_on_length
    with pytest.raises(ValueError, match="group by group"):
        resolve(scaling, BASE, 1)


def test_fingerprint_includes_both_parts() -> None:
    specs = [
        RotarySpec((1.0, 0.5)),
        RotarySpec((1.0, 0.25)),
        RotarySpec((1.0, 0.5), rotary_scale=1.1),
        RotarySpec((1.0,)),
    ]
    assert len({one.fingerprint for one in specs}) == len(specs)
    assert spec({"rope_type": "linear", "factor": 1.0}).fingerprint == spec({"rope_type": "default"}).fingerprint
    assert len(specs[0].fingerprint) == 64


def test_importing_the_module_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "import windlass.engine.rotary.rope_scaling, windlass.engine.rotary.rope_scaling, windlass.engine.interface.outputs\n"
        "print(*[name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


# --- refusals ---------------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("obj", "param", "says"),
    [
        ([], "", "must be an object"),
        ("yarn", "", "must be an object"),
        ({}, ".rope_type", "missing: give one of default, linear, ntk, dynamic, yarn, llama3, longrope"),
        ({"factor": 4}, ".rope_type", "missing"),
        (
            {"rope_type": "yarm", "factor": 4},
            ".rope_type",
            "'yarm' is not known (did you mean 'yarn'?): use one of default, linear, ntk",
        ),
        ({"type": "axial"}, ".type", "'axial' is not known: use one of default, linear, ntk, dynamic, yarn, llama3"),
        (
            {"rope_type": "spiral"},
            ".rope_type",
            "longrope, proportional, learned, dual_chunk, self_extend, rerope, log_n, su, mrope",
        ),
        ({"rope_type": "learned", "rope_theta": 1e4}, ".rope_theta", "not a field of rope_type 'learned'"),
        ({**YARN, "mrope_section": 64}, ".mrope_section", "list of pair counts"),
        ({**YARN, "mrope_section": [16.5, 15.5]}, ".mrope_section", "whole numbers"),
        ({**YARN, "mrope_section": [-1, 33]}, ".mrope_section", "not negative"),
        ({**YARN, "mrope_interleaved": 1}, ".mrope_interleaved", "true or false"),
        ({"rope_type": 7}, ".rope_type", "not known"),
        ({"rope_type": ["yarn"]}, ".rope_type", "not known"),
        ({"rope_type": "yarn", "type": "linear", "factor": 4}, ".type", "keep rope_type only"),
        ({**YARN, "alpha": 2}, ".alpha", "not a field of rope_type 'yarn': it takes rope_theta, factor, original_max"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 1}, ".beta_fast", "it takes rope_theta, factor"),
        ({"rope_type": "default", "factor": 2}, ".factor", "not a field"),
        ({"rope_type": "linear"}, ".factor", "missing"),
        ({"rope_type": "ntk"}, ".factor", "missing"),
        ({"rope_type": "dynamic"}, ".factor", "alpha"),
        ({"rope_type": "yarn"}, ".factor", "missing"),
        ({"rope_type": "llama3", "factor": 8.0}, ".low_freq_factor", "missing"),
        ({"rope_type": "longrope", "short_factor": SHORT}, ".long_factor", "missing"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 3.0}, ".factor", "ignored with alpha"),
        ({**YARN, "factor": 0}, ".factor", "greater than 0"),
        ({**YARN, "factor": -1.5}, ".factor", "greater than 0"),
        ({**YARN, "factor": math.nan}, ".factor", "finite"),
        ({**YARN, "factor": math.inf}, ".factor", "finite"),
        ({**YARN, "factor": 10**400}, ".factor", "finite"),
        ({**YARN, "factor": 10**5000}, ".factor", "finite"),
        ({**YARN, "factor": True}, ".factor", "must be a number"),
        ({**YARN, "factor": "4"}, ".factor", "must be a number"),
        ({**YARN, "factor": [4]}, ".factor", "must be a number"),
        ({**YARN, "rope_theta": 1.0}, ".rope_theta", "greater than 1"),
        ({**YARN, "rope_theta": -1e4}, ".rope_theta", "greater than 1"),
        ({**YARN, "original_max_position_embeddings": 0}, ".original_max_position_embeddings", "at least 2"),
        ({**YARN, "original_max_position_embeddings": 10.5}, ".original_max_position_embeddings", "whole number"),
        ({**YARN, "original_max_position_embeddings": True}, ".original_max_position_embeddings", "number"),
        ({**YARN, "original_max_position_embeddings": 1e300}, ".original_max_position_embeddings", "whole number"),
        ({**YARN, "truncate": 1}, ".truncate", "true or false"),
        ({**YARN, "attention_factor": 0.0}, ".attention_factor", "greater than 0"),
        ({**YARN, "mscale": -1.0}, ".mscale", "negative"),
        ({**YARN, "beta_fast": 1.0, "beta_slow": 2.0}, ".beta_fast", "smaller than beta_slow"),
        ({**LLAMA3, "low_freq_factor": 5.0}, ".high_freq_factor", "smaller"),
        ({**LONGROPE, "long_factor": LONG[:-1]}, ".long_factor", "as many"),
        ({**LONGROPE, "short_factor": 1.0}, ".short_factor", "list of numbers"),
        ({**LONGROPE, "short_factor": []}, ".short_factor", "one number per rotated pair"),
        ({**LONGROPE, "short_factor": [1.0, 0.0]}, ".short_factor[1]", "greater than 0"),
        ({**LONGROPE, "short_factor": [1.0, math.nan]}, ".short_factor[1]", "finite"),
        ({**LONGROPE, "short_mscale": 1.1}, ".long_mscale", "together"),
        (
            {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.2, "attention_factor": 1.0},
            ".attention_factor",
            "leave one out",
        ),
        ({**YARN, "partial_rotary_factor": 0.5}, ".partial_rotary_factor", "belongs to the model"),
        ({"full_attention": YARN, "factor": 4}, ".factor", "next to group names"),
        ({"full_attention": {"full_attention": YARN}}, ".full_attention", "flat"),
        ({"full_attention": None}, "", "gives no object"),
        ({"full_attention": 4}, ".full_attention", "must be an object"),
        ({"sliding_attention": {**YARN, "factor": 0}}, ".sliding_attention.factor", "greater than 0"),
    ],
)
def test_refusals_name_the_field_and_the_remedy(obj: Any, param: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        RopeScaling.from_dict(obj, param="rope_scaling")
    assert caught.value.param == f"rope_scaling{param}"
    assert says in caught.value.message
    assert caught.value.message.startswith("rope_scaling")
    assert len(caught.value.message) < 300
    says = caught.value.message
    expected = "missing_field" if "is missing" in says else "invalid_value"
    foreign = ("is not a field", "belongs to the model", "next to group names")
    assert caught.value.code == ("unknown_field" if any(words in says for words in foreign) else expected)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "got true"),
        ([1], "got a list"),
        ({}, "got an object"),
        ("4", "got '4'"),
        (math.inf, "got Infinity"),
        (-math.inf, "got -Infinity"),
        (math.nan, "got NaN"),
        (-(10**400), "got a huge integer"),
    ],
)
def test_values_are_shown_as_json(value: Any, shown: str) -> None:
    with pytest.raises(RequestError, match=f"{shown}$"):
        RopeScaling.from_dict({"rope_type": "linear", "factor": value})


@pytest.mark.parametrize(("value", "shown"), [(None, "null"), ([YARN], "a list"), (False, "false"), (4, "4")])
def test_values_that_are_no_objects_are_shown_as_json(value: Any, shown: str) -> None:
    with pytest.raises(RequestError) as caught:
        RopeScaling.from_dict(value)
    example = '{"rope_type": "yarn", "factor": 4}'
    assert caught.value.message == f"rope_scaling must be an object such as {example}, got {shown}"
    assert json.loads(example) == YARN
    assert (caught.value.param, caught.value.code) == ("rope_scaling", "invalid_value")


@pytest.mark.parametrize(
    ("obj", "param", "says"),
    [
        ({**LONGROPE, "short_factor": [1.0], "long_factor": [1.0]}, ".short_factor", "must hold 32 numbers"),
        ({"rope_type": "ntk", "factor": 1e308}, ".factor", "rope.factor gives frequencies outside"),
        ({"rope_type": "dynamic", "factor": 1e308}, ".factor", "moderate"),
        ({"rope_type": "dynamic", "alpha": 1e308}, ".alpha", "rope.alpha gives frequencies outside"),
        ({"rope_type": "linear", "factor": 1e-300}, ".factor", "moderate"),
        (
            {"rope_type": "linear", "factor": 1e-300, "rope_theta": 5e5},
            "",
            "more moderate values",
        ),  # either may be meant
        ({**LONGROPE, "short_factor": [1e-300] * 32, "factor": 4.0}, "", "moderate"),  # factor has no part in it
        (
            {**YARN, "mrope_section": [10**300, 1]},
            ".mrope_section",
            "32 rotated pairs of this model, got a huge integer",
        ),
        ({**YARN, "mrope_section": [40]}, ".mrope_section", "got 40"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e30}, ".attention_factor", "must lie between"),
    ],
)
def test_check_refuses_scalings_unsuitable_for_the_model(obj: dict[str, Any], param: str, says: str) -> None:
    scaling = RopeScaling.from_dict(obj)
    with pytest.raises(RequestError) as caught:
        check(scaling, BASE, param="rope")
    assert caught.value.param == f"rope{param}"
    assert caught.value.code == "invalid_value"
    assert says in caught.value.message and len(caught.value.message) < 200


def test_check_accepts_every_case() -> None:
    for obj, _ in CASES:
        check(RopeScaling.from_dict(obj), BASE)


@pytest.mark.parametrize("trained", [71, 4096, 32_000, 128_000, 1_010_000])
def test_exact_lengths_equal_those_of_the_request(trained: int) -> None:
    """With one token less, a request would be recomputed for its next token although its window is full."""
    base = RotaryBase(rope_theta=10_000.0, head_dim=DIM, rotary_dim=DIM, trained_len=trained)
    dynamic = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2.0})
    for length in (1, trained, trained + 1, *range(trained + 7, 2 * trained, max(1, trained // 501))):
        reach = max(length, trained)
        assert (
            effective_length(dynamic, base, length, exact=True)
            == last_length(dynamic, base, length, exact=True)
            == reach
        )
