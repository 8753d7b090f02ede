"""Rotary scaling per request on a deterministic server with the bundled model, which was trained for 512 tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from helpers.real_server import RealServer, serve

from windlass.clients import BadRequestError, Client

YARN, DYNAMIC = {"rope_type": "yarn", "factor": 2.0}, {"rope_type": "dynamic", "factor": 4.0}
M = 512
OPTIONS = ("--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--deterministic", "--rope-exact")
SCALINGS: list[Any] = [
    None,
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2},
    {"type": "linear", "factor": 4},
    {"rope_type": "ntk", "factor": 2},
    DYNAMIC,
    "long",
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
    {"rope_type": "dual_chunk", "chunk_size": 24, "local_size": 4},
    {"rope_type": "self_extend", "group_size": 3, "window": 8},
    {"rope_type": "rerope", "window": 8},
    {"rope_type": "rerope", "window": 8, "factor": 2.5},
    {"rope_type": "log_n", "original_max_position_embeddings": 16},
]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    profiles = ("--rope-profile", f"long={json.dumps(YARN)}", "--rope-profile", f"grow={json.dumps(DYNAMIC)}")
    with serve(*OPTIONS, *profiles) as running:
        yield running


def body(prompt: Any = "In the beginning", tokens: int = 12, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


def complete(server: RealServer, *args: Any, **fields: Any) -> dict[str, Any]:
    return server.ask("/v1/completions", **body(*args, **fields))


def inspect(server: RealServer, **body: Any) -> dict[str, Any]:
    return server.ask("/v1/rotary/inspect", **body)


def grid(length: int) -> float:
    """The smallest grid point that is not below a length."""
    point = 0
    while M * 2 ** (point / 4) < length:
        point += 1
    return M * 2 ** (point / 4)


def test_batch_of_scalings_gives_the_answers_of_each_alone(server: RealServer) -> None:
    """With more tokens than fit into a step, so that prompts are computed in chunks next to decoding."""
    prompts = [list(range(20 + i, 220 + 11 * i)) for i in range(2)]
    jobs = [(prompt, scaling) for scaling in SCALINGS for prompt in prompts]

    def ask(job: tuple[list[int], Any]) -> dict[str, Any]:
        return complete(server, job[0], 16, rope_scaling=job[1], cache_salt=salt)

    salt = "alone"
    alone = [ask(job) for job in jobs]
    salt = "together"  # the cache of the first requests is not used
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(ask, jobs))
    for one, other in zip(alone, together, strict=True):
        assert one["choices"] == other["choices"] and one["rotary"] == other["rotary"]
    assert len({answer["choices"][0]["text"] for answer in alone}) >= len(SCALINGS) - 1
    prints = [answer["rotary"]["fingerprint"] for answer in alone[::2]]
    assert prints[0] == prints[1] and len(set(prints)) == len(SCALINGS) - 2  # dynamic changes nothing below M


def test_profile_and_its_scaling_share_the_cache(server: RealServer) -> None:
    prompt = list(range(300, 400))
    first = complete(server, prompt, rope_scaling="long")
    second = complete(server, prompt, rope_scaling=YARN)
    other = complete(server, prompt, rope_scaling={**YARN, "factor": 3})
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second, other)]
    assert cached == [0, 96, 0]
    assert first["choices"] == second["choices"] and first["rotary"] == second["rotary"] != other["rotary"]
    inspected = inspect(server, rope_scaling="long")
    assert inspected["fingerprint"] == first["rotary"]["fingerprint"]
    assert first["rotary"]["parameters"] == {"rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("update", "policy", "reach", "moves"),
    [
        # The prompt has 500 tokens and the answer 130, of which the last is not computed.
        (None, "frozen", grid(630), 0),
        ("recompute", "recompute", grid(629), 0),
        ("rotate", "rotate", grid(629), 2),
        ({"policy": "recompute", "exact": True}, "recompute", 515, 0),  # the answer has 16 tokens
    ],
)
def test_report_of_a_growing_answer(server: RealServer, update: Any, policy: str, reach: float, moves: int) -> None:
    tokens = 16 if isinstance(update, dict) else 130
    recomputed = server.metric("windlass_recomputed_tokens_total")
    rotated = server.metric("windlass_key_moves_total")
    answer = complete(server, list(range(20, 520)), tokens, rope_scaling=DYNAMIC, rope_update=update)
    rotary = answer["rotary"]
    assert (rotary["policy"], rotary["moves"]) == (policy, moves)
    assert rotary["effective_length"] == pytest.approx(reach)
    inspected = inspect(server, rope_scaling="grow", rope_update=update, length=math.floor(reach))
    assert inspected["fingerprint"] == rotary["fingerprint"]
    assert (server.metric("windlass_recomputed_tokens_total") > recomputed) == (policy == "recompute")
    assert (server.metric("windlass_key_moves_total") > rotated) == (policy == "rotate")


@pytest.mark.parametrize("update", ["frozen", "recompute", "rotate"])
def test_report_at_a_stop_string_equals_that_of_the_engine(server: RealServer, update: str) -> None:
    """At a stop string, the report is made by the server; an answer limited to the same length has that of the engine."""
    prompt, fields = list(range(20, 500)), {"rope_scaling": DYNAMIC, "rope_update": update}
    ids = complete(server, prompt, 140, return_token_ids=True, **fields)["choices"][0]["token_ids"]
    stop = server.ask("/detokenize", tokens=ids[120:124])["prompt"]
    cut = complete(server, prompt, 140, stop=[stop], min_tokens=60, **fields)
    assert cut["choices"][0]["finish_reason"] == "stop"
    count = cut["usage"]["completion_tokens"]
    assert count < 140
    expected = complete(server, prompt, 140 if update == "frozen" else count, **fields)
    assert cut["rotary"] == expected["rotary"]


def test_scalings_without_a_length_are_frozen(server: RealServer) -> None:
    for update in ("recompute", "rotate", {"policy": "recompute", "exact": True}):
        rotary = complete(server, tokens=2, rope_scaling="long", rope_update=update)["rotary"]
        assert (rotary["policy"], rotary["effective_length"], rotary["moves"]) == ("frozen", None, 0)


def test_choices_of_different_lengths_have_separate_reports(server: RealServer) -> None:
    prompts = [list(range(20, 40)), list(range(20, 620))]
    answer = complete(server, prompts, 4, rope_scaling="grow", n=2)
    lengths = [choice["rotary"]["effective_length"] for choice in answer["choices"]]
    assert lengths == pytest.approx([M, M, grid(604), grid(604)])
    assert answer["rotary"] == answer["choices"][0]["rotary"]


def test_openai_package_passes_scalings(server: RealServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"rope_scaling": DYNAMIC, "rope_update": "rotate", "ignore_eos": True}
        settings: dict[str, Any] = {"model": "demo", "prompt": "The sea", "max_tokens": 8, "temperature": 0}
        plain: Any = client.completions.create(**settings, extra_body=extra)
        assert plain.rotary["policy"] == "rotate" and plain.rotary["effective_length"] == M
        chunks: list[Any] = list(
            client.completions.create(**settings, extra_body=extra, stream=True, stream_options={"include_usage": True})
        )
        assert chunks[-2].rotary == chunks[-1].rotary == plain.rotary
        assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text
        messages: Any = [{"role": "user", "content": "What is a horse?"}]
        chat: Any = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=4, extra_body={"rope_scaling": "long"}
        )
        assert chat.rotary["rope_type"] == "yarn"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**settings, extra_body={"rope_scaling": "wide"})
        assert (caught.value.code, caught.value.param) == ("unknown_profile", "rope_scaling")


def test_python_client_reports_scalings(server: RealServer) -> None:
    with Client(server.url) as client:
        rules = client.rotary()
        assert rules.profiles == {"long": YARN, "grow": DYNAMIC} and rules.rope_exact
        assert rules.model["max_position_embeddings"] == M and rules.max_model_len == 1024
        planned = client.inspect("grow", length=600, rope_update="rotate")
        assert planned.effective_length == pytest.approx(grid(600)) and len(planned.inv_freq) == 16
        answer = client.completions(list(range(20, 600)), max_tokens=2, rope_scaling="grow", rope_update="rotate")
        assert answer.rotary is not None and answer.rotary.fingerprint == planned.fingerprint
        with client.completions("The sea", max_tokens=4, rope_scaling=YARN, stream=True) as stream:
            assert stream.rotary is None
            list(stream)
            assert stream.rotary is not None and stream.rotary.rope_type == "yarn"
        with pytest.raises(BadRequestError, match="greater than 0"):
            client.completions("x", rope_scaling={"rope_type": "linear", "factor": 0})


BAD: list[tuple[str, str]] = [
    ('{"rope_type": "linear", "factor": 0}', "rope_scaling.factor"),
    ('{"rope_type": "linear", "factor": NaN}', "rope_scaling.factor"),
    ('{"rope_type": "linear", "factor": -Infinity}', "rope_scaling.factor"),
    ('{"rope_type": "linear", "factor": 1e999}', "rope_scaling.factor"),
    ('{"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}', "rope_scaling.short_factor"),
    ('{"rope_type": "dual_chunk", "chunk_size": 513}', "rope_scaling.chunk_size"),
    ('{"rope_type": "dual_chunk", "chunk_size": 64, "local_size": 60}', "rope_scaling.local_size"),
    ('{"rope_type": "self_extend", "window": 513}', "rope_scaling.window"),
    ('{"rope_type": "self_extend", "group_size": 1}', "rope_scaling.group_size"),
    ('{"rope_type": "rerope", "factor": 0.5}', "rope_scaling.factor"),
    ('{"rope_type": "learned"}', "rope_scaling.rope_type"),
    ('{"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}', "rope_scaling.partial_rotary_factor"),
    ('{"sliding_attention": {"rope_type": "default"}}', "rope_scaling.sliding_attention"),
    ('"wide"', "rope_scaling"),
]


@pytest.mark.parametrize(("scaling", "param"), BAD)
def test_invalid_scaling_never_reaches_the_engine(server: RealServer, scaling: str, param: str) -> None:
    computed = server.metric("windlass_prompt_tokens_total")
    text = json.dumps(body(rope_scaling="?")).replace('"?"', scaling)
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/v1/completions", content=text, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    assert server.metric("windlass_prompt_tokens_total") == computed
