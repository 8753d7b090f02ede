"""Rotary scaling per request on deterministic servers with the bundled model, which was trained for 512 tokens.

The tests of `auto` use it with a trained length of 128 tokens, and longer requests of every endpoint.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.real_server import RealServer, serve

import windlass
from windlass.clients import BadRequestError, Client

DEMO = Path(windlass.__file__).parent / "models" / "demo"
YARN, DYNAMIC = {"rope_type": "yarn", "factor": 2.0}, {"rope_type": "dynamic", "factor": 4.0}
M = 512
OPTIONS = ("--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--deterministic", "--rope-policy", "exact")
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
    assert alone[0]["choices"] == alone[2]["choices"]  # none, and the default
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


# ---- auto ----------------------------------------------------------------------------------------------------------------
SHORT = 128
FACTORS = {factor: {"rope_type": "yarn", "factor": float(factor)} for factor in (2, 4, 8)}
EXPLICIT: dict[int, Any] = {1: {"rope_type": "default"}, **FACTORS}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a trained length of 128 tokens in config.json."""
    folder = tmp_path_factory.mktemp("short")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).symlink_to((DEMO / name).resolve())
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": SHORT}))
    (folder / "template").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def auto(model: Path) -> Iterator[RealServer]:
    options = ("--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--deterministic", "--rope-scaling", "auto")
    with serve(
        *options, "--chat-template", str(model / "template"), "--default-max-tokens", "40", model=model
    ) as running:
        yield running


def complete_length(server: RealServer, length: int, tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A completion with `length` tokens in all."""
    prompt = list(range(20, 20 + length - tokens))
    return server.complete(prompt, max_tokens=tokens, ignore_eos=True, logprobs=2, **fields)


def factor(answer: dict[str, Any]) -> float:
    return answer["rotary"]["parameters"].get("factor", 1.0)


LENGTHS = {100: 1, 128: 1, 129: 2, 256: 2, 257: 4, 512: 4, 513: 8, 1000: 8}


def test_batch_of_lengths_gives_the_answers_of_explicit_scalings(auto: RealServer) -> None:
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        chosen = list(
            pool.map(lambda length: complete_length(auto, length, rope_scaling="auto", cache_salt="a"), LENGTHS)
        )
    for (length, wanted), answer in zip(LENGTHS.items(), chosen, strict=True):
        explicit = complete_length(auto, length, rope_scaling=EXPLICIT[wanted], cache_salt="b")
        assert answer["choices"] == explicit["choices"]
        assert answer["rotary"]["fingerprint"] == explicit["rotary"]["fingerprint"]
        assert answer["rotary"]["auto"] == {"length": length, "up_to": wanted * SHORT}
        assert factor(answer) == wanted and "auto" not in explicit["rotary"]


def test_growing_chat_changes_its_scaling(auto: RealServer) -> None:
    """Turns with the same scaling use the cached prefix. A change computes the text again, and keeps the previous cache."""
    messages: list[dict[str, str]] = [{"role": "user", "content": "tell me of the sea and the ships " * 3}]
    seen: list[tuple[float, int, int]] = []

    def turn(**fields: Any) -> dict[str, Any]:
        answer = auto.ask(
            "/v1/chat/completions", messages=messages, temperature=0, ignore_eos=True, max_tokens=32, **fields
        )
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        length = usage["prompt_tokens"] + 32
        assert answer["rotary"]["auto"]["length"] == length
        assert factor(answer) == next(step for step in (1, 2, 4, 8) if length <= step * SHORT)
        seen.append((factor(answer), usage["prompt_tokens"], cached))
        return answer

    for _ in range(7):
        answer = turn()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": "and then what did they see"})
    factors = [step for step, _, _ in seen]
    assert factors[0] == 1 and factors[-1] >= 4 and factors == sorted(factors)
    for (before, _, _), (now, _, cached) in itertools.pairwise(seen):
        assert (cached > 0) == (before == now), seen
        assert cached == 0 or cached >= 32, seen
    # Without the last turns, the text is short enough for the previous scaling, whose prefix is still cached.
    del messages[5:]
    answer = turn()
    assert factor(answer) < factors[-1] and answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_max_tokens_is_part_of_the_length(auto: RealServer) -> None:
    prompt = list(range(20, 120))
    for tokens, wanted in ((28, 1), (29, 2), (200, 4)):
        body = {"prompt": prompt, "max_tokens": tokens, "stop": ["e", "a", " "]}
        assert factor(auto.ask("/v1/completions", **body)) == wanted
    assert auto.ask("/v1/completions", prompt=prompt)["rotary"]["auto"] == {
        "length": 116,
        "up_to": SHORT,
    }  # 16 is the default of completions
    # The last threshold is the context length, at which an answer ends.
    full = complete_length(auto, 1100, 108, rope_scaling="auto")
    assert full["usage"]["completion_tokens"] == 32 and full["rotary"]["auto"] == {"length": 1024, "up_to": 1024}
    chat = auto.ask("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], stop=["e"])
    assert chat["rotary"]["auto"]["length"] == chat["usage"]["prompt_tokens"] + 40  # --default-max-tokens


def test_every_endpoint_accepts_auto(auto: RealServer) -> None:
    text = "the whale rose from the deep water " * 20  # more than 128 tokens
    chat = [{"role": "user", "content": text}]
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": text, "n": 2, "best_of": 3, "max_tokens": 4},
        "chat/completions": {"messages": chat, "n": 2, "max_tokens": 4},
        "responses": {"input": text, "max_output_tokens": 4},
        "messages": {"messages": chat, "max_tokens": 4},
    }
    for path, body in bodies.items():
        answer = auto.ask(f"/v1/{path}", **body, rope_scaling="auto")
        assert answer["rotary"]["rope_type"] == "yarn", path
        assert answer["rotary"]["auto"]["up_to"] == factor(answer) * SHORT
    events = auto.stream("/v1/completions", prompt=text, max_tokens=4, rope_scaling="auto")
    last = [event["rotary"] for event in events if event.get("rotary")]
    assert len(last) == 1 and last[0]["auto"]["up_to"] >= 256
    vectors = [
        auto.ask("/v1/embeddings", input=text, pooling="mean", rope_scaling=scaling)["data"][0]["embedding"]
        for scaling in ("auto", FACTORS[2], FACTORS[4], {"rope_type": "default"})
    ]
    tokens = auto.ask("/v1/embeddings", input=text, pooling="mean")["usage"]["prompt_tokens"]
    assert vectors[0] == vectors[1 if tokens <= 256 else 2] and vectors[0] != vectors[3]


def test_thresholds_are_reported(auto: RealServer) -> None:
    steps = [{"up_to": step * SHORT, "rope_scaling": EXPLICIT[step], "effective_length": None} for step in (1, 2, 4, 8)]
    for path in ("models", "rotary"):
        reported = auto.get(f"/v1/{path}")
        shown = reported["data"][0]["rotary_auto"] if path == "models" else reported["auto"]
        assert shown == {"default": True, "steps": steps}
    with Client(auto.url) as client:
        inspected = client.inspect("auto", length=300)
        assert inspected.parameters["factor"] == 4 and inspected.auto is not None and inspected.auto.up_to == 512
        answer = client.completions(prompt=list(range(20, 200)), max_tokens=4, rope_scaling="auto")
        assert answer.rotary is not None and answer.rotary.auto is not None and answer.rotary.auto.length == 184
        assert client.rotary().auto == client.models()[0].rotary_auto


def test_update_policies_follow_the_text(auto: RealServer) -> None:
    for policy in ("recompute", "rotate"):
        answer = complete_length(auto, 400, 320, rope_scaling="auto", rope_update=policy, cache_salt=policy)
        assert answer["rotary"]["auto"] == {"length": None, "up_to": 512}
        assert answer["rotary"]["moves"] == (2 if policy == "rotate" else 0)


@pytest.mark.parametrize("wrong", ["Auto", "automatic", {"rope_type": "auto"}, {"rope_type": "auto", "factor": 2}])
def test_misspelt_auto_is_refused(auto: RealServer, wrong: Any) -> None:
    error = auto.refuse("/v1/completions", prompt="a", rope_scaling=wrong)
    assert error["param"].startswith("rope_scaling")


@pytest.mark.slow
def test_thresholds_of_the_operator(model: Path) -> None:
    ladder = ("--rope-profile", f"long={json.dumps(FACTORS[2])}", "--rope-scaling", "100=none,300=long")
    with serve(
        "--kv-cache-memory", "64MiB", "--max-model-len", "1024", *ladder, "--rope-policy", "profiles", model=model
    ) as running:
        for length, wanted in ((100, "default"), (101, "yarn"), (300, "yarn")):
            answer = complete_length(running, length, rope_scaling="auto")
            assert answer["rotary"]["rope_type"] == wanted
            named = {"profile": "long"} if wanted == "yarn" else {}
            assert answer["rotary"]["auto"] == {"length": length, "up_to": 100 if wanted == "default" else 300, **named}
        assert "auto" not in complete_length(running, 700)["rotary"]  # the default is that of the server
        with Client(running.url) as client:
            with pytest.raises(BadRequestError, match="ask for at most 40, or name a scaling") as caught:
                client.completions(prompt=list(range(20, 280)), max_tokens=41, rope_scaling="auto")
            assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
            for prompt in (300, 800):
                with pytest.raises(
                    BadRequestError, match="context holds 300 tokens, prompt and answer together"
                ) as caught:
                    client.completions(prompt=list(range(20, 20 + prompt)), max_tokens=1, rope_scaling="auto")
                assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
            with pytest.raises(BadRequestError) as caught:
                client.embeddings(input=list(range(20, 321)), pooling="mean", rope_scaling="auto")
            assert caught.value.param == "input" and "300" in str(caught.value)
            unlimited = client.completions(prompt=list(range(20, 310)), rope_scaling="auto", ignore_eos=True)
            assert unlimited.usage.completion_tokens == 10 and unlimited.choices[0].finish_reason == "length"
            assert client.inspect("auto").length == 300
            # Truncation uses the thresholds, too.
            old = [{"role": "user", "content": "the sea " * 60}, {"role": "assistant", "content": "the ship " * 60}]
            chat = client.chat(
                [*old, {"role": "user", "content": "and"}], context_overflow="drop_turns", rope_scaling="auto"
            )
            assert (
                chat.rotary is not None and chat.rotary.context is not None and chat.rotary.context.dropped_turns == 1
            )
            shift = {"context_overflow": "shift", "ignore_eos": True, "rope_scaling": "auto"}
            with pytest.raises(BadRequestError, match="ask for at most 200"):
                client.completions(prompt=list(range(20, 120)), max_tokens=400, **shift)
