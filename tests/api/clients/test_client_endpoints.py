"""The clients cover the endpoints of the server and their fields, and parse the responses of an app."""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_helpers.any_client import any_client, scripted_client
from helpers.live_server import MODEL, Live, live_server, server_fixture
from helpers.scripted_engine import ScriptedEngine, model_info
from helpers.scripted_http import answer, scripted_server
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from windlass.clients import (
    AuthenticationError,
    BadRequestError,
    CallOptions,
    ChatOptions,
    ClassifyOptions,
    Client,
    CompletionOptions,
    CountOptions,
    DetokenizeOptions,
    DocumentText,
    EmbeddingOptions,
    InfillOptions,
    MessageOptions,
    Metrics,
    NotFoundError,
    PoolingOptions,
    RerankOptions,
    ResponseError,
    ResponseOptions,
    RopeScaling,
    ScoreOptions,
    TemplateOptions,
    TokenizeOptions,
)
from windlass.engine.interface.model_info import ClassifierInfo
from windlass.engine.rotary.rope_scaling import RopeScaling as Accepted
from windlass.engine.rotary.rope_scaling import RotaryBase, RotaryGroup
from windlass.server.api.rotary import RotaryInspectRequest
from windlass.server.api.tokenize import DetokenizeRequest, TemplateRequest, TokenizeRequest
from windlass.server.schemas.chat import ChatRequest
from windlass.server.schemas.completions import CompletionRequest, InfillRequest
from windlass.server.schemas.messages import CountTokensRequest, MessageRequest
from windlass.server.schemas.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from windlass.server.schemas.responses import ResponseRequest

pytestmark = pytest.mark.anyio
YARN = RopeScaling.yarn(factor=4)
KEY = "secret"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    profiles = {"long": Accepted.from_dict(YARN), "half": Accepted.from_dict(RopeScaling.linear(2))}
    with live_server(rope_profiles=profiles, api_keys=(KEY,)) as server:
        yield server


# Fields for which the server accepts only values without effect.
REFUSED = (
    "background",
    "conversation",
    "prompt",
    "context_management",
    "moderation",
    "access_programs",
    "container",
    "mcp_servers",
    "compaction",
    "fallbacks",
    "thread",
    "modalities",
)
MESSAGES = [{"role": "user", "content": "hi"}]
CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("completions", ("x",)), ("chat", (MESSAGES,)), ("tokenize", ("hello",)), ("detokenize", ([65, 66],)),
    ("apply_template", (MESSAGES,)), ("infill", ("x", "y")),
    ("models", ()), ("model", (MODEL,)), ("rotary", ()), ("profiles", ()), ("inspect", (YARN,)), ("health", ()),
    ("ready", ()), ("version", ()), ("metrics", ()), ("openapi", ()), ("responses", ("x",)), ("response", ("resp",)),
    ("response_items", ("resp",)), ("delete_response", ("resp",)), ("count_input", ("x",)),
    ("messages", (MESSAGES, 2)), ("count_tokens", (MESSAGES,)),
    ("curves", (YARN,)), ("cache", ()), ("attention", ("hello",)),
    ("load_adapter", ("poet", "poet")), ("unload_adapter", ("poet",)),
    ("embeddings", ("x",)), ("pooling", ("x",)), ("score", ("x", ["y"])), ("rerank", ("x", ["y"])), ("classify", ("x",)),
]  # fmt: skip


def test_methods_match_the_endpoints_of_the_server(live: Live) -> None:
    assert {name for name, _ in CALLS} == {
        name for name in dir(Client) if not name.startswith("_") and name not in ("base_url", "close")
    }
    called = set()

    def note(request: httpx.Request) -> httpx.Response:
        called.add((request.method, request.url.path))
        return live.http.request(request.method, request.url.path, content=request.content, headers=request.headers)

    with Client("http://x", api_key=KEY, transport=httpx.MockTransport(note)) as client:
        for name, arguments in CALLS:
            if arguments == ("resp",):  # an unknown response
                with pytest.raises(NotFoundError, match="there is no response 'resp'"):
                    getattr(client, name)(*arguments)
            elif "adapter" in name:  # not enabled on this server
                with pytest.raises(AuthenticationError, match="--lora-folder"):
                    getattr(client, name)(*arguments)
            elif name == "attention":  # not enabled on this server
                with pytest.raises(AuthenticationError, match="--attention-maps"):
                    getattr(client, name)(*arguments)
            elif name == "infill":  # not supported by this model
                with pytest.raises(BadRequestError, match="fill-in-the-middle"):
                    getattr(client, name)(*arguments)
            elif name == "classify":  # not supported by this model
                with pytest.raises(BadRequestError, match="no classification head"):
                    getattr(client, name)(*arguments)
            else:
                getattr(client, name)(*arguments)
    with Client(live.url, api_key=KEY) as client:
        paths = client.openapi()["paths"]
    named = {"{model}": MODEL, "{response_id}": "resp"}
    routes = {
        (method.upper(), re.sub(r"\{\w+\}", lambda found: named[found[0]], path))
        for path, methods in paths.items()
        for method in methods
    }
    routes.add(("GET", "/openapi.json"))  # not in its own list
    assert called == routes


@pytest.mark.parametrize(
    ("body", "options", "arguments"),
    [
        (CompletionRequest, CompletionOptions, {"prompt", "model", "stream", "timeout"}),
        (InfillRequest, InfillOptions, {"input_prefix", "input_suffix", "model", "stream", "timeout"}),
        (ChatRequest, ChatOptions, {"messages", "model", "stream", "timeout", *REFUSED}),
        (ResponseRequest, ResponseOptions, {"input", "model", "stream", "timeout", *REFUSED}),
        (MessageRequest, MessageOptions, {"messages", "max_tokens", "model", "stream", "timeout", *REFUSED}),
        (CountTokensRequest, CountOptions, {"messages", "model", *REFUSED}),
        (TokenizeRequest, TokenizeOptions, {"prompt", "messages", "model"}),
        (DetokenizeRequest, DetokenizeOptions, {"tokens", "model"}),
        (TemplateRequest, TemplateOptions, {"messages", "model"}),
        (EmbeddingRequest, EmbeddingOptions, {"input", "model", "timeout"}),
        (PoolingRequest, PoolingOptions, {"input", "model", "timeout"}),
        (ScoreRequest, ScoreOptions, {"text_1", "text_2", "model", "timeout"}),
        (RerankRequest, RerankOptions, {"query", "documents", "top_n", "model", "timeout"}),
        (ClassifyRequest, ClassifyOptions, {"input", "model", "timeout"}),
    ],
)
def test_options_match_the_fields_of_request_models(body: Any, options: Any, arguments: set[str]) -> None:
    of_the_client = {*typing.get_type_hints(CallOptions), "deadline"}
    assert set(typing.get_type_hints(options)) - of_the_client == set(body.model_fields) - arguments
    assert arguments - set(REFUSED) <= set(body.model_fields)


def test_parameters_of_inspect_match_the_request_model() -> None:
    hints = typing.get_type_hints(Client.inspect)
    assert set(hints) - {"return"} == set(RotaryInspectRequest.model_fields)


async def test_small_endpoints_of_an_app(live: Live, kind: str) -> None:
    async with any_client(kind, live.url, api_key=KEY) as client:
        assert (await client.health()).ok and (await client.ready()).status == "ready"
        version = live.http.get("/version", headers={"authorization": f"Bearer {KEY}"}).json()
        assert version == {"version": await client.version()}
        (model,) = await client.models()
        assert model == await client.model(MODEL) and (model.id, model.max_model_len) == (MODEL, 256)
        with pytest.raises(NotFoundError, match="does not exist"):
            await client.model("other")
        tokens = await client.tokenize("hello", return_token_strs=True, return_offsets=False)
        assert tokens.offsets is None and "".join(tokens.token_strs) == "<|bos|>hello"
        assert await client.apply_template(MESSAGES, add_generation_prompt=False)
        rendered = await client.tokenize(messages=MESSAGES, add_generation_prompt=False)
        text = await client.detokenize(rendered.tokens, skip_special_tokens=True, return_offsets=False)
        assert text.text == "[user]hi\n" and text.offsets is None
        described = await client.openapi()
        assert described["info"]["title"] == "Windlass" and "/v1/completions" in described["paths"]


async def test_every_path_except_the_probes_requires_the_key(live: Live, kind: str) -> None:
    async with any_client(kind, live.url, api_key="wrong") as client:
        for name, arguments in CALLS:
            if name in ("health", "ready"):
                assert (await getattr(client, name)(*arguments)).ok
            else:
                with pytest.raises(AuthenticationError, match="API key"):
                    await getattr(client, name)(*arguments)


async def test_openai_api_key_is_never_sent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINDLASS_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "between me and them")
    async with scripted_client(kind, answer({"status": "ready"})) as (server, client):
        await client.health()
    (request,) = server.requests
    assert "authorization" not in request.headers and "between me" not in json.dumps(request.headers)


async def test_profiles_are_listed_and_used_by_name(live: Live, kind: str) -> None:
    async with any_client(kind, live.url, api_key=KEY) as client:
        profiles = await client.profiles()
        assert profiles == {"long": YARN, "half": RopeScaling.linear(2)}
        assert all(isinstance(scaling, RopeScaling) for scaling in profiles.values())
        by_name = await client.inspect("long", length=100)
        assert by_name == await client.inspect(profiles["long"], length=100) and by_name.rope_type == "yarn"
        assert len((await client.completions("x", rope_scaling="half", max_tokens=2)).choices) == 1
        assert live.engine.requests[-1].rope_scaling == Accepted.from_dict(RopeScaling.linear(2))
        with pytest.raises(BadRequestError) as caught:
            await client.completions("x", rope_scaling="none such")
    assert (caught.value.param, caught.value.code) == ("rope_scaling", "unknown_profile")


async def test_scaling_in_requests(live: Live, kind: str) -> None:
    scaling = RopeScaling.dynamic(factor=2)
    async with any_client(kind, live.url, api_key=KEY) as client:
        await client.chat(MESSAGES, rope_scaling=scaling, rope_update="recompute", max_tokens=1)
        await client.completions("x", extra_body={"rope_scaling": scaling}, max_tokens=1)
        sections = RopeScaling.mrope([3, 3, 3])  # the model has 8 pairs
        with pytest.raises(BadRequestError, match="8 rotated pairs") as caught:
            await client.inspect(sections)
    assert caught.value.param == "rope_scaling.mrope_section"
    assert [request.rope_scaling for request in live.engine.requests[-2:]] == [Accepted.from_dict(scaling)] * 2


INVALID_SCALINGS: list[tuple[RopeScaling, str]] = [
    (RopeScaling.yarn(), "factor"),
    (RopeScaling.dynamic(), "factor"),
    (RopeScaling.linear(0), "factor"),
    (RopeScaling.linear(-1), "factor"),
    (RopeScaling.linear("4"), "factor"),
    (RopeScaling.linear(True), "factor"),
    (RopeScaling.linear(10**400), "factor"),
    (RopeScaling.linear(None), "factor"),
    (RopeScaling.default(rope_theta=1), "rope_theta"),
    (RopeScaling.yarn(4, mscale=-1), "mscale"),
    (RopeScaling.yarn(4, beta_fast=0.5), "beta_fast"),
    (RopeScaling.yarn(4, truncate=1), "truncate"),
    (RopeScaling.yarn(original_max_position_embeddings=1.5), "original_max_position_embeddings"),
    (RopeScaling.dynamic(2, alpha=3), "factor"),
    (RopeScaling.llama3(8, low_freq_factor=4, high_freq_factor=1), "high_freq_factor"),
    (RopeScaling.longrope([1], [1, 2]), "long_factor"),
    (RopeScaling.longrope([1, 0], [1, 2]), "short_factor[1]"),
    (RopeScaling.longrope([], []), "short_factor"),
    (RopeScaling.longrope("12", [1]), "short_factor"),
    (RopeScaling.longrope([1], [2], short_mscale=1), "long_mscale"),
    (RopeScaling.longrope([1], [2], short_mscale=1, long_mscale=1, attention_factor=2), "attention_factor"),
    (RopeScaling.mrope([1, 2.5]), "mrope_section"),
    (RopeScaling.learned(rope_theta=5), "rope_theta"),
    (RopeScaling.linear(2, beta_fast=3), "beta_fast"),
    (RopeScaling.in_groups(), "rope_type"),
    (RopeScaling.in_groups(full_attention={"rope_type": "linear", "factor": -1}), "full_attention.factor"),
    (
        RopeScaling.in_groups(full_attention=RopeScaling.in_groups(full_attention=RopeScaling.default())),
        "full_attention",
    ),
    (RopeScaling.from_dict({"full_attention": {"rope_type": "default"}, "factor": 2}), "factor"),
    (RopeScaling.from_dict({"rope_type": "spiral"}), "rope_type"),
    (RopeScaling.from_dict({"rope_type": "linear", "type": "ntk", "factor": 2}), "type"),
    (RopeScaling.from_dict({"rope_type": ["linear"], "factor": 2}), "rope_type"),
]


def test_server_refuses_invalid_scalings_and_names_the_field(live: Live) -> None:
    with Client(live.url, api_key=KEY) as client:
        for scaling, param in INVALID_SCALINGS:
            with pytest.raises(BadRequestError) as caught:
                client.inspect(scaling)
            assert caught.value.param == f"rope_scaling.{param}", scaling


async def test_scalings_by_rotary_group(kind: str) -> None:
    groups = (
        RotaryGroup("sliding_attention", RotaryBase(1e4, 16, 16, 128), Accepted()),
        RotaryGroup("full_attention", RotaryBase(1e6, 16, 16, 128), Accepted()),
    )
    info = model_info(rotary_groups=groups, model_rotary_groups=groups)
    scaling = RopeScaling.in_groups(full_attention=RopeScaling.linear(8), sliding_attention=RopeScaling.ntk(2))
    with live_server(ScriptedEngine(info=info)) as server:
        async with any_client(kind, server.url) as client:
            both = (await client.inspect(scaling)).groups
            one = (await client.inspect(RopeScaling.in_groups(full_attention=RopeScaling.linear(8)))).groups
            await client.completions("x", max_tokens=1, rope_scaling=scaling)
        assert server.engine.requests[-1].rope_scaling == Accepted.from_dict(scaling)
    assert {name: group.rope_type for name, group in both.items()} == {
        "sliding_attention": "ntk",
        "full_attention": "linear",
    }
    assert one["sliding_attention"].rope_type == "default" and one["full_attention"] == both["full_attention"]
    assert both["full_attention"].parameters == {"rope_theta": 1e6, "factor": 8.0}
    assert both["full_attention"].inv_freq[0] == 1 / 8


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("version", {"version": 1}),
        ("version", []),
        ("version", b"[" * 100_000),
        ("openapi", [1]),
        ("metrics", b"<html>"),
        ("profiles", []),
    ],
)
async def test_malformed_responses(kind: str, name: str, payload: Any) -> None:
    async with scripted_client(kind, answer(payload)) as (_, client):
        with pytest.raises(ResponseError, match="not understood"):
            await getattr(client, name)()


async def test_error_status_with_unparsable_body(kind: str) -> None:
    async with scripted_client(kind, answer(b"[" * 100_000, "400 Bad Request")) as (_, client):
        with pytest.raises(BadRequestError, match="HTTP 400"):
            await client.version()


# ---- metrics ---------------------------------------------------------------------------------------------------------
def samples_of(registry: CollectorRegistry) -> list[tuple[str, dict[str, str], float]]:
    """The samples of a registry, read directly."""
    return [(one.name, dict(one.labels), one.value) for family in registry.collect() for one in family.samples]


def read_samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    return [(sample.name, dict(sample.labels), sample.value) for sample in Metrics.parse(text).samples]


def in_order(samples: list[tuple[str, dict[str, str], float]]) -> list[tuple[str, list[tuple[str, str]], float]]:
    return sorted((name, sorted(labels.items()), value) for name, labels, value in samples)


async def test_metrics_of_an_app(live: Live, kind: str) -> None:
    async with any_client(kind, live.url, api_key=KEY) as client:
        before = await client.metrics()
        await client.completions("x", max_tokens=2, n=3)
        after = await client.metrics()
    text = live.http.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    expected = [  # no label of this app needs an escape
        (re.split("[{ ]", line)[0], dict(re.findall(r'(\w+)="([^"\\]*)"', line)), float(line.rsplit(" ", 1)[1]))
        for line in lines
    ]
    assert read_samples(text) == expected
    assert any(labels for _, labels, _ in expected)
    name = "windlass_request_success_total"
    assert (after.value(name) or 0) - (before.value(name) or 0) == 3
    assert after.value(name, finished_reason="length") == after.value(name)
    assert after.value(name, finished_reason="none such") is None and after.value("windlass_none_such") is None
    assert after.value("windlass_engine_up") == 1


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=20), st.floats(allow_nan=False), st.floats(min_value=0, max_value=1e300))
def test_parsed_metrics_equal_the_registry(label: str, gauge: float, count: float) -> None:
    label = re.sub(r"[\ud800-\udfff\r\x00-\x09\x0b-\x1f\x85\u2028\u2029]", "", label)
    registry = CollectorRegistry()
    Gauge("a_gauge", 'with "words" {in} it', ["name", "other"], registry=registry).labels(label, "}\\n").set(gauge)
    Counter("b", "help", registry=registry).inc(count)
    Histogram("c", "help", ["x"], registry=registry).labels("y").observe(0.3)
    text = generate_latest(registry).decode()
    assert in_order(read_samples(text)) == in_order(samples_of(registry))


def test_metrics_text_format() -> None:
    text = '# HELP a x\n\na{x="1",} 2 1234\n a 3\nb NaN\nc{q="\\"\\\\\\n"} +Inf\n'
    a, b, c, d = Metrics.parse(text).samples
    assert (a.labels, a.value, b.labels, b.value) == ({"x": "1"}, 2.0, {}, 3.0)
    assert math.isnan(c.value) and d.value == math.inf and d.labels == {"q": '"\\\n'}
    for bad in ("a", "a b", "1a 2", "a{x=1} 2", 'a{x="1} 2', "a{x} 1"):
        with pytest.raises(ValueError, match="Prometheus"):
            Metrics.parse(bad)


# ---- pooling, scores and classes --------------------------------------------------------------------------------------
open_server = server_fixture()


async def test_embeddings_in_both_encodings(open_server: Live, kind: str) -> None:
    open_server.reset()
    async with any_client(kind, open_server.url) as client:
        packed = await client.embeddings([[5], [6, 7]], dimensions=3, deadline=30)
        plain = await client.embeddings([[5], [6, 7]], dimensions=3, encoding_format="float")
        assert packed.vectors == plain.vectors == [(5, 1, 2), (7, 1, 2)]
        assert packed.usage.prompt_tokens == packed.usage.total_tokens == 3 and packed.request_id
        one = await client.embeddings("hello", pooling="mean", normalize=False, rope_scaling=RopeScaling.linear(2))
        assert len(one.data) == 1
    request = open_server.engine.requests[-1]
    assert request.pooling is not None and (request.pooling.kind, request.pooling.normalize) == ("mean", False)
    assert request.rope_scaling is not None and open_server.engine.requests[0].deadline is not None


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
async def test_pooled_states_in_both_encodings(open_server: Live, kind: str, encoding: str | None) -> None:
    async with any_client(kind, open_server.url) as client:
        several = await client.pooling([[5, 6], [7]], pooling="all", dimensions=2, encoding_format=encoding)
        assert [item.rows for item in several.data] == [((5, 1), (6, 1)), ((7, 1),)]
        single = await client.pooling([5, 6], dimensions=2, encoding_format=encoding)
        assert [item.rows for item in single.data] == [((6, 1),)]


async def test_score_and_rerank(open_server: Live, kind: str) -> None:
    async with any_client(kind, open_server.url) as client:
        scores = await client.score("q", ["a", "z"])
        ranking = await client.rerank("q", ["a", {"text": "z"}], top_n=1)
        assert [result.index for result in ranking.results] == [1]
        assert ranking.results[0].relevance_score == max(scores.scores) and scores.scores[0] < scores.scores[1]
        assert ranking.results[0].document == DocumentText(text="z")
        bare = await client.rerank("q", ["a"], return_documents=False)
        assert bare.results[0].document is None


async def test_classify(open_server: Live, kind: str) -> None:
    async with any_client(kind, open_server.url) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.classify("x")
        assert caught.value.code == "no_classifier"
    engine = ScriptedEngine(info=model_info(classifier=ClassifierInfo(("bad", "good"), "softmax"), generates=False))
    with live_server(engine) as other:
        async with any_client(kind, other.url) as client:
            (item,) = (await client.classify([5, 6])).data
            assert item.label == "good" and math.isclose(item.probs[1], 1 / (1 + math.exp(-3)))
            (model,) = await client.models()
            assert model.tasks == ("embed", "classify") and model.classes == {
                "labels": ["bad", "good"],
                "activation": "softmax",
                "per_token": False,
            }


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("embeddings", [{"index": 0, "embedding": "AAA"}]),
        ("embeddings", [{"index": 0, "embedding": "?"}]),
        ("embeddings", [{"index": 0}]),
        ("embeddings", None),
        ("pooling", [{"index": 0, "data": "AACAPw=="}]),
        ("pooling", [{"index": 0, "data": "AACAPw==", "shape": [1, 0]}]),
    ],
)
def test_malformed_pooling_responses(method: str, data: Any) -> None:
    with scripted_server(answer({"data": data})) as server, Client(server.url) as client, pytest.raises(ResponseError):
        getattr(client, method)("x")
