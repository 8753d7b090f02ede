"""The notation of `--rope-ladder`: repeated, with commas, and when it is wrong."""

from __future__ import annotations

import pytest

from windlass.engine.errors import LoadError
from windlass.engine.rotary.auto_scaling import ScalingThreshold
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.config.engine_options import parse_ladder

LONG = RopeScaling.from_dict({"rope_type": "yarn", "factor": 4})
PROFILES = {"long": LONG, "longer": RopeScaling.from_dict({"rope_type": "yarn", "factor": 8})}


def test_steps_are_repeated_or_stand_between_commas() -> None:
    wanted = (ScalingThreshold(8192), ScalingThreshold(32768, LONG, "long"))
    for values in (["8192=none,32768=long"], ["8192=none", " 32768 = long "], ["8192=none,", ",32768=long"]):
        assert parse_ladder(values, PROFILES) == wanted
    assert parse_ladder(None, PROFILES) == parse_ladder([], {}) == ()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("long", "--rope-ladder must be TOKENS=PROFILE, several with commas, such as 8192=none,32768=long; got 'long'"),
        ("8192=", "must be TOKENS=PROFILE"),
        ("=long", "must be TOKENS=PROFILE"),
        ("0=long", "must be TOKENS=PROFILE"),
        ("-5=long", "must be TOKENS=PROFILE"),
        ("1e4=long", "must be TOKENS=PROFILE"),
        ("٣=long", "must be TOKENS=PROFILE"),
        ("9" * 11 + "=long", "must be TOKENS=PROFILE"),
        ("8192=lonk", "no --rope-profile has that name (did you mean 'long'?); none is the model as it is"),
        (",".join(f"{n}=none" for n in range(1, 66)), "--rope-ladder has 65 steps: give at most 64"),
    ],
)
def test_what_it_cannot_be_is_named(value: str, says: str) -> None:
    with pytest.raises(LoadError) as caught:
        parse_ladder([value], PROFILES)
    assert says in str(caught.value)


def test_a_profile_may_not_be_called_as_the_model_itself_is() -> None:
    with pytest.raises(LoadError, match="none is the model as it is, and a --rope-profile too"):
        parse_ladder(["8192=none"], {"none": LONG})
