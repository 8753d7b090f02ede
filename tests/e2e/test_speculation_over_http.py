"""Several tokens per step over real servers: n-gram proposals, a draft model, and an MTP layer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.engines import Finished, greedy, make_core, run
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


BODY = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}


def complete(server: RealServer, **fields: Any) -> dict[str, Any]:
    return server.complete(LOOP, **BODY, **fields)


def generated(model: Path, **options: Any) -> Finished:
    """The tokens of an engine without speculation."""
    (finished,) = run(make_core(model, deterministic=True, **options), [greedy("x", LOOP, TOKENS, logprobs=1)]).values()
    return finished


def test_answers_streams_and_metrics_contain_every_token(server: RealServer) -> None:
    want = generated(DEMO, kv_cache_memory=64 << 20)
    answer = complete(server)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == want.token_ids
    entries = [entry for output in want.outputs for entry in output.logprobs or ()]
    assert choice["logprobs"]["token_logprobs"] == [entry.logprob for entry in entries]
    assert answer["usage"]["completion_tokens"] == TOKENS

    events = server.stream("/v1/completions", prompt=LOOP, **BODY, stream_options={"include_usage": True})
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


def test_stop_string_within_a_step_ends_the_answer(server: RealServer) -> None:
    whole = complete(server)["choices"][0]
    pieces = whole["logprobs"]["tokens"]
    # A text that ends with the 40th token and does not occur earlier.
    stop = "".join(pieces[36:40])
    cut = complete(server, stop=stop, include_stop_str_in_output=True)
    (choice,) = cut["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"].endswith(stop)
    assert choice["token_ids"] == whole["token_ids"][: len(choice["token_ids"])]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert cut["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) <= 40


def test_rotary_report_is_of_the_length_at_the_stop_string() -> None:
    """The step with the stop string also ended the request, and its report is of a longer context."""
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
def test_draft_model_gives_the_same_tokens() -> None:
    want = generated(DEMO, kv_cache_memory=64 << 20)
    options = (
        "--kv-cache-memory",
        "64MiB",
        "--deterministic",
        "--speculative-model",
        "demo",
        "--speculative-tokens",
        "3",
    )
    with serve(*options, WINDLASS_SPECULATIVE_ADAPTIVE="false") as server:
        answer = complete(server)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == want.token_ids
        stop = "".join(choice["logprobs"]["tokens"][36:40])
        cut = complete(server, stop=stop)["choices"][0]
        assert cut["finish_reason"] == "stop" and cut["token_ids"] == want.token_ids[: len(cut["token_ids"])]
        listed = server.get("/v1/models")["data"][0]
        assert listed["draft_model"]["num_tokens"] == 3
        assert listed["draft_model"]["num_parameters"] == listed["num_parameters"]
        proposed, accepted = (
            server.metric(f"windlass_spec_decode_model_num_{name}_total")
            for name in ("draft_tokens", "accepted_tokens")
        )
        assert proposed == accepted > TOKENS / 2


@pytest.mark.slow
def test_mtp_layer_gives_the_same_tokens(tmp_path: Path) -> None:
    """With the bundled tokenizer, because the random model has none."""
    model = make_predicting("qwen3_5_moe", tmp_path, seed=1, vocab_size=make_core(DEMO).info.vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, model)
    want = generated(model)
    options = ("--deterministic", "--speculative-mtp", "--speculative-tokens", "2", "--kv-cache-memory", "64MiB")
    with serve(*options, "--dtype", "float32", model=model, WINDLASS_SPECULATIVE_ADAPTIVE="false") as server:
        (choice,) = complete(server)["choices"]
        assert choice["token_ids"] == want.token_ids
        assert "  options   --deterministic, --speculative-mtp\n" in server.log.read_text()
        listed = server.get("/v1/models")["data"][0]
        assert listed["draft_model"]["architecture"] == "prediction layer of Qwen3_5MoeForCausalLM"
        assert server.metric("windlass_spec_decode_model_num_accepted_tokens_total") > 10
