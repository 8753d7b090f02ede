"""`/v1/rotary`, its inspection, profiles, policies, and the rotary reports of answers, with a scripted engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from helpers.live_server import Live, live_server, server_fixture
from helpers.scripted_engine import ROTARY, ScriptedEngine, model_info

from windlass.engine.errors import LoadError
from windlass.engine.interface.outputs import EngineStats
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, RotaryGroup
from windlass.engine.rotary.rotary_policy import RotaryReport
from windlass.server.serving.request_rotation import check_profiles

PATH, INSPECT = "/v1/completions", "/v1/rotary/inspect"
LINEAR2, YARN = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
PROFILES = {name: RopeScaling.from_dict(obj) for name, obj in (("long", YARN), ("grow", DYNAMIC))}
SERVER_GROUPS = tuple(replace(group, scaling=RopeScaling.from_dict(LINEAR2)) for group in ROTARY)
TWO_GROUPS = (
    RotaryGroup("full_attention", RotaryBase(1e6, 16, 16, 128), RopeScaling()),
    RotaryGroup("sliding_attention", RotaryBase(1e4, 16, 16, 128), RopeScaling()),
)
PLAIN = [10000 ** (-2 * j / 16) for j in range(8)]  # of the scripted model: theta 10,000, 16 dimensions, 128 tokens
shared = server_fixture(model={"rotary_groups": SERVER_GROUPS}, rope_profiles=PROFILES)


def ntk(stretch: float) -> list[float]:
    """The formula of the NTK-aware base."""
    base = 10000 * stretch ** (16 / 14)
    return [base ** (-2 * j / 16) for j in range(8)]


# ---- settings of the server ------------------------------------------------------------------------------------------
def test_settings_show_the_model_the_default_and_the_profiles(live: Live) -> None:
    answer = live.http.get("/v1/rotary").json()
    group = {"rope_type": "default", "rope_theta": 1e4, "rotary_dim": 16}
    group |= {"original_max_position_embeddings": 128, "max_position_embeddings": 128}
    assert answer["model"] == {**group, "groups": {"full_attention": group}}
    scaled = {**group, **LINEAR2}
    assert answer["default"] == {**scaled, "groups": {"full_attention": scaled}, "policy": "frozen"}
    assert answer["profiles"] == {"long": YARN, "grow": DYNAMIC}
    assert (answer["policy"], answer["rope_update"], answer["rope_exact"]) == ("allow", None, False)
    assert answer["max_model_len"] == 256
    for scaling in answer["profiles"].values():  # they are objects that a request may send
        assert live.post(INSPECT, {"rope_scaling": scaling}).status_code == 200


@pytest.mark.parametrize(("update", "policy"), [(None, "frozen"), ("rotate", "rotate")])
def test_policy_of_the_default_scaling(update: Any, policy: str) -> None:
    groups = tuple(replace(group, scaling=PROFILES["grow"]) for group in ROTARY)
    engine = ScriptedEngine(info=model_info(rotary_groups=groups))
    with live_server(engine, rope_update=update, rope_policy="off", rope_exact=True) as live:
        answer = live.http.get("/v1/rotary").json()
        assert (answer["default"]["policy"], answer["rope_update"]) == (policy, update)
        assert (answer["policy"], answer["rope_exact"], answer["profiles"]) == ("off", True, {})
        assert live.post(INSPECT, {}).json()["policy"] == policy


def test_inspection(live: Live) -> None:
    answers = {}
    for name, scaling, expected in (
        ("default", {"rope_type": "default"}, PLAIN),
        ("server", None, [w / 2 for w in PLAIN]),
        ("linear", {"rope_type": "linear", "factor": 8.0}, [w / 8 for w in PLAIN]),
    ):
        answer = live.post(INSPECT, {"rope_scaling": scaling, "length": 100}).json()
        assert answer["inv_freq"] == pytest.approx(expected, rel=1e-12)
        assert answer["wavelengths"] == pytest.approx([2 * math.pi / w for w in expected], rel=1e-12)
        assert answer["attention_factor"] == 1.0 and answer["softmax_scale"] == 1.0
        assert (answer["policy"], answer["effective_length"], answer["length"]) == ("frozen", None, 100)
        answers[name] = answer["fingerprint"]
    assert len(set(answers.values())) == 3
    yarn = live.post(INSPECT, {"rope_scaling": YARN}).json()
    assert yarn["attention_factor"] == pytest.approx(0.1 * math.log(4) + 1)
    assert yarn["rope_type"] == "yarn" and yarn["parameters"]["factor"] == 4.0
    assert live.post(INSPECT, {"rope_scaling": "long"}).json() == yarn


def test_infinite_wavelength_is_null(live: Live) -> None:
    answer = live.post(INSPECT, {"rope_scaling": {"rope_type": "linear", "factor": 1e308}})
    assert answer.status_code == 200 and "Infinity" not in answer.text
    assert answer.json()["wavelengths"][-1] is None and answer.json()["inv_freq"][-1] > 0


def test_inspection_of_distance_based_attention(live: Live) -> None:
    chunks = {"rope_type": "dual_chunk", "length_scores": True, "log_n": True}
    answer = live.post(INSPECT, {"rope_scaling": chunks, "length": 250}).json()
    assert answer["distances"] == {"chunk_size": 96, "local_size": 16, "log_n_length": 128}
    assert answer["softmax_scale"] == pytest.approx(0.1 * math.log(2) + 1)  # 250 tokens are 256 on the grid
    assert answer["inv_freq"] == pytest.approx(PLAIN, rel=1e-12)
    grouped = live.post(INSPECT, {"rope_scaling": {"rope_type": "self_extend"}}).json()
    assert grouped["distances"] == {"window": 32, "group_size": 4}
    assert live.post(INSPECT, {"rope_scaling": {"rope_type": "rerope"}}).json()["distances"] == {"window": 64}
    plain = live.post(INSPECT, {"rope_scaling": {"rope_type": "default"}}).json()
    assert plain["distances"] is None and plain["softmax_scale"] == 1.0


@pytest.mark.parametrize(
    ("update", "policy", "reach"),
    [
        (None, "frozen", 128 * 2**0.5),
        ("rotate", "rotate", 128 * 2**0.5),
        ({"policy": "recompute"}, "recompute", 128 * 2**0.5),
        ({"policy": "recompute", "exact": True}, "recompute", 160),
    ],
)
def test_inspection_of_a_scaling_that_depends_on_length(live: Live, update: Any, policy: str, reach: float) -> None:
    for scaling in ("grow", DYNAMIC):
        answer = live.post(INSPECT, {"rope_scaling": scaling, "rope_update": update, "length": 160}).json()
        assert answer["policy"] == policy and answer["effective_length"] == pytest.approx(reach, rel=1e-12)
        assert answer["inv_freq"] == pytest.approx(ntk(4 * reach / 128 - 3), rel=1e-9)
    short = live.post(INSPECT, {"rope_scaling": "grow", "rope_update": update, "length": 20}).json()
    assert short["effective_length"] == 128 and short["inv_freq"] == pytest.approx(PLAIN, rel=1e-12)


def test_inspection_of_two_groups(live: Live) -> None:
    live.engine.info = model_info(rotary_groups=TWO_GROUPS, model_rotary_groups=TWO_GROUPS)
    answer = live.post(INSPECT, {"rope_scaling": YARN}).json()
    assert {name: group["rope_type"] for name, group in answer["groups"].items()} == {
        "full_attention": "yarn",
        "sliding_attention": "default",
    }
    assert answer["rope_type"] == "yarn" and answer["groups"]["sliding_attention"]["inv_freq"] == pytest.approx(PLAIN)
    assert set(live.http.get("/v1/rotary").json()["default"]["groups"]) == {"full_attention", "sliding_attention"}


def test_invalid_inspections_are_refused(live: Live) -> None:
    assert live.refuse(INSPECT, {"rope_scaling": {"rope_type": "spiral"}})["param"] == "rope_scaling.rope_type"
    assert live.refuse(INSPECT, {"rope_scaling": "other"})["code"] == "unknown_profile"
    assert live.refuse(INSPECT, {"length": 0})["param"] == "length"
    assert live.refuse(INSPECT, {"rope_update": "x"})["param"] == "rope_update"
    live.engine.info = None
    live.engine.state = "starting"
    assert live.http.get("/v1/rotary").status_code == 503
    live.refuse(INSPECT, {}, 503)


# ---- fields of requests ----------------------------------------------------------------------------------------------
def test_profile_equals_its_object(live: Live) -> None:
    live.complete("a", rope_scaling="long")
    live.complete("a", rope_scaling=YARN)
    live.chat("a", rope_scaling="long", rope_update={"policy": "rotate"})
    named, written, chat = live.engine.requests
    assert named.rope_scaling == written.rope_scaling == chat.rope_scaling == PROFILES["long"]
    assert (named.rope_update, chat.rope_update, chat.rope_exact) == (None, "rotate", False)


def test_short_form_equals_its_object(live: Live) -> None:
    live.complete("a", rope_scaling="yarn 2 beta_fast=16")
    assert live.engine.requests[-1].rope_scaling == RopeScaling.from_dict(
        {"rope_type": "yarn", "factor": 2, "beta_fast": 16}
    )
    assert live.refusal(PATH, {"prompt": "a", "rope_scaling": "yarn x"}) == ("rope_scaling.factor", "invalid_value")
    assert "'yarn'" in live.refuse(PATH, {"prompt": "a", "rope_scaling": "yarm 4"})["message"]
    assert 'scaling="linear"' not in live.http.get("/metrics").text
    live.complete("a", rope_scaling="linear 2")
    assert 'scaling="linear"' in live.http.get("/metrics").text and "linear 2" not in live.http.get("/metrics").text


def test_a_profile_wins_over_the_short_form() -> None:
    with live_server(rope_profiles={"yarn": RopeScaling.from_dict({"rope_type": "linear", "factor": 2})}) as live:
        live.complete("a", rope_scaling="yarn")
        assert live.engine.requests[-1].rope_scaling == RopeScaling.from_dict({"rope_type": "linear", "factor": 2})


def test_kinds_of_the_model_have_ranges(live: Live) -> None:
    kinds = live.http.get("/v1/rotary").json()["kinds"]
    assert kinds["default"] == {} and set(kinds) >= {"linear", "yarn", "rerope"}
    for kind, fields in kinds.items():
        for index in range(3):  # the lowest, the highest and the start are accepted
            values = {name: numbers[index] for name, numbers in fields.items()}
            response = live.post(INSPECT, {"rope_scaling": {"rope_type": kind, **values}})
            assert response.status_code == 200, response.text


def test_an_unknown_profile_lists_the_known_ones(live: Live) -> None:
    error = live.refuse(PATH, {"prompt": "a", "rope_scaling": "wide"})
    assert (error["code"], error["param"]) == ("unknown_profile", "rope_scaling")
    assert "'wide'" in error["message"] and "grow, long" in error["message"]
    error = live.refuse(PATH, {"prompt": "a", "rope_scaling": "x" * 9999})
    assert len(error["message"]) < 300
    assert live.engine.requests == []


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_non_finite_numbers_have_equal_errors(live: Live, number: str) -> None:
    body = f'{{"prompt": "a", "rope_scaling": {{"rope_type": "yarn", "factor": {number}}}}}'
    error = live.refuse(PATH, body.encode())
    assert (error["param"], error["code"]) == ("rope_scaling.factor", "invalid_value")
    assert "finite number" in error["message"]
    neighbour = live.refuse(PATH, f'{{"prompt": "a", "temperature": {number}}}'.encode())
    assert (neighbour["param"], neighbour["code"]) == ("temperature", "invalid_value")


def test_too_long_prompt_under_a_scaling_gets_a_hint(live: Live) -> None:
    room = "a scaling does not enlarge the context: the server's --max-model-len does"
    ids, text = [5] * 257, "z" * 300
    prompts: list[tuple[str, dict[str, Any]]] = [
        (PATH, {"prompt": ids}),
        (PATH, {"prompt": ids[1:], "max_tokens": 1}),
        (PATH, {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/embeddings", {"input": ids}),
    ]
    for path, body in prompts:
        for scaling in (YARN, "long", "grow"):
            error = live.refuse(path, {**body, "rope_scaling": scaling})
            assert error["code"] == "context_length_exceeded" and f" ({room})" in error["message"], path
        for scaling in (None, {"rope_type": "default"}):
            assert room not in live.refuse(path, {**body, "rope_scaling": scaling})["message"]


def test_openapi_document_describes_the_scaling_fields(live: Live) -> None:
    schemas = live.http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "RotaryInspectRequest"):
        taken = schemas[name]["properties"]["rope_scaling"]
        assert {one["type"] for one in taken["anyOf"]} == {"object", "string", "null"}, name


def test_exact_requires_the_operator() -> None:
    with live_server(rope_exact=True) as live:
        live.complete("a", rope_scaling=DYNAMIC, rope_update={"policy": "recompute", "exact": True})
        live.complete("a", rope_scaling=DYNAMIC, rope_update={"policy": "recompute", "exact": None})
    first, second = live.engine.requests
    assert (first.rope_update, first.rope_exact) == ("recompute", True)
    assert (second.rope_update, second.rope_exact) == ("recompute", False)


def test_profiles_only() -> None:
    with live_server(rope_profiles=PROFILES, rope_policy="profiles") as live:
        live.complete("a", rope_scaling="grow", rope_update="rotate")
        assert len(live.engine.requests) == 1
        error = live.refuse(PATH, {"prompt": "a", "rope_scaling": YARN})
        assert (error["param"], error["code"]) == ("rope_scaling", "rope_scaling_not_allowed")
        assert "--rope-policy profiles" in error["message"] and "grow, long" in error["message"]
        refused = ("rope_scaling", "rope_scaling_not_allowed")
        assert live.refusal(PATH, {"prompt": "a", "rope_scaling": "yarn 2"}) == refused
        assert live.refusal(PATH, {"prompt": "a", "rope_scaling": '{"rope_type": "yarn", "factor": 2}'}) == refused
        assert live.post(INSPECT, {"rope_scaling": YARN}).status_code == 200
        assert len(live.engine.requests) == 1


def test_no_scaling_at_all() -> None:
    with live_server(rope_profiles=PROFILES, rope_policy="off") as live:
        for field, value in (("rope_scaling", YARN), ("rope_scaling", "long"), ("rope_update", "frozen")):
            error = live.refuse(PATH, {"prompt": "a", field: value})
            assert (error["param"], error["code"]) == (field, "rope_scaling_not_allowed")
            assert "--rope-policy off" in error["message"]
        live.complete("a", rope_scaling=None, rope_update=None)
        assert len(live.engine.requests) == 1


def test_profiles_incompatible_with_the_model() -> None:
    lists = {"rope_type": "longrope", "short_factor": [1] * 4, "long_factor": [1] * 4}
    profiles = {**PROFILES, "phi": RopeScaling.from_dict(lists)}
    check_profiles(PROFILES, ROTARY)
    with pytest.raises(LoadError, match=r"^`rope_profile` phi\.short_factor must hold 8 numbers"):
        check_profiles(profiles, ROTARY)
    local = {"sliding_attention": {"rope_type": "default"}}
    with pytest.raises(LoadError, match=r"^`rope_profile` x\.sliding_attention: this model has no such"):
        check_profiles({"x": RopeScaling.from_dict(local)}, ROTARY)


# ---- reports of answers ----------------------------------------------------------------------------------------------
def report_of(request: EngineRequest) -> RotaryReport:
    """Depends on the length of the prompt, like a grid point."""
    return RotaryReport("dynamic", {"factor": 4.0}, "rotate", float(len(request.prompt_token_ids)), "f", 3)


SHOWN = {
    "rope_type": "dynamic",
    "parameters": {"factor": 4.0},
    "policy": "rotate",
    "effective_length": 2.0,
    "fingerprint": "f",
    "moves": 3,
}


def test_complete_answers_report_at_the_top_level(live: Live) -> None:
    live.engine.report = report_of
    for answer in (live.complete("a"), live.complete("a", n=2), live.complete(["a", "b"])):
        assert answer["rotary"] == SHOWN
        assert not any("rotary" in choice for choice in answer["choices"])
    assert live.chat("a")["rotary"]["rope_type"] == "dynamic"


def test_differing_choices_have_their_own_reports(live: Live) -> None:
    live.engine.report = report_of
    answer = live.complete(["a", "abc"], n=2)
    assert answer["rotary"] == SHOWN
    lengths = [choice["rotary"]["effective_length"] for choice in answer["choices"]]
    assert lengths == [2.0, 2.0, 4.0, 4.0]
    best = live.complete(["a", "abc"], best_of=2, n=1)
    assert [choice["rotary"]["effective_length"] for choice in best["choices"]] == [2.0, 4.0]


def test_groups_are_reported(live: Live) -> None:
    rest = {"parameters": {"rope_theta": 1e6}, "effective_length": None, "fingerprint": "f"}
    groups = {
        "full_attention": {"rope_type": "yarn", **rest},
        "sliding_attention": {"rope_type": "default", **rest},
    }
    live.engine.report = lambda request: replace(report_of(request), groups=groups)
    assert live.complete("a")["rotary"] == {**SHOWN, "groups": groups}


def test_streams_report_on_the_last_chunk_and_with_the_usage(live: Live) -> None:
    live.engine.report = report_of
    for path, body in (
        (PATH, {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        *chunks, done = live.stream(path, {**body, "stream_options": {"include_usage": True}})
        assert done == "[DONE]"
        last, usage = chunks[-2:]
        assert last["choices"][0]["finish_reason"] == "length" and usage["choices"] == []
        assert last["rotary"] == usage["rotary"] and last["rotary"]["moves"] == 3
        assert not any("rotary" in chunk for chunk in chunks[:-2])
    chunks = live.stream(PATH, {"prompt": ["a", "abc"], "stream_options": {"include_usage": True}})
    ends = {c["choices"][0]["index"]: c["rotary"]["effective_length"] for c in chunks[:-2] if "rotary" in c}
    assert ends == {0: 2.0, 1: 4.0} and chunks[-2]["rotary"]["effective_length"] == 2.0


def test_engine_without_reports(live: Live) -> None:
    assert "rotary" not in live.complete("a")
    chunks = live.stream(PATH, {"prompt": "a", "stream_options": {"include_usage": True}})
    assert not any("rotary" in chunk for chunk in chunks if chunk != "[DONE]")


@pytest.mark.parametrize(
    ("update", "reach", "moves"),
    [
        # 120 tokens of prompt, then 60 of at most 100: 179 are computed. The grid: 128, 152.2, 181.02, 215.3, 256.
        ("frozen", 128 * 2**0.75 * 2**0.25, 0),
        ("recompute", 128 * 2**0.5, 0),
        ("rotate", 128 * 2**0.5, 2),
        ({"policy": "recompute", "exact": True}, 179, 0),
    ],
)
def test_report_after_a_stop_string(update: Any, reach: float, moves: int) -> None:
    """The engine does not know stop strings, so its last output with the report never arrives."""
    reply = [65] * 59 + [66] + [67] * 100
    with live_server(ScriptedEngine(reply=reply), rope_exact=True) as live:
        body = {"prompt": [5] * 120, "max_tokens": 130, "stop": ["c"], "rope_scaling": DYNAMIC, "rope_update": update}
        answer = live.complete(**body)
        assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 60
        rotary = answer["rotary"]
        assert rotary["effective_length"] == pytest.approx(reach) and rotary["moves"] == moves
        assert rotary["policy"] == (update if isinstance(update, str) else "recompute")
        inspected = live.post(INSPECT, {"rope_scaling": DYNAMIC, "rope_update": update, "length": math.floor(reach)})
        assert inspected.json()["fingerprint"] == rotary["fingerprint"]


# ---- metrics ---------------------------------------------------------------------------------------------------------
def test_metrics_of_moves_and_recomputing(live: Live) -> None:
    live.engine.engine_stats = EngineStats(key_moves=48, recomputed_tokens={"rope_update": 9}, rotary_specs_live=3)
    lines = live.http.get("/metrics").text.splitlines()
    for line in (
        "windlass_key_moves_total 48.0",
        'windlass_recomputed_tokens_total{reason="rope_update"} 9.0',
        'windlass_recomputed_tokens_total{reason="preemption"} 0.0',
        'windlass_recomputed_tokens_total{reason="full_prefix_hit"} 0.0',
        'windlass_recomputed_tokens_total{reason="cache_reuse"} 0.0',
        "windlass_rotary_specs_live 3.0",
    ):
        assert line in lines
