"""The bundled model over real servers: clients, first requests, cancelled streams, restarts, and the disk tier."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from helpers.eventually import alive, eventually, exit_code
from helpers.live_server import live_server
from helpers.real_server import RealServer, serve

from windlass.clients import Client

DEMO = Path(__file__).parents[2] / "models" / "demo"
COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "In the beginning", "max_tokens": 450, "ignore_eos": True, "temperature": 0}
# A stream that only its client or the server ends.
ENDLESS: dict[str, Any] = {**LONG, "max_tokens": 100_000, "stream": True, "context_overflow": "shift"}
SMALL = ("--kv-cache-memory", "64MiB")


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serve(*SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32", attn_implementation="eager")


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def test_greedy_completion_equals_that_of_transformers(client: openai.OpenAI, tokenizer: Any, reference: Any) -> None:
    prompt = "The tree is a"
    ids = tokenizer(prompt, return_tensors="pt")
    expected = reference.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids.input_ids.shape[1] :]
    answer = client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0)
    assert answer.choices[0].text == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.usage is not None and answer.usage.prompt_tokens == ids.input_ids.shape[1]


def test_streamed_completion_equals_the_unstreamed_one(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "demo", "prompt": "A dog is", "max_tokens": 40, "temperature": 0.8, "seed": 5}
    settings["extra_body"] = {"ignore_eos": True}
    plain = client.completions.create(**settings)
    chunks = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == plain.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens == 40
    assert len(chunks) > 5  # at most eight tokens each


def test_streamed_chat_equals_the_unstreamed_one(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What does horse mean?"}]
    settings: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 30, "temperature": 0}
    plain = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason


def test_echo_scores_a_prompt_as_transformers_does(server: RealServer, tokenizer: Any, reference: Any) -> None:
    """The request of lm-eval: token ids, echo, log-probabilities, one token."""
    ids = tokenizer("The horse is an animal that eats grass.").input_ids
    scored = server.complete(ids, echo=True, logprobs=1, max_tokens=1, seed=1)["choices"][0]["logprobs"]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert len(scored["token_logprobs"]) == len(ids) + 1 and scored["token_logprobs"][0] is None
    for i, token in enumerate(ids[1:]):
        assert scored["token_logprobs"][i + 1] == pytest.approx(float(expected[i, token]), abs=1e-3)


def test_python_client_streams_the_same_text(server: RealServer) -> None:
    with Client(base_url=server.url) as client:
        assert [m.id for m in client.models()] == ["demo"]
        with client.completions("A cat is", max_tokens=10, temperature=0, stream=True) as stream:
            streamed = "".join(chunk.text for chunk in stream)
        assert streamed == client.completions("A cat is", max_tokens=10, temperature=0).text


def test_disconnected_client_frees_its_blocks(server: RealServer) -> None:
    """Both a stream and a plain request, closed during generation."""
    eventually(lambda: server.metric("windlass_num_requests_running") == 0, 20)
    host, port = server.url.removeprefix("http://").split(":")
    for stream in (True, False):
        generated = server.metric("windlass_generation_tokens_total")
        body = json.dumps({**ENDLESS, "n": 8, "stream": stream}).encode()
        with socket.create_connection((host, int(port))) as connection:
            headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + headers.encode() + body)
            eventually(lambda: server.metric("windlass_num_requests_running") > 0, 30)
        eventually(lambda: server.metric("windlass_num_requests_running") == 0, 30)
        assert server.metric("windlass_kv_cache_usage_perc") == 0
        assert server.metric("windlass_generation_tokens_total") - generated < 8 * 100_000


def test_killed_engine_fails_the_stream_and_restarts(server: RealServer) -> None:
    lines: list[str] = []
    killed = threading.Event()
    before = server.metric("windlass_engine_restarts_total")
    with httpx.stream("POST", server.url + COMPLETIONS, json=ENDLESS, timeout=60) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) > 8 and not killed.is_set():
                os.kill(server.engine_pid(), signal.SIGKILL)
                killed.set()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert "error" in json.loads(data[-2])
    eventually(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 200, 60)
    assert server.ask(COMPLETIONS, **{**LONG, "max_tokens": 5})["usage"]["completion_tokens"] == 5
    assert server.metric("windlass_engine_restarts_total") == before + 1


def test_stream_finishes_after_sigterm() -> None:
    # More tokens than the model was trained for: 500 tokens take less time than the requests sent meanwhile.
    options = (*SMALL, "--max-model-len", "5000", "--grace-period", "300")
    body = {**LONG, "max_tokens": 2500, "stream": True}
    with serve(*options) as server, httpx.Client(timeout=30) as other:
        finish: list[str] = []
        sent = False
        with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as response:
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if not sent:
                    server.process.send_signal(signal.SIGTERM)
                    sent = True
                    eventually(lambda: other.get(f"{server.url}/ready").status_code == 503, 30)
                    refused = other.post(server.url + COMPLETIONS, json={**LONG, "max_tokens": 5, "stream": True})
                    assert refused.status_code == 503 and "retry-after" in refused.headers
                finish.append(line.removeprefix("data: "))
        assert finish[-1] == "[DONE]" and json.loads(finish[-2])["choices"][0]["finish_reason"] == "length"
        assert exit_code(server.process) == 0


# ---- stop strings --------------------------------------------------------------------------------------------------------
def unique_piece(texts: list[str]) -> tuple[int, str]:
    """The index of a sample, and a piece of its beginning that the other sample does not contain."""
    for index, text in enumerate(texts):
        for start in range(20, 100):
            piece = text[start : start + 6]
            if piece not in texts[1 - index] and text.index(piece) == start:
                return index, piece
    raise AssertionError("both samples are equal")


@pytest.mark.slow
def test_stop_string_ends_one_of_two_samples() -> None:
    tokens = 300
    body = {"prompt": "The ", "max_tokens": tokens, "n": 2, "seed": 3, "ignore_eos": True}
    with serve(*SMALL, "--deterministic") as server:
        texts = [choice["text"] for choice in server.ask(COMPLETIONS, **body)["choices"]]
        assert server.metric("windlass_generation_tokens_total") == 2 * tokens
        index, stop = unique_piece(texts)
        for _ in range(8):  # on a busy machine the engine may finish before the server has seen the stop string
            before = server.metric("windlass_generation_tokens_total")
            answer = server.ask(COMPLETIONS, **body, stop=stop)
            ended, other = answer["choices"][index], answer["choices"][1 - index]
            assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", stop)
            assert ended["text"] == texts[index].partition(stop)[0]
            assert (other["finish_reason"], other["text"]) == ("length", texts[1 - index])
            computed = server.metric("windlass_generation_tokens_total") - before
            if computed < tokens + 150:
                break
        assert computed < tokens + 150  # the ended sample was computed for a few more tokens only
        assert server.metric("windlass_kv_cache_usage_perc") == 0


# ---- first requests ------------------------------------------------------------------------------------------------------
PROMPT = {"prompt": "In the beginning", "max_tokens": 24, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
REQUESTS = [
    ("POST", COMPLETIONS, {**PROMPT, "temperature": 0, "stream": True}),
    ("POST", COMPLETIONS, {**PROMPT, "logprobs": 3, "echo": True, "stop": ["zz"]}),
    ("POST", COMPLETIONS, {**PROMPT, "n": 2, "seed": 1, "top_k": 9, "min_p": 0.05, "frequency_penalty": 0.5}),
    ("POST", COMPLETIONS, {**PROMPT, "rope_scaling": {"rope_type": "yarn", "factor": 4}}),
    ("POST", COMPLETIONS, {**PROMPT, "rope_scaling": {"rope_type": "dynamic", "factor": 4}, "rope_update": "rotate"}),
    ("POST", COMPLETIONS, {**PROMPT, "timeout": 0.001, "max_tokens": 400}),
    ("POST", COMPLETIONS, {"prompt": "words " * 400}),
    ("POST", COMPLETIONS, {"prompt": "x", "temprature": 1}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/tokenize", {"prompt": "x"}),
    ("POST", "/detokenize", {"tokens": [5]}),
    ("GET", COMPLETIONS, None),
    ("GET", "/nowhere", None),
    *(("GET", path, None) for path in ("/v1/models", "/health", "/version", "/metrics", "/openapi.json")),
]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="plain"),
        pytest.param(("--quantization", "int8"), id="int8", marks=pytest.mark.slow),
    ],
)
def test_first_requests_import_no_modules(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ready line, neither process imports a module: `-X importtime` writes a line for each."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with serve(*options) as server:
        eventually(lambda: " serves " in server.log.read_text(), 10)
        loaded = server.log.read_text()
        assert "windlass.engine.execution.model_runner" in loaded  # imports of the engine are written, too
        assert not re.search(r"\| +torch\._dynamo$", loaded, re.MULTILINE)  # unused here, and takes a second
        with httpx.Client(base_url=server.url, timeout=30) as client:
            statuses = [client.request(method, path, json=body).status_code for method, path, body in REQUESTS]
        assert statuses.count(200) >= 13 and max(statuses) <= 504, statuses
        # The engine imports the library of grammars when it is first idle, possibly between two requests.
        eventually(lambda: re.search(r"\| +llguidance$", server.log.read_text(), re.MULTILINE), 30)
        _, ready, after = server.log.read_text().partition(" serves ")
        imported: list[str] = []
        nested: list[str] = []  # Python writes a module after those that it imports, which are indented
        for indent, name in re.findall(r"^import time: .*\| ( *)(\S+)$", after, re.MULTILINE):
            nested.append(name)
            if not indent:
                imported += nested if name != "llguidance" else []
                nested = []
        assert ready and imported + nested == []


def test_nagle_algorithm_is_off() -> None:
    """Each token is a small write, which would wait for the acknowledgement of the previous one."""
    with live_server() as live:
        live.http.get("/health")
        (connection,) = live.registry._clients
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# ---- disk tier -----------------------------------------------------------------------------------------------------------
LAMPS = " ".join(f"The {number}th lamp in the harbour was lit at dusk by the keeper." for number in range(22))


def text_and_cached(server: RealServer, **fields: object) -> tuple[str, int]:
    """Text of an answer, and the number of cached prompt tokens."""
    answer = server.complete(LAMPS, max_tokens=12, **fields)
    return text_of(answer), answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_cached_prefix_survives_stopped_and_killed_servers(dtype: str, tmp_path: Path) -> None:
    options = (*SMALL, "--deterministic", "--kv-cache-dtype", dtype)
    persist = ("--kv-persist", str(tmp_path / "kept"))
    with serve(*options) as server:
        right, _ = text_and_cached(server)
        assert server.metric("windlass_kv_persist_written_blocks_total") == 0
    with serve(*options, *persist) as server:
        assert text_and_cached(server) == (right, 0)
        assert text_and_cached(server, cache_salt="mine") == (right, 0)
    with serve(*options, *persist) as server:  # a stopped server has written all blocks
        text, cached = text_and_cached(server)
        assert text == right and cached > 200 and cached % 16 == 0
        assert text_and_cached(server, cache_salt="mine") == (right, cached)
        assert text_and_cached(server, cache_salt="yours") == (right, 0)
        assert text_and_cached(server, rope_scaling={"rope_type": "linear", "factor": 2})[1] == 0
        assert server.metric("windlass_kv_persist_restored_tokens_total") == 2 * cached
        assert server.metric("windlass_kv_persist_read_blocks_total") == 2 * cached / 16
        assert server.metric("windlass_kv_persist_disk_bytes") > 0
        eventually(lambda: server.metric("windlass_kv_persist_waiting_blocks") == 0, 30)
        engine = server.engine_pid()
        server.process.kill()
        server.process.wait()
        eventually(lambda: not alive(engine), 30)
    with serve(*options, *persist) as server:
        assert text_and_cached(server) == (right, cached)


@pytest.mark.slow
def test_restarted_engine_restores_cached_prefixes(tmp_path: Path) -> None:
    with serve("--kv-persist", str(tmp_path), *SMALL, "--deterministic") as server:
        right, _ = text_and_cached(server)
        eventually(lambda: server.metric("windlass_kv_persist_waiting_blocks") == 0, 30)
        eventually(lambda: server.metric("windlass_kv_persist_written_blocks_total") > 12, 30)
        os.kill(server.engine_pid(), signal.SIGKILL)
        eventually(lambda: server.metric("windlass_engine_restarts_total") == 1, 60)
        server.wait_ready()
        text, cached = text_and_cached(server)
        assert text == right and cached > 200
