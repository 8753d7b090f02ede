"""The thresholds of `rope_scaling` auto: notation and errors."""

from __future__ import annotations

import pytest

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.rotary.auto_scaling import AUTO, ScalingThreshold
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.config.engine_options import EngineOptions
from windlass.server.startup.in_process import read_options

YARN = {"rope_type": "yarn", "factor": 4}
LONG = RopeScaling.from_dict(YARN)
PROFILES = {"long": YARN, "longer": {"rope_type": "yarn", "factor": 8}}


def thresholds(scaling: str | None, profiles: dict[str, dict] | None = None) -> tuple[ScalingThreshold, ...]:
    options = EngineOptions(rope_scaling=scaling, rope_profile=PROFILES if profiles is None else profiles)  # type: ignore[arg-type]
    assert options.parse_rope_scaling() == (AUTO if scaling and scaling.startswith("auto") else None)
    return options.scaling_thresholds()


def test_thresholds_follow_auto() -> None:
    expected = (ScalingThreshold(8192), ScalingThreshold(32768, LONG, "long"))
    for value in ("auto,8192=none,32768=long", "auto, 8k=none , 32K = long ", "auto,,8k=none,,32768=long,"):
        assert thresholds(value) == expected
    assert thresholds("8192=none,32768=long") == expected
    options = EngineOptions(rope_scaling="long,8192=none", rope_profile=PROFILES)  # type: ignore[arg-type]
    assert (options.parse_rope_scaling(), options.scaling_thresholds()) == (LONG, expected[:1])
    for value in ("yarn 4,8192=none", "yarn factor=4,8192=none"):
        options = EngineOptions(rope_scaling=value)
        assert (options.parse_rope_scaling(), options.scaling_thresholds()) == (LONG, expected[:1])
    lists = EngineOptions(rope_scaling="longrope short_factor=[1,2] long_factor=[2,3]")
    assert lists.scaling_thresholds() == () and lists.parse_rope_scaling().get("long_factor") == (2, 3)
    assert thresholds(None) == thresholds("auto", {}) == thresholds("auto,") == ()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("long", "must be a scaling with TOKENS=PROFILE, such as auto,8192=none,32768=long; got 'long'"),
        ("8192=", "must be a scaling with TOKENS=PROFILE"),
        ("=long", "must be a scaling with TOKENS=PROFILE"),
        ("0=long", "must be a scaling with TOKENS=PROFILE"),
        ("-5=long", "must be a scaling with TOKENS=PROFILE"),
        ("1e4=long", "must be a scaling with TOKENS=PROFILE"),
        ("٣=long", "must be a scaling with TOKENS=PROFILE"),
        ("9" * 11 + "=long", "must be a scaling with TOKENS=PROFILE"),
        ("8192=lonk", "no `rope_profile` has this name (did you mean 'long'?); none means the model without scaling"),
        (",".join(f"{n}=none" for n in range(1, 66)), "`rope_scaling` has 65 thresholds: give at most 64"),
    ],
)
def test_errors_name_the_value(value: str, says: str) -> None:
    with pytest.raises(LoadError) as caught:
        thresholds(f"auto,{value}")
    assert says in str(caught.value)


def test_a_profile_must_not_be_named_none() -> None:
    with pytest.raises(LoadError, match="the name of a `rope_profile` too"):
        thresholds("auto,8192=none", {"none": YARN})


def test_short_form_is_an_option_and_a_mapping_of_profiles() -> None:
    engine, _ = read_options({"rope_scaling": "yarn 4", "rope_profile": {"long": "yarn 4", "same": YARN}})
    assert engine.parse_rope_scaling() == LONG and engine.profiles() == {"long": LONG, "same": LONG}
    with pytest.raises(RequestError) as caught:
        EngineOptions(rope_scaling="yarn 4 facto=2").parse_rope_scaling()
    assert caught.value.param == "`rope_scaling`.facto" and "did you mean 'factor'?" in caught.value.message
    with pytest.raises(LoadError, match="no `rope_profile` has this name"):
        EngineOptions(rope_scaling="bogus").parse_rope_scaling()
