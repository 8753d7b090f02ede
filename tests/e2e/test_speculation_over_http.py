"""Several tokens per step, all the way: what the engine hands out, over a real server, as clients see it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.engines import greedy, make_core, run
from helpers.live_server import live_server
from helpers.prediction_layers import make_predicting
from helpers.real_server import RealServer, serve
from helpers.scripted_engine import ScriptedEngine

import windlass
from windlass.engine.rotary.rotary_policy import RotaryReport

DEMO = Path(windlass.__file__).parent / "models" / "demo"
LOOP = [901, 455] * 30
TOKENS = 96


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    options = ("--kv-cache-memory", "64MiB", "--deterministic", "--speculative-ngram", "5")
    with serve(*options) as running:
        yield running


def body(**fields: Any) -> dict[str, Any]:
    given = {"prompt": LOOP, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**given, "logprobs": 1, **fields}


def complete(server: RealServer, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json=body(**fields), timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_answers_streams_and_metrics_count_every_token(server: RealServer) -> None:
    core = make_core(DEMO, deterministic=True, kv_cache_memory=64 << 20)
    (want,) = run(core, [greedy("x", LOOP, TOKENS, logprobs=1)]).values()
    answer = complete(server)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == want.token_ids
    entries = [entry for output in want.outputs for entry in output.logprobs or ()]
    assert choice["logprobs"]["token_logprobs"] == [entry.logprob for entry in entries]
    assert answer["usage"]["completion_tokens"] == TOKENS

    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json=body(stream=True, stream_options={"include_usage": True}),
        timeout=60,
    ) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    pieces = [event["choices"][0] for event in events if event["choices"] and event["choices"][0]["token_ids"]]
    assert [token for piece in pieces for token in piece["token_ids"]] == want.token_ids
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    logprobs = [value for piece in pieces for value in piece["logprobs"]["token_logprobs"]]
    assert logprobs == choice["logprobs"]["token_logprobs"]
    offsets = [value for piece in pieces for value in piece["logprobs"]["text_offset"]]
    assert offsets == choice["logprobs"]["text_offset"]
    assert max(len(piece["token_ids"]) for piece in pieces) > 1
    assert events[-1]["usage"]["completion_tokens"] == TOKENS

    proposals, proposed, accepted = (
        server.metric(f"windlass_spec_decode_num_{name}_total")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < proposals < accepted <= proposed
    assert server.metric("windlass_generation_tokens_total") == 2 * TOKENS
    assert server.metric("windlass_engine_steps_total") == 2 * TOKENS - accepted
    assert server.metric("windlass_inter_token_latency_seconds_count") == 2 * (TOKENS - 1)


def test_a_stop_string_inside_a_step_ends_the_answer_there(server: RealServer) -> None:
    whole = complete(server)["choices"][0]
    pieces = whole["logprobs"]["tokens"]
    # A text that ends with the 40th token, long enough to be met there first.
    stop = "".join(pieces[36:40])
    cut = complete(server, stop=stop, include_stop_str_in_output=True)
    (choice,) = cut["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"].endswith(stop)
    assert choice["token_ids"] == whole["token_ids"][: len(choice["token_ids"])]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert cut["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) <= 40


def test_the_rotary_report_is_that_of_the_length_a_stop_string_left() -> None:
    """The step that brought the stop string also brought the end: its own report speaks of a longer context."""
    longer = RotaryReport("dynamic", {}, "rotate", 2048.0, "longer", 1)
    engine = ScriptedEngine(reply=[65, 66, 67, 68], tokens_per_output=4, report=lambda request: longer)
    with live_server(engine) as live:
        whole = live.complete(max_tokens=4)
        assert whole["rotary"]["fingerprint"] == "longer"
        cut = live.complete(max_tokens=4, stop="c")
        assert cut["choices"][0]["text"] == "b" and cut["usage"]["completion_tokens"] == 2
        assert cut["rotary"]["rope_type"] == "default"
        ends_there = live.complete(max_tokens=4, stop="e")
        assert ends_there["rotary"]["fingerprint"] == "longer"


@pytest.mark.slow
def test_a_draft_model_over_http() -> None:
    core = make_core(DEMO, deterministic=True, kv_cache_memory=64 << 20)
    (want,) = run(core, [greedy("x", LOOP, TOKENS, logprobs=1)]).values()
    options = (
        "--deterministic",
        "--speculative-model",
        "demo",
        "--speculative-tokens",
        "3",
    )
    with serve("--kv-cache-memory", "64MiB", *options, WINDLASS_SPECULATIVE_ADAPTIVE="false") as server:
        answer = complete(server)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == want.token_ids
        stop = "".join(choice["logprobs"]["tokens"][36:40])
        cut = complete(server, stop=stop)["choices"][0]
        assert cut["finish_reason"] == "stop" and cut["token_ids"] == want.token_ids[: len(cut["token_ids"])]
        listed = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert listed["draft_model"]["num_tokens"] == 3
        assert listed["draft_model"]["num_parameters"] == listed["num_parameters"]
        proposed, accepted = (
            server.metric(f"windlass_spec_decode_model_num_{name}_total")
            for name in ("draft_tokens", "accepted_tokens")
        )
        assert proposed == accepted > TOKENS / 2


@pytest.mark.slow
def test_a_models_own_layer_over_http(tmp_path: Path) -> None:
    """With the bundled tokenizer, so that the random model reads and writes text."""
    model = make_predicting("qwen3_5_moe", tmp_path, seed=1, vocab_size=make_core(DEMO).info.vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, model)
    core = make_core(model, deterministic=True)
    (want,) = run(core, [greedy("x", LOOP, TOKENS, logprobs=1)]).values()
    options = ("--deterministic", "--speculative-mtp", "--speculative-tokens", "2")
    more = ("--kv-cache-memory", "64MiB", "--dtype", "float32")
    with serve(*more, *options, model=model, WINDLASS_SPECULATIVE_ADAPTIVE="false") as server:
        (choice,) = complete(server)["choices"]
        assert choice["token_ids"] == want.token_ids
        assert "  options   --deterministic, --speculative-mtp\n" in server.log.read_text()
        listed = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert listed["draft_model"]["architecture"] == "prediction layer of Qwen3_5MoeForCausalLM"
        assert server.metric("windlass_spec_decode_model_num_accepted_tokens_total") > 10
