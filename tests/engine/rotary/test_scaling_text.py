"""Rotary scalings as text: the short form and JSON."""

from __future__ import annotations

import json

import pytest

from windlass.engine.errors import RequestError
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.scaling_text import MAX_CHARACTERS, names_kind, parse_scaling


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("yarn 4", {"rope_type": "yarn", "factor": 4}),
        ("  linear\t2.5 ", {"rope_type": "linear", "factor": 2.5}),
        ("yarn factor=4 beta_fast=16", {"rope_type": "yarn", "factor": 4, "beta_fast": 16}),
        ("yarn 8 truncate=false", {"rope_type": "yarn", "factor": 8, "truncate": False}),
        ("YaRN 4", {"rope_type": "yarn", "factor": 4}),  # as papers and the page write it
        ("default", {"rope_type": "default"}),
        (
            "longrope short_factor=[1, 2] long_factor=[2,3]",
            {"rope_type": "longrope", "short_factor": [1, 2], "long_factor": [2, 3]},
        ),
        (json.dumps({"rope_type": "yarn", "factor": 4}), {"rope_type": "yarn", "factor": 4}),
    ],
)
def test_text_equals_its_object(text: str, wanted: dict[str, object]) -> None:
    assert parse_scaling(text) == RopeScaling.from_dict(wanted) and names_kind(text)


@pytest.mark.parametrize(
    ("text", "param", "fragment"),
    [
        ("yarm 4", "where.rope_type", "'yarm' is not known (did you mean 'yarn'?)"),
        ("yarn", "where.factor", "is missing"),
        ("yarn x", "where.factor", "must be a number, got 'x'"),
        ("yarn 0", "where.factor", "greater than 0"),
        ("yarn NaN", "where.factor", "finite"),
        ("yarn 4 betafast=3", "where.betafast", "did you mean 'beta_fast'?"),
        ("yarn 4 8", "where.factor", "given twice"),
        ("yarn 4 rope_type=linear", "where.rope_type", "given twice"),
        ("yarn " + "[" * 50_000, "where.factor", "must be a number"),
        ("yarn " + "9" * 50_000, "where.factor", "must be a number"),
        ("{", "where", "not valid JSON"),
        ("{" + '"a":[' * 9000, "where", "not valid JSON"),
        ("", "where", "is empty"),
        ("yarn " + " " * MAX_CHARACTERS, "where", f"at most {MAX_CHARACTERS}"),
    ],
)
def test_errors_are_those_of_objects(text: str, param: str, fragment: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_scaling(text, param="where")
    assert caught.value.param == param and fragment in caught.value.message and len(caught.value.message) < 500


def test_names_are_no_scalings() -> None:
    assert not any(map(names_kind, ("long", "none such", "", "8192=none", "auto")))
