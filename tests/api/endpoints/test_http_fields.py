"""Request fields: values that reach the engine, and defaults of the operator and the model."""

from __future__ import annotations

import time
from typing import Any

import pytest
from helpers.live_server import Live, live_server, server_fixture

from windlass.engine.interface.request import DryParams, SamplingParams
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.config.settings import SamplingDefaults
from windlass.server.schemas.chat import ChatRequest
from windlass.server.schemas.completions import CompletionRequest
from windlass.server.text.workers.tasks import dry_breaker_tokens

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}


def test_defaults_reach_the_engine(live: Live) -> None:
    live.complete("a")
    (request,) = live.engine.requests
    assert request.sampling == SamplingParams(max_tokens=16)
    assert request.rope_scaling is None and request.rope_update is None and not request.rope_exact
    assert request.cache_salt is None and request.priority == 0 and request.deadline is None


SAMPLING: list[tuple[dict[str, Any], str, Any]] = [
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
    ({"dry_multiplier": 1, "dry_sequence_breakers": []}, "repeats", DryParams(1.0, 1.75, 2, 32768)),
    (
        {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 0, "dry_penalty_last_n": 9}
        | {"dry_sequence_breakers": []},
        "repeats",
        DryParams(0.8, 2.0, 0, 9),
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
]
OTHER_APIS: list[tuple[str, dict[str, Any], str, Any]] = [
    ("/v1/responses", {"temperature": 0, "top_p": 0.5}, "top_p", 0.5),
    ("/v1/responses", {"top_k": 7}, "top_k", 7),
    ("/v1/responses", {"seed": 3}, "seed", 3),
    ("/v1/responses", {"max_output_tokens": 9}, "max_tokens", 9),
    ("/v1/responses", {"stop_token_ids": [5]}, "stop_token_ids", (5,)),
    ("/v1/responses", {"top_logprobs": 2}, "logprobs", 2),
    ("/v1/responses", {"include": ["message.output_text.logprobs"]}, "logprobs", 0),
    ("/v1/responses", {"include": ["reasoning.encrypted_content"]}, "logprobs", None),
    ("/v1/messages", {"temperature": 0}, "temperature", 0.0),
    ("/v1/messages", {"top_k": 7}, "top_k", 7),
    ("/v1/messages", {"top_p": 0.5}, "top_p", 0.5),
    ("/v1/messages", {"max_tokens": 9}, "max_tokens", 9),
    ("/v1/messages", {"seed": 5}, "seed", 5),
]


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize(
    ("path", "given", "name", "expected"),
    [*((path, *row) for path in (PATH, "/v1/chat/completions") for row in SAMPLING), *OTHER_APIS],
)
def test_sampling_fields_reach_the_engine(
    live: Live, path: str, given: dict[str, Any], name: str, expected: Any
) -> None:
    messages = {"messages": [USER]}
    bodies = {PATH: {"prompt": "a"}, "/v1/responses": {"input": "a"}, "/v1/messages": {**messages, "max_tokens": 400}}
    live.request(path, **{**bodies.get(path, messages), **given})
    (request,) = live.engine.requests
    assert getattr(request.sampling, name) == expected


def test_serving_fields_reach_the_engine(live: Live) -> None:
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
    assert (request.cache_salt, request.priority) == ("salt mine", -3)
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
    ids, sequences = dry_breaker_tokens(live.tokenizer, texts)
    assert ids or sequences
    for request in live.engine.requests:
        assert request.sampling.repeats == DryParams(1.0, 1.75, 2, 32768, ids, sequences)


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


def test_models_have_every_field_of_the_reference() -> None:
    common = """model max_tokens max_completion_tokens temperature top_p n stream stream_options stop seed
        presence_penalty frequency_penalty logit_bias logprobs best_of response_format top_k min_p typical_p
        xtc_probability xtc_threshold dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
        repetition_penalty min_tokens ignore_eos stop_token_ids include_stop_str_in_output bad_words allowed_token_ids
        skip_special_tokens add_special_tokens prompt_logprobs return_token_ids return_progress structured_outputs
        truncate_prompt_tokens
        guided_json guided_regex guided_choice guided_grammar grammar json_schema
        return_tokens_as_token_ids truncation_side
        rope_scaling rope_update context_overflow keep_tokens attention_window attention_sinks
        cache_reuse passages cache_reuse_recompute cache_salt priority timeout request_id""".split()
    chat = """messages top_logprobs tools tool_choice parallel_tool_calls chat_template_kwargs add_generation_prompt
        continue_final_message reasoning_effort thinking_budget functions function_call modalities""".split()
    assert set(CompletionRequest.model_fields) == {*common, "prompt", "echo", "suffix"}
    assert set(ChatRequest.model_fields) == {*common, *chat}


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


@pytest.mark.quick_cases(6)
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


# ---- defaults of the operator and of the model ------------------------------------------------------------------------
DEFAULTS = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, typical_p=0.9, repetition_penalty=1.05)
operated = server_fixture(sampling=DEFAULTS, other_model_names=("alias", "org/model"), root_path="/a/llm")


def sampling_of(operated: Live, path: str, **body: Any) -> Any:
    content = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    operated.engine.requests.clear()
    assert operated.post(path, {**content, **body}).status_code == 200
    return operated.engine.requests[0].sampling


@pytest.mark.parametrize("path", [CHAT, PATH])
def test_model_defaults_apply_to_requests_without_the_fields(operated: Live, path: str) -> None:
    names = list(SamplingDefaults.__dataclass_fields__)
    neutral = SamplingDefaults()
    sampling = sampling_of(operated, path)
    assert {name: getattr(sampling, name) for name in names} == {name: getattr(DEFAULTS, name) for name in names}
    for given in names:  # individually; a neutral value or 0 counts as given
        sampling = sampling_of(operated, path, **{given: getattr(neutral, given)})
        for name in names:
            assert getattr(sampling, name) == getattr(neutral if name == given else DEFAULTS, name), (given, name)
    assert sampling_of(operated, path, temperature=0).temperature == 0
    assert sampling_of(operated, path, temperature=None).temperature == 0.6


def test_model_object_has_the_defaults_under_every_name(operated: Live) -> None:
    listed = operated.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["toy", "alias", "org/model"]
    assert all(model["sampling_defaults"]["top_k"] == 20 for model in listed)
    for model in listed:
        assert operated.http.get(f"/v1/models/{model['id']}").json() == model
        answer = operated.post(PATH, {"prompt": "a", "model": model["id"]}).json()
        assert answer["model"] == "toy"
    assert operated.refuse(PATH, {"prompt": "a", "model": "other"}, 404)["code"] == "model_not_found"


def test_every_answer_and_chunk_has_the_fingerprint(operated: Live) -> None:
    seen = set()
    for path, content in ((PATH, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        seen.add(operated.post(path, content).json()["system_fingerprint"])
        events = operated.stream(path, {**content, "stream_options": {"include_usage": True}})[:-1]
        assert len(events) > 2
        seen |= {event["system_fingerprint"] for event in events}
    assert len(seen) == 1 and seen.pop().startswith("fp_")


@pytest.mark.slow
def test_fingerprint_depends_on_the_defaults_and_not_on_names(operated: Live) -> None:
    def fingerprint(**settings: Any) -> str:
        with live_server(**settings) as other:
            return other.complete("a")["system_fingerprint"]

    own = operated.complete("a")["system_fingerprint"]
    assert fingerprint(sampling=DEFAULTS) == own  # names and paths change nothing
    assert fingerprint() != own


def test_root_path_with_and_without_a_stripping_proxy(operated: Live) -> None:
    assert operated.http.get("/a/llm/v1/models").json() == operated.http.get("/v1/models").json()
    assert operated.post("/a/llm/v1/completions", {"prompt": "a"}).status_code == 200
    for path in ("/a/llmv1/models", "/a/v1/models", "/a/llm", "/a/llm/a/llm/v1/models"):
        assert operated.http.get(path).status_code == 404
    assert operated.http.get("/openapi.json").json()["servers"] == [{"url": "/a/llm"}]


def test_keys_are_required_under_a_root_path() -> None:
    with live_server(root_path="/llm", api_keys=("k",)) as locked:
        for path in ("/v1/models", "/llm/v1/models", "/llm/llm/health", "/health/llm/v1/models"):
            assert locked.http.get(path).status_code == 401, path
        assert locked.http.get("/llm/health").status_code == locked.http.get("/health").status_code == 200
        assert locked.http.get("/llm/v1/models", headers={"authorization": "Bearer k"}).status_code == 200
