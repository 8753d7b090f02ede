"""Automatic scaling: thresholds of the model by kind, configured ones, and errors."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.rotary.auto_scaling import (
    AUTO,
    MAX_STEPS,
    ScalingThreshold,
    checked_thresholds,
    make_thresholds,
    model_thresholds,
)
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, RotaryGroup, resolve
from windlass.engine.rotary.rotary_policy import RotaryPlan, RotaryPlanner

M = 128
BASE = RotaryBase(1e4, 16, 16, M)
YARN2, YARN4 = ({"rope_type": "yarn", "factor": factor} for factor in (2.0, 4.0))
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 32,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def scaling(obj: dict[str, Any] | None) -> RopeScaling | None:
    return None if obj is None else RopeScaling.from_dict(obj)


def groups(own: dict[str, Any] | None = None, base: RotaryBase = BASE) -> tuple[RotaryGroup, ...]:
    return (RotaryGroup("full_attention", base, scaling(own) or RopeScaling()),)


def planner(own: dict[str, Any] | None = None, longest: int = 1024, base: RotaryBase = BASE) -> RotaryPlanner:
    model = groups(own, base)
    return RotaryPlanner(model, ladder=model_thresholds(model, longest))


def chosen(plan: RotaryPlan) -> dict[str, Any]:
    return plan.groups[0].scaling.to_dict()


LEARNED = RotaryBase(1e4, 16, 16, M, inv_freq=tuple(0.5**j for j in range(8)))
OWN: dict[str, tuple[dict[str, Any] | None, RotaryBase, dict[int, dict[str, Any]]]] = {
    "plain": (None, BASE, {1: {"rope_type": "default"}, 128: {"rope_type": "default"}, 129: YARN2, 256: YARN2, 257: YARN4,
                           512: YARN4, 513: {**YARN4, "factor": 8.0}}),
    "yarn_trained": (
        {**YARN4, "original_max_position_embeddings": 32, "beta_fast": 16.0}, BASE,
        {1: {**YARN4, "original_max_position_embeddings": 32, "beta_fast": 16.0},
         129: {**YARN4, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}}),
    "yarn_without_factor": (
        {"rope_type": "yarn", "original_max_position_embeddings": 32}, BASE,
        {128: {"rope_type": "yarn", "original_max_position_embeddings": 32},
         129: {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}}),
    "yarn_put_on": (
        {**YARN4, "original_max_position_embeddings": 128}, BASE,
        {128: {"rope_type": "default"}, 129: {**YARN2, "original_max_position_embeddings": 128},
         300: {**YARN4, "original_max_position_embeddings": 128}}),
    "llama3": ({**LLAMA3, "original_max_position_embeddings": 16}, BASE,
               {128: {**LLAMA3, "original_max_position_embeddings": 16},
                129: {**LLAMA3, "factor": 16.0, "original_max_position_embeddings": 16}}),
    "linear": ({"rope_type": "linear", "factor": 3.0}, BASE, {128: {"rope_type": "linear", "factor": 3.0},
                                                              129: {"rope_type": "linear", "factor": 6.0}}),
    "alpha": ({"rope_type": "dynamic", "alpha": 50.0}, BASE, {128: {"rope_type": "dynamic", "alpha": 50.0},
                                                              129: {"rope_type": "dynamic", "alpha": 100.0}}),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, BASE, {1: {"rope_type": "dynamic", "factor": 2.0},
                                                                1000: {"rope_type": "dynamic", "factor": 2.0}}),
    "longrope": (LONGROPE, BASE, {1: LONGROPE, 33: LONGROPE, 1000: LONGROPE}),
    "learned": ({"rope_type": "learned"}, LEARNED, {128: {"rope_type": "learned"}, 129: {**LLAMA3, "factor": 2.0}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", OWN)
def test_thresholds_of_the_model(kind: str) -> None:
    own, base, expected = OWN[kind]
    for length, wanted in expected.items():
        plan = planner(own, base=base).plan(length, AUTO)
        assert chosen(plan) == wanted
        stage = plan.stage(1)
        assert stage.last_length is None and plan.policy == "frozen"  # one choice from the first token to the last
        assert stage.specs[0] == resolve(RopeScaling.from_dict(wanted), base, length)
        assert stage.choice is not None and stage.choice.length == length
        assert stage.choice.up_to is None or stage.choice.up_to >= length


def test_the_first_threshold_has_no_scaling() -> None:
    """Frequencies and attention factor are equal, and therefore the fingerprint and cached prefixes."""
    alone = RotaryPlanner(groups()).plan(100).stage(100)
    assert planner().plan(100, AUTO).stage(100).specs == alone.specs


@pytest.mark.parametrize(
    ("own", "ends"),
    [
        (None, [128, 256, 512, 1024]),
        (LONGROPE, [32]),
        ({"rope_type": "dynamic", "factor": 2.0}, [int(M * 2 ** (k / 4)) for k in range(13)]),
    ],
)
def test_lengths_at_which_the_choice_changes(own: dict[str, Any] | None, ends: list[int]) -> None:
    """Frequencies change directly after each threshold and at no other length, as `up_to` reports."""
    climbing = planner(own)
    specs = [climbing.plan(length, AUTO).stage(1).specs for length in range(1, 1025)]
    changes = [length for length in range(1, 1024) if specs[length] != specs[length - 1]]
    assert changes == [end for end in ends if end < 1024]
    for length in range(1, 1025, 7):
        choice = climbing.plan(length, AUTO).stage(1).choice
        assert choice is not None
        assert choice.up_to == next((end for end in ends if end >= length), None)


def test_the_choice_follows_the_context_with_recompute_and_rotate() -> None:
    for policy in ("recompute", "rotate"):
        plan = planner().plan(1000, AUTO, policy)
        assert plan.policy == policy
        ends, stage = [], plan.stage(1)
        while stage.last_length is not None:
            ends.append(stage.last_length)
            assert chosen(planner().plan(stage.last_length, AUTO)) == plan.groups_in(stage)[0].scaling.to_dict()
            stage = plan.stage(stage.last_length + 1)
        assert ends == [128, 256, 512]
        assert plan.report(plan.stage(200), 1).parameters["factor"] == 2.0
        assert plan.report(plan.stage(200), 1).auto == {"length": None, "up_to": 256}


def test_only_global_layers_of_two_groups_are_scaled() -> None:
    local = RotaryGroup("sliding_attention", RotaryBase(1e3, 16, 16, M), RopeScaling())
    model = (local, *groups({"rope_type": "linear", "factor": 8.0}))
    plan = RotaryPlanner(model, ladder=model_thresholds(model, 1024)).plan(200, AUTO)
    assert [group.scaling.get("factor") for group in plan.groups] == [None, 16.0]


def test_auto_ignores_the_default_of_the_server() -> None:
    model, served = groups(), groups({"rope_type": "linear", "factor": 2.0})
    climbing = RotaryPlanner(served, ladder=model_thresholds(model, 1024))
    assert chosen(climbing.plan(100)) == {"rope_type": "linear", "factor": 2.0}
    assert chosen(climbing.plan(100, AUTO)) == {"rope_type": "default"}


def test_auto_as_the_default_of_the_server() -> None:
    model = groups()
    climbing = RotaryPlanner(model, None, model_thresholds(model, 1024), auto=True)
    assert chosen(climbing.plan(200)) == YARN2
    assert chosen(climbing.plan(200, scaling({"rope_type": "default"}))) == {"rope_type": "default"}
    with pytest.raises(RequestError, match="no rotation that could be scaled") as caught:
        RotaryPlanner(model).plan(1, AUTO)
    assert caught.value.param == "rope_scaling"


# ---- configured thresholds -------------------------------------------------------------------------------------------
def steps(*given: tuple[int | None, dict[str, Any] | None]) -> tuple[ScalingThreshold, ...]:
    return tuple(ScalingThreshold(up_to, scaling(obj), obj and obj["rope_type"]) for up_to, obj in given)


def test_configured_thresholds_replace_those_of_the_model() -> None:
    model = groups(LONGROPE)
    given = steps((50, None), (400, YARN4), (900, {"rope_type": "linear", "factor": 4.0}))
    climbing = RotaryPlanner(model, ladder=make_thresholds(model, given, 2048, "--x"))
    kinds = {length: chosen(climbing.plan(length, AUTO))["rope_type"] for length in (50, 51, 400, 401, 900)}
    assert kinds == {50: "longrope", 51: "yarn", 400: "yarn", 401: "linear", 900: "linear"}
    choice = climbing.plan(33, AUTO).stage(1).choice
    assert choice is not None and choice.described() == {
        "length": 33,
        "up_to": 50,
    }  # the long list, up to the step's end
    assert climbing.plan(60, AUTO).report(climbing.plan(60, AUTO).stage(1), 0).auto == {
        "length": 60,
        "up_to": 400,
        "profile": "yarn",
    }
    with pytest.raises(RequestError, match="have 901 tokens, the last threshold of this server is 900") as caught:
        climbing.plan(901, AUTO)
    assert (caught.value.param, caught.value.code) == ("rope_scaling", "context_length_exceeded")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (((256, YARN2), (256, YARN4)), "--x: step 2 holds up to 256 tokens, the one before it 256: lengths must go up"),
        (((256, YARN2), (128, YARN4)), "step 2 holds up to 128 tokens, the one before it 256"),
        (((256, YARN4), (512, YARN2)), "step 2 scales by 2, the one before it by 4: factors must not go down"),
        (((256, YARN4), (512, None)), "step 2 scales by 1, the one before it by 4"),
        (((512, {"rope_type": "dynamic", "factor": 2.0}), (1024, YARN2)), "step 2 scales by 2, the one before it by 7"),
        (((None, None), (512, YARN2)), "step 1 has no up_to, which only the last may leave out"),
        (((256, {"rope_type": "learned"}),), "step 1.rope_type 'learned' cannot run on this model"),
        (tuple((n, None) for n in range(1, MAX_STEPS + 2)), f"has 65 steps: give 1 to {MAX_STEPS}"),
        ((), "has 0 steps"),
    ],
)  # fmt: skip
def test_unordered_thresholds_are_refused(given: Any, says: str) -> None:
    with pytest.raises(LoadError) as caught:
        checked_thresholds(groups(), steps(*given), "--x")
    assert says in str(caught.value)


def test_equal_factors_and_an_open_last_threshold_are_valid() -> None:
    given = steps((256, YARN2), (512, YARN2), (None, {"rope_type": "dynamic", "factor": 2.0}))
    with pytest.raises(LoadError, match="step 3 scales by 1"):
        checked_thresholds(groups(), given, "--x")
    assert checked_thresholds(groups(), steps((256, YARN2), (None, YARN2)), "--x").end is None


def test_length_dependent_scores_are_fixed_on_arrival() -> None:
    given = steps((M, None), (None, {"rope_type": "dual_chunk", "length_scores": True}))
    climbing = RotaryPlanner(groups(), ladder=make_thresholds(groups(), given, 1024, "--x"))
    plan = climbing.plan(4 * M, AUTO, "recompute")
    assert plan.policy == "recompute" and plan.stage(M).specs[0].distances.score_factor == 1.0
    specs = {plan.stage(length).specs for length in (M + 1, 2 * M, 4 * M)}
    assert len(specs) == 1 and specs == {climbing.plan(4 * M, AUTO).stage(1).specs}
