"""The builders of `rope_scaling` compared with the fields and the parser of the server."""

from __future__ import annotations

import copy
import inspect
import json
import typing
from typing import Any

import numpy as np
import pytest

from windlass.clients import RopeScaling
from windlass.engine.rotary.rope_scaling import RopeScaling as Accepted
from windlass.engine.rotary.scaling_fields import KINDS, SECTION_FIELDS, fields_of

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
        RopeScaling.in_groups(sliding_attention={"type": "su", "short_factor": np.array([1.0]), "long_factor": (2,)}),
        {"sliding_attention": {"type": "su", "short_factor": [1], "long_factor": [2]}},
    ),
    (
        RopeScaling.from_dict({"type": "linear", "factor": np.float32(4), "rope_theta": None}),
        {"type": "linear", "factor": 4},
    ),
]


@pytest.mark.parametrize(("scaling", "expected"), BUILT, ids=[json.dumps(pair[1])[:60] for pair in BUILT])
def test_builder_makes_the_object_that_the_server_accepts(scaling: RopeScaling, expected: dict[str, Any]) -> None:
    assert isinstance(scaling, RopeScaling) and scaling == expected
    assert Accepted.from_dict(json.loads(json.dumps(scaling))) == Accepted.from_dict(expected)
    assert RopeScaling.from_dict(scaling) == scaling and RopeScaling(expected) == scaling
    assert copy.deepcopy(scaling) == scaling


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_builder_with_its_fields(kind: str) -> None:
    builder = getattr(RopeScaling, kind)
    parameters = inspect.signature(builder).parameters
    (rest,) = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
    (common,) = typing.get_args(typing.get_type_hints(builder)[rest])
    assert {*parameters, *typing.get_type_hints(common)} - {rest} == {*fields_of(kind), *SECTION_FIELDS}
