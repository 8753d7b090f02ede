"""`rope_scaling: "auto"` on real servers, with a model trained for 128 tokens and longer requests of every endpoint."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.real_server import RealServer, serve

import windlass
from windlass.clients import BadRequestError, Client

DEMO = Path(windlass.__file__).parent / "models" / "demo"
M = 128
YARN = {factor: {"rope_type": "yarn", "factor": float(factor)} for factor in (2, 4, 8)}
EXPLICIT: dict[int, Any] = {1: {"rope_type": "default"}, **YARN}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a trained length of 128 tokens in config.json."""
    folder = tmp_path_factory.mktemp("short")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).symlink_to((DEMO / name).resolve())
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": M}))
    (folder / "template").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RealServer]:
    options = ("--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--deterministic", "--rope-scaling", "auto")
    with serve(
        *options, "--chat-template", str(model / "template"), "--default-max-tokens", "40", model=model
    ) as running:
        yield running


def complete(server: RealServer, length: int, tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A completion with `length` tokens in all."""
    prompt = list(range(20, 20 + length - tokens))
    return server.complete(prompt, max_tokens=tokens, ignore_eos=True, logprobs=2, **fields)


def factor(answer: dict[str, Any]) -> float:
    return answer["rotary"]["parameters"].get("factor", 1.0)


LENGTHS = {100: 1, 128: 1, 129: 2, 256: 2, 257: 4, 512: 4, 513: 8, 1000: 8}


def test_batch_of_lengths_gives_the_answers_of_explicit_scalings(server: RealServer) -> None:
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        chosen = list(pool.map(lambda length: complete(server, length, rope_scaling="auto", cache_salt="a"), LENGTHS))
    for (length, wanted), answer in zip(LENGTHS.items(), chosen, strict=True):
        explicit = complete(server, length, rope_scaling=EXPLICIT[wanted], cache_salt="b")
        assert answer["choices"] == explicit["choices"]
        assert answer["rotary"]["fingerprint"] == explicit["rotary"]["fingerprint"]
        assert answer["rotary"]["auto"] == {"length": length, "up_to": wanted * M}
        assert factor(answer) == wanted and "auto" not in explicit["rotary"]


def test_growing_chat_changes_its_scaling(server: RealServer) -> None:
    """Turns with the same scaling use the cached prefix. A change computes the text again, and keeps the previous cache."""
    messages: list[dict[str, str]] = [{"role": "user", "content": "tell me of the sea and the ships " * 3}]
    seen: list[tuple[float, int, int]] = []

    def turn(**fields: Any) -> dict[str, Any]:
        answer = server.ask(
            "/v1/chat/completions", messages=messages, temperature=0, ignore_eos=True, max_tokens=32, **fields
        )
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        length = usage["prompt_tokens"] + 32
        assert answer["rotary"]["auto"]["length"] == length
        assert factor(answer) == next(step for step in (1, 2, 4, 8) if length <= step * M)
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


def test_max_tokens_is_part_of_the_length(server: RealServer) -> None:
    prompt = list(range(20, 120))
    for tokens, wanted in ((28, 1), (29, 2), (200, 4)):
        body = {"prompt": prompt, "max_tokens": tokens, "stop": ["e", "a", " "]}
        assert factor(server.ask("/v1/completions", **body)) == wanted
    assert server.ask("/v1/completions", prompt=prompt)["rotary"]["auto"] == {
        "length": 116,
        "up_to": M,
    }  # 16 is the default of completions
    # The last threshold is the context length, at which an answer ends.
    full = complete(server, 1100, 108, rope_scaling="auto")
    assert full["usage"]["completion_tokens"] == 32 and full["rotary"]["auto"] == {"length": 1024, "up_to": 1024}
    chat = server.ask("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], stop=["e"])
    assert chat["rotary"]["auto"]["length"] == chat["usage"]["prompt_tokens"] + 40  # --default-max-tokens


def test_every_endpoint_accepts_auto(server: RealServer) -> None:
    text = "the whale rose from the deep water " * 20  # more than 128 tokens
    chat = [{"role": "user", "content": text}]
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": text, "n": 2, "best_of": 3, "max_tokens": 4},
        "chat/completions": {"messages": chat, "n": 2, "max_tokens": 4},
        "responses": {"input": text, "max_output_tokens": 4},
        "messages": {"messages": chat, "max_tokens": 4},
    }
    for path, body in bodies.items():
        answer = server.ask(f"/v1/{path}", **body, rope_scaling="auto")
        assert answer["rotary"]["rope_type"] == "yarn", path
        assert answer["rotary"]["auto"]["up_to"] == factor(answer) * M
    events = server.stream("/v1/completions", prompt=text, max_tokens=4, rope_scaling="auto")
    last = [event["rotary"] for event in events if event.get("rotary")]
    assert len(last) == 1 and last[0]["auto"]["up_to"] >= 256
    vectors = [
        server.ask("/v1/embeddings", input=text, pooling="mean", rope_scaling=scaling)["data"][0]["embedding"]
        for scaling in ("auto", YARN[2], YARN[4], {"rope_type": "default"})
    ]
    tokens = server.ask("/v1/embeddings", input=text, pooling="mean")["usage"]["prompt_tokens"]
    assert vectors[0] == vectors[1 if tokens <= 256 else 2] and vectors[0] != vectors[3]


def test_thresholds_are_reported(server: RealServer) -> None:
    steps = [{"up_to": step * M, "rope_scaling": EXPLICIT[step], "effective_length": None} for step in (1, 2, 4, 8)]
    for path in ("models", "rotary"):
        reported = server.get(f"/v1/{path}")
        shown = reported["data"][0]["rotary_auto"] if path == "models" else reported["auto"]
        assert shown == {"default": True, "steps": steps}
    with Client(server.url) as client:
        inspected = client.inspect("auto", length=300)
        assert inspected.parameters["factor"] == 4 and inspected.auto is not None and inspected.auto.up_to == 512
        answer = client.completions(prompt=list(range(20, 200)), max_tokens=4, rope_scaling="auto")
        assert answer.rotary is not None and answer.rotary.auto is not None and answer.rotary.auto.length == 184
        assert client.rotary().auto == client.models()[0].rotary_auto


def test_update_policies_follow_the_text(server: RealServer) -> None:
    for policy in ("recompute", "rotate"):
        answer = complete(server, 400, 320, rope_scaling="auto", rope_update=policy, cache_salt=policy)
        assert answer["rotary"]["auto"] == {"length": None, "up_to": 512}
        assert answer["rotary"]["moves"] == (2 if policy == "rotate" else 0)


@pytest.mark.parametrize("wrong", ["Auto", "automatic", {"rope_type": "auto"}, {"rope_type": "auto", "factor": 2}])
def test_misspelt_auto_is_refused(server: RealServer, wrong: Any) -> None:
    error = server.refuse("/v1/completions", prompt="a", rope_scaling=wrong)
    assert error["param"].startswith("rope_scaling")


@pytest.mark.slow
def test_thresholds_of_the_operator(model: Path) -> None:
    ladder = ("--rope-profile", f"long={json.dumps(YARN[2])}", "--rope-ladder", "100=none,300=long")
    with serve(
        "--kv-cache-memory", "64MiB", "--max-model-len", "1024", *ladder, "--rope-policy", "profiles", model=model
    ) as running:
        for length, wanted in ((100, "default"), (101, "yarn"), (300, "yarn")):
            answer = complete(running, length, rope_scaling="auto")
            assert answer["rotary"]["rope_type"] == wanted
            named = {"profile": "long"} if wanted == "yarn" else {}
            assert answer["rotary"]["auto"] == {"length": length, "up_to": 100 if wanted == "default" else 300, **named}
        assert "auto" not in complete(running, 700)["rotary"]  # the default is that of the server
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
