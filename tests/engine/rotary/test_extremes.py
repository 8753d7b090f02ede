"""Finite numbers in a scaling give frequencies in range, or an error that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.model.families.spec_reader import read_rotary_groups
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, check, resolve
from windlass.engine.rotary.rotary_policy import joint_fingerprint, make_plan

BASE = RotaryBase(10_000.0, 16, 16, 64)
ORDINARY: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "ntk": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}
EXTREMES = (5e-324, 1e-308, 1e-30, 1.0, 1.0000000000000002, 1e30, 1e308, 2, 2**52)


@pytest.mark.parametrize("kind", sorted(ORDINARY))
def test_extreme_numbers_in_any_field_are_used_or_refused(kind: str) -> None:
    from windlass.engine.rotary.scaling_fields import fields_of

    tried = refused = 0
    for field in fields_of(kind):
        for value in EXTREMES:
            given = {"rope_type": kind, **ORDINARY[kind], field: value}
            if field.endswith("_factor") and isinstance(ORDINARY[kind].get(field), list):
                given[field] = [value] * 8
            tried += 1
            try:
                scaling = RopeScaling.from_dict(given)
                check(scaling, BASE)
                specs = [resolve(scaling, BASE, length) for length in (1, 64, 65, 10_000_000)]
            except RequestError as error:
                refused += 1
                assert error.param is not None and error.param.startswith("rope_scaling")
                continue
            for spec in specs:
                assert all(math.isfinite(w) and w >= 0 for w in spec.inv_freq) and spec.rotary_scale > 0
    assert 0 < refused < tried


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 10**400},
        {"head_dim": 10**400},
        {"max_position_embeddings": 10**400},
        {"num_hidden_layers": 10**9},
        {"global_rope_theta": 10**400},
        {"rotary_dim": 10**400},
        {"use_sliding_window": "false"},
    ],
)
def test_invalid_numbers_in_config_json_give_one_short_line(config: dict[str, Any]) -> None:
    with pytest.raises(LoadError) as caught:
        read_rotary_groups({"model_type": "qwen2", "max_position_embeddings": 64, **config})
    assert next(iter(config)) in str(caught.value)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_the_fingerprint_of_a_report_includes_every_group() -> None:
    config = {"model_type": "gemma3_text", "max_position_embeddings": 64, "head_dim": 16}
    groups = read_rotary_groups(config)
    assert len(groups) == 2
    from windlass.engine.rotary.rope_scaling import apply_scaling

    other = apply_scaling(groups, RopeScaling.from_dict({"sliding_attention": {"rope_type": "linear", "factor": 2}}))
    reports = []
    for chosen in (groups, other):
        plan = make_plan(chosen, 60, None)
        reports.append(plan.report(plan.stage(60), 0))
        assert reports[-1].fingerprint == joint_fingerprint(plan.stage(60).specs)
    assert reports[0].fingerprint != reports[1].fingerprint
    assert reports[0].groups["full_attention"] == reports[1].groups["full_attention"]
