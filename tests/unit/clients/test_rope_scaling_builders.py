"""The builders of `rope_scaling` take and refuse what the server does, and make the very object it would."""

from __future__ import annotations

import copy
import inspect
import json
import math
import typing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.clients import RopeScaling
from windlass.engine.errors import RequestError
from windlass.engine.rotary.rope_scaling import GROUP_NAMES
from windlass.engine.rotary.rope_scaling import RopeScaling as Accepted
from windlass.engine.rotary.scaling_fields import ALIASES, KINDS, SECTION_FIELDS, fields_of

BUILT = [
    (RopeScaling.default(), {"rope_type": "default"}),
    (RopeScaling.default(rope_theta=5e5), {"rope_type": "default", "rope_theta": 5e5}),
    (RopeScaling.linear(4), {"rope_type": "linear", "factor": 4}),
    (RopeScaling.linear(factor=2, rope_theta=100), {"rope_type": "linear", "rope_theta": 100, "factor": 2}),
    (RopeScaling.ntk(2.5), {"rope_type": "ntk", "factor": 2.5}),
    (RopeScaling.dynamic(2), {"rope_type": "dynamic", "factor": 2}),
    (RopeScaling.dynamic(alpha=8), {"rope_type": "dynamic", "alpha": 8}),
    (RopeScaling.yarn(4), {"rope_type": "yarn", "factor": 4}),
    (
        RopeScaling.yarn(original_max_position_embeddings=4096, truncate=False, mscale=1, mscale_all_dim=0),
        {
            "rope_type": "yarn",
            "original_max_position_embeddings": 4096,
            "mscale": 1,
            "mscale_all_dim": 0,
            "truncate": False,
        },
    ),
    (
        RopeScaling.yarn(4, attention_factor=1.5, beta_fast=64, beta_slow=2),
        {"rope_type": "yarn", "factor": 4, "attention_factor": 1.5, "beta_fast": 64, "beta_slow": 2},
    ),
    (RopeScaling.dual_chunk(), {"rope_type": "dual_chunk"}),
    (
        RopeScaling.dual_chunk(chunk_size=96, local_size=16, factor=2, beta_fast=16, log_n=True, length_scores=False),
        {
            "rope_type": "dual_chunk",
            "chunk_size": 96,
            "local_size": 16,
            "factor": 2,
            "beta_fast": 16,
            "log_n": True,
            "length_scores": False,
        },
    ),
    (RopeScaling.self_extend(), {"rope_type": "self_extend"}),
    (
        RopeScaling.self_extend(group_size=8, window=512, log_n=True),
        {"rope_type": "self_extend", "group_size": 8, "window": 512, "log_n": True},
    ),
    (RopeScaling.rerope(window=512), {"rope_type": "rerope", "window": 512}),
    (RopeScaling.rerope(factor=16.5, log_n=False), {"rope_type": "rerope", "factor": 16.5, "log_n": False}),
    (RopeScaling.log_n(), {"rope_type": "log_n"}),
    (
        RopeScaling.log_n(512, rope_theta=1e5),
        {"rope_type": "log_n", "rope_theta": 1e5, "original_max_position_embeddings": 512},
    ),
    (
        RopeScaling.llama3(8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192),
        {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        RopeScaling.longrope([1, 1.5], np.array([2.0, 4.0]), factor=np.float32(32), short_mscale=1, long_mscale=1.2),
        {
            "rope_type": "longrope",
            "short_factor": [1, 1.5],
            "long_factor": [2, 4],
            "factor": 32,
            "short_mscale": 1,
            "long_mscale": 1.2,
        },
    ),
    (RopeScaling.proportional(), {"rope_type": "proportional"}),
    (RopeScaling.proportional(8), {"rope_type": "proportional", "factor": 8}),
    (RopeScaling.learned(), {"rope_type": "learned"}),
    (
        RopeScaling.mrope(np.array([8, 12, 12]), interleaved=True),
        {"rope_type": "default", "mrope_section": [8, 12, 12], "mrope_interleaved": True},
    ),
    (RopeScaling.ntk(2, mrope_section=(1, 2)), {"rope_type": "ntk", "factor": 2, "mrope_section": [1, 2]}),
    (
        RopeScaling.in_groups(full_attention=RopeScaling.linear(8), sliding_attention=RopeScaling.default()),
        {"full_attention": {"rope_type": "linear", "factor": 8}, "sliding_attention": {"rope_type": "default"}},
    ),
    (
        RopeScaling.in_groups(sliding_attention={"type": "su", "short_factor": [1], "long_factor": [2]}),
        {"sliding_attention": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}},
    ),
]


@pytest.mark.parametrize(("scaling", "expected"), BUILT, ids=[json.dumps(pair[1])[:60] for pair in BUILT])
def test_a_builder_makes_what_the_server_takes(scaling: RopeScaling, expected: dict[str, Any]) -> None:
    assert isinstance(scaling, RopeScaling) and scaling == expected
    canonical = Accepted.from_dict(scaling).to_dict()
    assert json.dumps(scaling) == json.dumps(canonical)  # order and kinds of numbers too
    assert RopeScaling.from_dict(scaling) == scaling and RopeScaling(expected) == scaling
    assert copy.deepcopy(scaling) == scaling


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_builder_with_its_fields(kind: str) -> None:
    builder = getattr(RopeScaling, kind)
    parameters = inspect.signature(builder).parameters
    (rest,) = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
    (common,) = typing.get_args(typing.get_type_hints(builder)[rest])
    assert {*parameters, *typing.get_type_hints(common)} - {rest} == {*fields_of(kind), *SECTION_FIELDS}


REFUSED = [
    (lambda: RopeScaling.yarn(), "rope_scaling.factor is missing"),
    (lambda: RopeScaling.dynamic(), "rope_scaling.factor is missing"),
    (lambda: RopeScaling.linear(0), "rope_scaling.factor should be above 0, got 0"),
    (lambda: RopeScaling.linear(-1), "rope_scaling.factor should be above 0"),
    (lambda: RopeScaling.linear("4"), "rope_scaling.factor should be a number, not str"),
    (lambda: RopeScaling.linear(True), "rope_scaling.factor should be a number, not bool"),
    (lambda: RopeScaling.linear(math.nan), "rope_scaling.factor should be a finite number"),
    (lambda: RopeScaling.linear(10**400), "rope_scaling.factor should be a finite number"),
    (lambda: RopeScaling.linear(None), "rope_scaling.factor is missing"),
    (lambda: RopeScaling.default(rope_theta=1), "rope_scaling.rope_theta should be above 1"),
    (lambda: RopeScaling.yarn(4, mscale=-1), "rope_scaling.mscale should be at least 0"),
    (lambda: RopeScaling.yarn(4, beta_fast=0.5), "rope_scaling.beta_fast should not be below beta_slow"),
    (lambda: RopeScaling.yarn(4, truncate=1), "rope_scaling.truncate should be True or False"),
    (
        lambda: RopeScaling.yarn(original_max_position_embeddings=1.5),
        "rope_scaling.original_max_position_embeddings should be a whole number",
    ),
    (lambda: RopeScaling.dynamic(2, alpha=3), "rope_scaling.factor would be ignored beside alpha"),
    (
        lambda: RopeScaling.llama3(8, low_freq_factor=4, high_freq_factor=1),
        "rope_scaling.high_freq_factor should not be below low_freq_factor",
    ),
    (lambda: RopeScaling.longrope([1], [1, 2]), "rope_scaling.long_factor should hold as many"),
    (lambda: RopeScaling.longrope([1, 0], [1, 2]), "rope_scaling.short_factor[1] should be above 0"),
    (lambda: RopeScaling.longrope([], []), "rope_scaling.short_factor should hold 1 to"),
    (lambda: RopeScaling.longrope("12", [1]), "rope_scaling.short_factor should be a list"),
    (lambda: RopeScaling.longrope([1], [2], short_mscale=1), "rope_scaling.long_mscale is missing"),
    (
        lambda: RopeScaling.longrope([1], [2], short_mscale=1, long_mscale=1, attention_factor=2),
        "rope_scaling.attention_factor would be ignored",
    ),
    (lambda: RopeScaling.mrope([1, 2.5]), "rope_scaling.mrope_section should hold whole numbers"),
    (lambda: RopeScaling.learned(rope_theta=5), "rope_scaling.rope_theta is not a field of 'learned'"),
    (lambda: RopeScaling.linear(2, beta_fast=3), "rope_scaling.beta_fast is not a field of 'linear'"),
    (lambda: RopeScaling.in_groups(), "rope_scaling: give a scaling for"),
    (
        lambda: RopeScaling.in_groups(full_attention={"rope_type": "linear", "factor": -1}),
        "rope_scaling.full_attention.factor should be above 0",
    ),
    (
        lambda: RopeScaling.in_groups(full_attention=RopeScaling.in_groups(full_attention=RopeScaling.default())),
        "rope_scaling.full_attention should be flat",
    ),
    (
        lambda: RopeScaling.from_dict({"full_attention": {"rope_type": "default"}, "factor": 2}),
        "rope_scaling.factor stands beside groups",
    ),
    (lambda: RopeScaling.from_dict({"rope_type": "spiral"}), "rope_scaling.rope_type should be one of default, linear"),
    (lambda: RopeScaling.from_dict({"rope_type": "linear", "type": "ntk", "factor": 2}), "rope_scaling.rope_type"),
    (lambda: RopeScaling.from_dict({"rope_type": ["linear"], "factor": 2}), "rope_scaling.rope_type should be one of"),
    (lambda: RopeScaling.from_dict("yarn"), "rope_scaling should be an object"),
]


@pytest.mark.parametrize(("build", "says"), REFUSED, ids=[says[:50] for _, says in REFUSED])
def test_values_that_no_model_could_run_under_are_refused_by_name(build: Any, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


ALL_FIELDS = sorted({name for kind in KINDS for name in fields_of(kind)} | set(SECTION_FIELDS))
NUMBERS = st.sampled_from([0, 1, 2, 4.0, 0.5, -1, 1.5, 8192, 10**400, math.inf, math.nan, True, None, "2", 2**53])
VALUES = st.one_of(NUMBERS, st.lists(NUMBERS, max_size=3), st.just({}), st.booleans())


@st.composite
def flat_objects(draw: st.DrawFn) -> dict[str, Any]:
    """Objects of a known kind, most of whose fields belong to it, so that about a third of them are good."""
    kind = draw(st.sampled_from([*KINDS, *ALIASES]))
    fields = fields_of(ALIASES.get(kind, kind))
    good = {
        name: draw(st.just([2, 3]) if name in ("short_factor", "long_factor") else st.sampled_from([2, 4.0, 8]))
        for name in fields
        if draw(st.booleans())
    }
    extra = draw(st.dictionaries(st.sampled_from(ALL_FIELDS), VALUES, max_size=2))
    return {draw(st.sampled_from(["rope_type", "type"])): kind, **good, **draw(st.sampled_from([{}, {}, extra]))}


@settings(max_examples=300, deadline=None)
@given(st.one_of(flat_objects(), st.dictionaries(st.sampled_from(GROUP_NAMES), st.none() | flat_objects(), min_size=1)))
def test_objects_are_accepted_where_the_server_accepts_them(obj: dict[str, Any]) -> None:
    try:
        expected = Accepted.from_dict(obj).to_dict()
    except RequestError as error:
        with pytest.raises(ValueError) as caught:
            RopeScaling.from_dict(obj)
        assert str(caught.value).startswith(str(error.param))
    else:
        assert json.dumps(RopeScaling.from_dict(obj)) == json.dumps(expected)
