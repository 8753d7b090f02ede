"""The notation of `rope_profile`: on the command line, in a variable, and errors."""

from __future__ import annotations

import json

import pytest

from windlass.engine.errors import EngineError
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.config.engine_options import is_profile_name, parse_profiles

YARN, LINEAR = {"rope_type": "yarn", "factor": 4}, {"rope_type": "linear", "factor": 2.5}
BOTH = {"long": RopeScaling.from_dict(YARN), "wide-2.0": RopeScaling.from_dict(LINEAR)}
ARGUMENTS = [f"long={json.dumps(YARN)}", f"wide-2.0={json.dumps(LINEAR)}"]
OBJECT = json.dumps({"long": YARN, "wide-2.0": LINEAR}, indent=1)


@pytest.mark.parametrize(
    "values",
    [
        ARGUMENTS,
        [" ".join(ARGUMENTS)],
        " ".join(ARGUMENTS).split(),  # the value of a variable, which the parser of the command line splits at spaces
        [OBJECT],
        OBJECT.split(),
        [f"  {OBJECT}\n"],
        [json.dumps({"long": YARN}), ARGUMENTS[1]],
        [ARGUMENTS[0] + json.dumps({"wide-2.0": LINEAR})],
        ["long=yarn 4", "wide-2.0=linear 2.5"],
        "long=yarn 4 wide-2.0=linear factor=2.5".split(),
        ["long=yarn 4", ARGUMENTS[1]],
        ["long=yarn 4", json.dumps({"wide-2.0": LINEAR})],
        [json.dumps({"long": "yarn 4", "wide-2.0": "linear 2.5"})],
    ],
)
def test_every_notation_reads_alike(values: list[str]) -> None:
    assert parse_profiles(values) == BOTH
    assert list(parse_profiles(values)) == ["long", "wide-2.0"]


def test_no_profiles() -> None:
    assert parse_profiles([]) == parse_profiles([" "]) == parse_profiles(["{}"]) == {}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["long"], "`rope_profile` must be NAME=SCALING such as long=\"yarn 4\", got 'long'"),
        (["=4"], "`rope_profile` '': a name has 1 to 64"),
        (["-x={}"], "`rope_profile` '-x': a name"),
        (["a/b={}"], "`rope_profile` 'a/b': a name"),
        ([f"{'x' * 65}={{}}"], "a name has 1 to 64"),
        (['{"a b": {}}'], "`rope_profile` 'a b': a name"),
        (["long={"], "`rope_profile` long is not valid JSON"),
        (["long="], "`rope_profile` long is empty: write yarn 4"),
        (["long=" + "[" * 100_000], "`rope_profile` long"),
        (["{"], "`rope_profile` is not valid JSON"),
        (["long=4"], "`rope_profile` long.rope_type '4' is not known: use one of default"),
        (["long=yarn"], "`rope_profile` long.factor is missing"),
        (
            ["long=yarn 4 facto=2"],
            "`rope_profile` long.facto is not a field of rope_type 'yarn' (did you mean 'factor'?)",
        ),
        (["long=yarn 4 8"], "`rope_profile` long.factor is given twice in 'yarn 4 8'"),
        (['{"long": 4}'], "`rope_profile` long must be an object"),
        (['long={"rope_type": "yarn", "factor": 0}'], "`rope_profile` long.factor must be greater than 0"),
        (['long={"rope_type": "yarn", "factor": NaN}'], "`rope_profile` long.factor must be a finite number"),
        (['long={"rope_type": "spiral"}'], "`rope_profile` long.rope_type 'spiral' is not known: use one of default"),
        (['long={"rope_type": "linear", "factor": 1, "x": 1}'], "`rope_profile` long.x is not a field"),
        ([*ARGUMENTS, ARGUMENTS[0]], "`rope_profile` long is given twice"),
        ([json.dumps({"long": YARN}), ARGUMENTS[0]], "`rope_profile` long is given twice"),
        (['{"long": {}, "long": {}}'], "'long' is given twice"),
        ([ARGUMENTS[0], "and more"], "`rope_profile` must be NAME=SCALING"),
    ],
)
def test_a_wrong_profile_is_named_in_one_line(values: list[str], expected: str) -> None:
    with pytest.raises(EngineError) as caught:
        parse_profiles(values)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_names() -> None:
    assert all(map(is_profile_name, ["a", "4", "long", "Long_2.x-y", "x" * 64]))
    assert not any(map(is_profile_name, ["", ".a", "-a", "_a", "a b", "a=b", "{", "é", "x" * 65, "a\n"]))
