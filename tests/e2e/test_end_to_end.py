"""The bundled model over a real server process: what a user's own clients see."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import transformers
from helpers.eventually import eventually
from helpers.real_server import RealServer, serve

from windlass.clients import Client

DEMO = Path(__file__).parents[2] / "models" / "demo"


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serve("--kv-cache-memory", "64MiB") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def long_body(tokens: int = 450) -> dict[str, Any]:
    return {"prompt": "In the beginning", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}


# A stream that is over only when somebody ends it.
ENDLESS: dict[str, Any] = {**long_body(100_000), "context_overflow": "shift"}


def test_greedy_completion_is_what_transformers_generates(client: openai.OpenAI) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32", attn_implementation="eager")
    prompt = "The tree is a"
    ids = tokenizer(prompt, return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids.input_ids.shape[1] :]
    answer = client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0)
    assert answer.choices[0].text == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.usage is not None and answer.usage.prompt_tokens == ids.input_ids.shape[1]


def test_streams_add_up_to_the_whole(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "demo", "prompt": "A dog is", "max_tokens": 40, "temperature": 0.8, "seed": 5}
    settings["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**settings)
    chunks = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert len(chunks) > 5  # at most eight tokens each


def test_chat_streams(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What does horse mean?"}]
    settings: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_echo_scores_a_prompt_as_transformers_does(server: RealServer) -> None:
    """The request lm-eval makes: token ids, echo, log-probabilities, one token."""
    import torch

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32", attn_implementation="eager")
    ids = tokenizer("The horse is an animal that eats grass.").input_ids
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1}
    scored = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["logprobs"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert len(scored["token_logprobs"]) == len(ids) + 1 and scored["token_logprobs"][0] is None
    for i, token in enumerate(ids[1:]):
        assert scored["token_logprobs"][i + 1] == pytest.approx(float(expected[i, token]), abs=1e-3)


def test_the_python_client(server: RealServer) -> None:
    with Client(base_url=server.url) as client:
        assert [m.id for m in client.models()] == ["demo"]
        with client.completions("A cat is", max_tokens=10, temperature=0, stream=True) as stream:
            streamed = "".join(chunk.text for chunk in stream)
        assert streamed == client.completions("A cat is", max_tokens=10, temperature=0).text


def test_a_request_may_bring_its_own_scaling(server: RealServer) -> None:
    body = {**long_body(20), "stream": False}
    plain = httpx.post(f"{server.url}/v1/completions", json=body).json()
    none = httpx.post(f"{server.url}/v1/completions", json={**body, "rope_scaling": {"rope_type": "default"}}).json()
    scaled = httpx.post(
        f"{server.url}/v1/completions", json={**body, "rope_scaling": {"type": "linear", "factor": 4}}
    ).json()
    assert plain["choices"][0]["text"] == none["choices"][0]["text"] != scaled["choices"][0]["text"]
    bad = httpx.post(f"{server.url}/v1/completions", json={**body, "rope_scaling": {"type": "linear", "factor": -1}})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "rope_scaling.factor"


def test_a_client_that_leaves_frees_its_blocks(server: RealServer) -> None:
    """Both a stream and a plain request, closed in the middle, at socket level."""
    eventually(lambda: server.metric("windlass_num_requests_running") == 0, 20)
    host, port = server.url.removeprefix("http://").split(":")
    for stream in (True, False):
        generated = server.metric("windlass_generation_tokens_total")
        body = json.dumps({**ENDLESS, "n": 8, "stream": stream}).encode()
        with socket.create_connection((host, int(port))) as connection:
            headers = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + headers.encode() + body)
            eventually(lambda: server.metric("windlass_num_requests_running") > 0, 30)
        eventually(lambda: server.metric("windlass_num_requests_running") == 0, 30)
        assert server.metric("windlass_kv_cache_usage_perc") == 0
        assert server.metric("windlass_generation_tokens_total") - generated < 8 * 100_000


def test_killed_engine_fails_the_stream_and_comes_back(server: RealServer) -> None:
    lines: list[str] = []
    killed = threading.Event()
    before = server.metric("windlass_engine_restarts_total")
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) > 8 and not killed.is_set():
                os.kill(server.engine_pid(), signal.SIGKILL)
                killed.set()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert "error" in json.loads(data[-2])
    eventually(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 200, 60)
    answer = httpx.post(f"{server.url}/v1/completions", json={**long_body(5), "stream": False}, timeout=30)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
    assert server.metric("windlass_engine_restarts_total") == before + 1


def test_sigterm_lets_a_stream_finish() -> None:
    # Past the model's own length: five hundred tokens take less time than the questions asked meanwhile.
    options = ("--kv-cache-memory", "64MiB", "--max-model-len", "5000", "--grace-period", "300")
    with serve(*options) as server, httpx.Client(timeout=30) as other:
        finish: list[str] = []
        sent = False
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long_body(2500), timeout=60) as response:
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if not sent:
                    server.process.send_signal(signal.SIGTERM)
                    sent = True
                    eventually(lambda: other.get(f"{server.url}/ready").status_code == 503, 30)
                    refused = other.post(f"{server.url}/v1/completions", json=long_body(5))
                    assert refused.status_code == 503 and "retry-after" in refused.headers
                finish.append(line.removeprefix("data: "))
        assert finish[-1] == "[DONE]" and json.loads(finish[-2])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(10) == 0
