"""Every request field: its value in the engine, or the error 400 that names it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from helpers.live_server import Live

from windlass.engine.interface.request import RepeatPenalty, SamplingParams
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.schemas.chat import ChatRequest
from windlass.server.schemas.completions import CompletionRequest
from windlass.server.text.workers.tasks import breaker_tokens

PATH = "/v1/completions"
USER = {"role": "user", "content": "a"}


def test_defaults_reach_the_engine(live: Live) -> None:
    live.complete("a")
    (request,) = live.engine.requests
    assert request.sampling == SamplingParams(max_tokens=16)
    assert request.rope_scaling is None and request.rope_update is None and not request.rope_exact
    assert request.cache_salt is None and request.priority == 0 and request.deadline is None


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 6}, "max_tokens", 6),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"temperature": 1e-30}, "temperature", 0.0),
        ({"top_p": 0.25}, "top_p", 0.25),
        ({"top_k": 7}, "top_k", 7),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**6}, "top_k", 0),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"typical_p": 0.9}, "typical_p", 0.9),
        ({"xtc_probability": 0.5, "xtc_threshold": 0}, "xtc_probability", 0.5),
        ({"xtc_probability": 1}, "xtc_threshold", 0.1),
        ({"xtc_threshold": 0.2}, "xtc_threshold", 0.2),
        ({"dry_multiplier": 0, "dry_base": 3}, "repeats", None),
        ({"dry_multiplier": 1, "dry_penalty_last_n": 0}, "repeats", None),
        ({"dry_multiplier": 1, "dry_sequence_breakers": []}, "repeats", RepeatPenalty(1.0, 1.75, 2, 32768)),
        (
            {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 0, "dry_penalty_last_n": 9}
            | {"dry_sequence_breakers": []},
            "repeats",
            RepeatPenalty(0.8, 2.0, 0, 9),
        ),
        ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"presence_penalty": -1.5}, "presence_penalty", -1.5),
        ({"frequency_penalty": 2}, "frequency_penalty", 2.0),
        ({"logit_bias": {"3": -100, "4": 1.5}}, "logit_bias", {3: -100.0, 4: 1.5}),
        ({"logit_bias": {}}, "logit_bias", None),
        ({"seed": 42}, "seed", 42),
        ({"seed": 0}, "seed", 0),
        ({"n": 3}, "n", 3),
        ({"best_of": 4}, "n", 4),
        ({"min_tokens": 2}, "min_tokens", 2),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"stop_token_ids": [4, 5]}, "stop_token_ids", (4, 5)),
        ({"allowed_token_ids": [9, 4, 9]}, "allowed_token_ids", (4, 9)),
        ({"prompt_logprobs": 0}, "prompt_logprobs", 0),
        ({"prompt_logprobs": 4}, "prompt_logprobs", 4),
        ({"top_k": None, "n": None, "stop": None, "seed": None}, "n", 1),
    ],
)
def test_sampling_fields_are_honoured(
    live: Live, endpoint: str, given: dict[str, Any], name: str, expected: Any
) -> None:
    if endpoint == "chat":
        live.chat("a", **given)
    else:
        live.complete("a", **given)
    (request,) = live.engine.requests
    assert getattr(request.sampling, name) == expected


def test_serving_fields_are_honoured(live: Live) -> None:
    before = time.monotonic()
    scaling = {"rope_type": "yarn", "factor": 4.0}
    answer = live.complete(
        "a",
        rope_scaling=scaling,
        rope_update="rotate",
        context_overflow="stop",
        cache_reuse=0,
        cache_salt="mine",
        priority=-3,
        timeout=30,
        request_id="my-request.1",
    )
    (request,) = live.engine.requests
    assert request.rope_scaling == RopeScaling.from_dict(scaling) and request.rope_update == "rotate"
    assert (request.cache_salt, request.priority) == ("mine", -3)
    assert request.deadline is not None and before + 30 <= request.deadline <= time.monotonic() + 30
    assert answer["id"] == "cmpl-my-request.1"
    assert request.request_id.startswith("my-request.1-")


def test_bad_words_are_tokenized_with_and_without_a_space(live: Live) -> None:
    live.complete("a", bad_words=["fox", " dog"])
    encode = live.tokenizer.encode
    expected = {tuple(encode(text, add_special_tokens=False)) for text in ("fox", " fox", " dog")}
    assert set(live.engine.requests[0].sampling.bad_words) == expected


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({}, ["\n", ":", '"', "*"]),
        ({"dry_sequence_breakers": ["fox jumps", "."]}, ["fox jumps", "."]),
        ({"dry_sequence_breakers": r'"fox", "\n", "\""'}, ["fox", "\n", '"']),
        ({"dry_sequence_breakers": '["fox"]'}, ["fox"]),
    ],
)
def test_sequence_breakers_become_tokens(live: Live, given: dict[str, Any], texts: list[str]) -> None:
    for _ in range(2):  # the second time from the cache
        live.complete("a", dry_multiplier=1, **given)
    ids, sequences = breaker_tokens(live.tokenizer, texts)
    assert ids or sequences
    for request in live.engine.requests:
        assert request.sampling.repeats == RepeatPenalty(1.0, 1.75, 2, 32768, ids, sequences)


def test_bookkeeping_fields_have_no_effect(live: Live) -> None:
    live.complete(
        "a",
        user="u",
        metadata={"deep": {"er": [1, None]}},
        store=True,
        service_tier="flex",
        safety_identifier="s",
        prompt_cache_key="k",
        verbosity="high",
        suffix=None,
        structured_outputs=None,
    )
    assert live.engine.requests[0].sampling == SamplingParams(max_tokens=16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_update", "sometimes"),
        ("rope_update", 5),
        ("rope_update", []),
        ("context_overflow", "drop_turns"),
        ("context_overflow", "roll"),
        ("keep_tokens", 16),
        ("keep_tokens", -1),
        ("keep_tokens", 0),
        ("cache_reuse", -64),
        ("suffix", "tail"),
        ("structured_outputs", {"regex": "("}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"json": 5}),
        ("structured_outputs", {"structural_tag": "x"}),
        ("guided_regex", "["),
        ("guided_choice", []),
        ("guided_json", {"type": "no-such-type"}),
        ("grammar", "root ::= nothing"),
        ("json_schema", {"type": "strin"}),
        ("response_format", {"type": "text", "more": 1}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}),
        ("response_format", {"type": "xml"}),
        ("response_format", "json"),
        ("rope_scaling", "a-profile"),
        ("rope_scaling", 4),
        ("tools", [{}]),
        ("no_such_field", 0),
        ("N", 1),
    ],
)
def test_unsupported_and_unknown_fields_are_named(live: Live, field: str, value: Any) -> None:
    error = live.refuse(PATH, {"prompt": "a", field: value})
    assert error["param"] == field and error["type"] == "invalid_request_error"
    assert live.engine.requests == []


def test_models_have_every_field_of_the_reference() -> None:
    common = """model max_tokens max_completion_tokens temperature top_p n stream stream_options stop seed
        presence_penalty frequency_penalty logit_bias logprobs best_of response_format top_k min_p typical_p
        xtc_probability xtc_threshold dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
        repetition_penalty min_tokens ignore_eos stop_token_ids include_stop_str_in_output bad_words allowed_token_ids
        skip_special_tokens add_special_tokens prompt_logprobs return_token_ids structured_outputs truncate_prompt_tokens
        guided_json guided_regex guided_choice guided_grammar grammar json_schema
        return_tokens_as_token_ids truncation_side
        rope_scaling rope_update context_overflow keep_tokens attention_window attention_sinks
        cache_reuse passages cache_reuse_recompute cache_salt priority timeout request_id
        user metadata store service_tier safety_identifier prompt_cache_key verbosity""".split()
    chat = """messages top_logprobs tools tool_choice parallel_tool_calls chat_template_kwargs add_generation_prompt
        continue_final_message reasoning_effort thinking_budget functions function_call modalities""".split()
    assert set(CompletionRequest.model_fields) == {*common, "prompt", "echo", "suffix"}
    assert set(ChatRequest.model_fields) == {*common, *chat}


WRONG: list[tuple[str, list[Any]]] = [
    ("max_tokens", [-1, 2**31, 1.5, "5", True, [], 10**30]),
    ("temperature", [-0.1, 101, "1", True, [], 10**400]),
    ("top_p", [0, 1.01, -1, "x"]),
    ("n", [0, 65, -1, 1.0, "2", True, 10**30]),
    ("best_of", [0, 65]),
    ("stream", ["true", 1, []]),
    ("stream_options", [5, [], "x"]),
    ("stop", [5, [5], [""], "", ["a"] * 17, "x" * 257, {"a": 1}]),
    ("seed", [1.5, "x", 2**63, -(2**63)]),
    ("presence_penalty", [2.1, -2.1, "x"]),
    ("frequency_penalty", [2.1, -2.1, []]),
    (
        "logit_bias",
        [{"a": 1}, {"1": 101}, {"1": -101}, {"1": "x"}, {"-1": 1}, {"423": 1}, {"1_0": 1}, [], "x", {"": 1}],
    ),
    ("logprobs", [-1, 21, True, "1"]),
    ("echo", [1, "x"]),
    ("top_k", [-2, 2**31, 1.5]),
    ("min_p", [-0.1, 1.1]),
    ("typical_p", [0, 1.1]),
    ("xtc_probability", [-0.1, 1.1, "x"]),
    ("xtc_threshold", [-0.1, 1.1, []]),
    ("dry_multiplier", [-0.1, 101, "1", True]),
    ("dry_base", [0.9, 101, []]),
    ("dry_allowed_length", [-1, 1.5, 2**31]),
    ("dry_penalty_last_n", [-2, 32769, "x"]),
    (
        "dry_sequence_breakers",
        ["x", '"a', '"a", 5', '["a"', "[" * 9999, [""], [5], ["a"] * 33, ["x" * 41], 5, {}, '"' * 10**6],
    ),
    ("repetition_penalty", [0, -1, 101]),
    ("min_tokens", [-1, 17, 10**20]),
    ("ignore_eos", ["no", 0]),
    ("stop_token_ids", [[-1], [423], [1.5], 5, [1] * 1025, [10**30]]),
    ("allowed_token_ids", [[], [-1], [423], ["x"]]),
    ("bad_words", ["x", [""], [5], ["a"] * 1025, ["x" * 257]]),
    ("include_stop_str_in_output", [1]),
    ("skip_special_tokens", [0]),
    ("add_special_tokens", ["x"]),
    ("prompt_logprobs", [-1, 21, True]),
    ("return_token_ids", [1]),
    ("truncate_prompt_tokens", [0, -1, 1.5]),
    ("truncation_side", ["middle", "", 1]),
    ("return_tokens_as_token_ids", [1, "yes"]),
    ("cache_salt", ["", 5, "x" * 257]),
    ("priority", [1.5, 2**31, "high"]),
    ("timeout", [0, -1, 10**9, "5"]),
    ("request_id", ["", "a b", "x" * 129, "a\nb", "é", 5]),
    ("model", [5, ["toy"]]),
    ("user", [5]),
    ("metadata", [5, "x"]),
]


@pytest.mark.parametrize(("path", "asked"), [(PATH, {"prompt": "a"}), ("/v1/chat/completions", {"messages": [USER]})])
@pytest.mark.parametrize("value", [0, 0.0, -0.0])
def test_top_p_zero_gets_a_hint(live: Live, path: str, asked: dict[str, Any], value: float) -> None:
    error = live.refuse(path, {**asked, "top_p": value})
    assert "should be greater than 0" in error["message"] and "set temperature to 0" in error["message"]
    assert (error["param"], error["code"]) == ("top_p", "invalid_value")


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG for value in values])
def test_values_out_of_bounds_are_named(live: Live, field: str, value: Any) -> None:
    error = live.refuse(PATH, {"prompt": "a", field: value})
    assert error["param"] == field
    assert live.engine.requests == []


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, [], {}, 5, True, [True], [[]], [[], [5]], ["a", 5], [5, "a"], [[5], "a"], [["a"]], [[5, 1.5]]),
        *([5, None], [-1], [423], [10**30], [[423]], [[[5]]], [1.5]),
    ],
)
def test_prompts_of_a_wrong_shape(live: Live, prompt: Any) -> None:
    assert live.refuse(PATH, {"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER, "x"]}, "messages[1] should be an object", "messages[1]"),
        ("/v1/chat/completions", {"messages": [USER], "tools": ["x"]}, "tools[0] should be an object", "tools[0]"),
        (PATH, {"prompt": "a", "stop": ["a", 5]}, "stop[1] should be a valid string", "stop"),
    ],
)
def test_an_item_of_a_list_is_named(live: Live, path: str, body: dict[str, Any], message: str, param: str) -> None:
    error = live.refuse(path, body)
    assert (error["message"], error["param"]) == (message, param)


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        (
            "POST",
            "/chat/completions",
            "there is no endpoint POST /chat/completions (did you mean '/v1/chat/completions'?)",
        ),
        ("POST", "/v1/completion", "there is no endpoint POST /v1/completion (did you mean '/v1/completions'?)"),
        (
            "POST",
            "/v1/Chat/Completion",
            "there is no endpoint POST /v1/Chat/Completion (did you mean '/v1/chat/completions'?)",
        ),
        ("POST", "/v1/batches", "there is no endpoint POST /v1/batches"),
        ("POST", "/v1/moderations", "there is no endpoint POST /v1/moderations"),
        ("GET", "/ping", "there is no endpoint GET /ping"),
        ("POST", "/v1/rerankk", "there is no endpoint POST /v1/rerankk (did you mean '/v1/rerank'?)"),
        ("POST", "/rerankk", "there is no endpoint POST /rerankk (did you mean '/rerank'?)"),
        ("GET", "/v1/nothing/here", "there is no endpoint GET /v1/nothing/here"),
        ("GET", PATH, f"GET {PATH} is not supported: this endpoint accepts POST"),
        ("POST", "/health", "POST /health is not supported: this endpoint accepts GET, HEAD"),
    ],
)
def test_unknown_paths(live: Live, method: str, path: str, message: str) -> None:
    assert live.http.request(method, path).json()["error"]["message"] == message


def test_kind_given_as_a_profile(live: Live) -> None:
    error = live.refuse(PATH, {"prompt": "a", "rope_scaling": "yarn"})
    assert error["message"].endswith('; a kind is written as an object such as {"rope_type": "yarn", "factor": 4}')


def test_an_empty_prompt(live: Live) -> None:
    for prompt, named in (("", "prompt"), (["a", ""], "prompt[1]"), ([[1], []], "prompt[1]")):
        error = live.refuse(PATH, {"prompt": prompt, "add_special_tokens": False})
        assert (error["param"], error["code"]) == ("prompt", "empty_prompt")
        assert error["message"] == f"{named} is empty: give at least one token"
    assert live.refuse(PATH, {})["param"] == "prompt"
    live.complete("", max_tokens=1)  # the beginning-of-sequence token is there to continue


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (PATH, {"temprature": 1}, "unknown field 'temprature': did you mean 'temperature'?"),
        (PATH, {"Max_Tokens": 1}, "unknown field 'Max_Tokens': did you mean 'max_tokens'?"),
        (PATH, {"max_new_tokens": 1}, "unknown field 'max_new_tokens': did you mean 'max_tokens'?"),
        (PATH, {"colour": "red"}, "unknown field 'colour': remove it"),
        (
            PATH,
            {"stream": True, "stream_options": {"include_usge": True}},
            "unknown field 'stream_options.include_usge': did you mean 'include_usage'?",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "contents": "hi"}]},
            "unknown field 'messages[0].contents': did you mean 'content'?",
        ),
        (
            PATH,
            {"rope_update": {"policy": "rotat"}},
            "rope_update.policy should be 'frozen', 'recompute' or 'rotate' (did you mean 'rotate'?)",
        ),
        ("/tokenize", {"promt": "x"}, "unknown field 'promt': did you mean 'prompt'?"),
    ],
)
def test_the_nearest_field_is_suggested(live: Live, path: str, body: dict[str, Any], message: str) -> None:
    assert live.refuse(path, {"prompt": "a", **body} if path == PATH else body)["message"] == message


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        (
            {"rope_type": "yarm", "factor": 4},
            "rope_scaling.rope_type 'yarm' is not known (did you mean 'yarn'?): use one",
        ),
        (
            {"rope_type": "yarn", "facter": 4},
            "facter is not a field of rope_type 'yarn' (did you mean 'factor'?): it takes",
        ),
        ({"rope_tipe": "yarn", "factor": 4}, "rope_type is missing (did you mean it by 'rope_tipe'?): give one of"),
    ],
)
def test_the_nearest_name_of_a_scaling_is_suggested(live: Live, scaling: dict[str, Any], says: str) -> None:
    assert says in live.refuse(PATH, {"prompt": "a", "rope_scaling": scaling})["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": 300}, "temperature should be less than or equal to 100"),
        ({"temperature": "hot"}, "temperature should be a valid number"),
        ({"max_tokens": 1.5}, "max_tokens should be a valid integer"),
        ({"stop": ["x"] * 17}, "stop should have at most 16 items after validation, not 17"),
        ({"stream": True, "stream_options": 3}, "stream_options should be an object"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias holds at most 1024 entries, got 1025"),
        ({"rope_scaling": 5}, "rope_scaling should be an object such as"),
        ({"prompt": []}, "prompt should not be an empty list"),
    ],
)
def test_errors_are_sentences_that_name_the_field(live: Live, body: dict[str, Any], message: str) -> None:
    assert live.refuse(PATH, {"prompt": "a", **body})["message"].startswith(message)


ODD_NAMES = [
    "",
    " ",
    "'",
    '"',
    "{",
    "{hint}",
    "}",
    "%s",
    "\\",
    "\x00",
    "\n\r",
    "\x1b[31m",
    "\u202e",
    "ſtop",
    "É" * 40,
    "a\u0301" * 99,
]
ODD_NAMES += ["temperature" * 10_000, "temprature\x00", "tempér'ature", "__class__", "model_fields", "[0]", "a.b", "0"]


@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: ascii(name)[:24])
def test_odd_field_names_are_refused_in_one_short_line(live: Live, name: str) -> None:
    for path, body in (
        (PATH, {"prompt": "a", name: 1}),
        (PATH, {"prompt": "a", "stream": True, "stream_options": {name: 1}}),
        (PATH, {"prompt": "a", "rope_scaling": {"rope_type": "yarn", "factor": 2, name: 1}}),
        (PATH, {"prompt": "a", "rope_scaling": {"rope_type": name}}),
        (PATH, {"prompt": "a", "rope_update": {"policy": name}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", name: 1}]}),
    ):
        message = live.refuse(path, body)["message"]
        assert len(message) < 500 and message.isprintable()


def test_many_unknown_fields_cost_as_much_as_one(live: Live) -> None:
    started = time.monotonic()
    live.refuse(PATH, {"prompt": "a", **{f"temperatur{i}": 1 for i in range(50_000)}})
    assert time.monotonic() - started < 10
