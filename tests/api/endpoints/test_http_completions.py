"""`/v1/completions` over a real socket, against a scripted engine: shapes, echo, log-probabilities, batches, streams."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import openai
import pytest
from helpers.live_server import Live
from helpers.scripted_engine import LIKELY, UNLIKELY, model_info

from windlass.engine.interface.request import EngineRequest


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_complete_answer(live: Live) -> None:
    live.engine.cached_tokens = 2
    answer = live.complete("hello", max_tokens=4)
    assert answer["object"] == "text_completion" and answer["model"] == "toy" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "bcdb", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    prompt = len(live.tokenizer.encode("hello"))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 4,
        "total_tokens": prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert live.engine.requests[0].prompt_token_ids == live.tokenizer.encode("hello")


def test_empty_prompt_continues_the_beginning_of_sequence_token(live: Live) -> None:
    live.complete("", max_tokens=1)


def test_default_of_sixteen_tokens(live: Live) -> None:
    assert live.complete()["usage"]["completion_tokens"] == 16
    assert live.complete(max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    live.refuse("/v1/completions", {"prompt": "a", "max_tokens": 3, "max_completion_tokens": 4})


def test_max_tokens_is_clamped_to_the_context(live: Live) -> None:
    answer = live.complete([5] * 250, max_tokens=1000)
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [[420, 71, 72]]),
        (["hi", "h"], [[420, 71, 72], [420, 71]]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7], [8, 9]], [[7], [8, 9]]),
    ],
)
def test_the_four_shapes_of_a_prompt(live: Live, prompt: Any, expected: list[list[int]]) -> None:
    answer = live.complete(prompt, max_tokens=1)
    assert sorted(r.prompt_token_ids for r in live.engine.requests) == sorted(expected)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_order_of_choices_of_many_prompts_and_samples(live: Live) -> None:
    # The length of a prompt determines the space left for its answer, so all answers differ.
    prompts = [[9] * (250 + i) for i in range(5)]
    answer = live.complete(prompts, max_tokens=100, n=2)
    expected = ["bcdbcd"[: 6 - i] for i in range(5) for _ in range(2)]
    assert texts(answer) == expected
    events = live.stream("/v1/completions", {"prompt": prompts, "max_tokens": 100, "n": 2})
    streamed = [""] * 10
    for event in events[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == expected
    assert events[-1] == "[DONE]"


def test_many_prompts_do_not_flood_the_engine(live: Live) -> None:
    live.engine.delay = 0.002
    live.complete([[5]] * 40, max_tokens=2)
    assert len(live.engine.requests) == 40
    assert live.engine.most_running == model_info().max_num_seqs
    assert len({request.request_id for request in live.engine.requests}) == 40


def test_one_failing_prompt_fails_the_request_and_aborts_the_others(live: Live) -> None:
    from windlass.engine.errors import RequestError

    def refuse(request: EngineRequest) -> Exception | None:
        return RequestError("no", "prompt", "refused") if request.prompt_token_ids == [3] else None

    live.engine.refuse = refuse
    live.engine.delay = 0.05
    assert live.refusal("/v1/completions", {"prompt": [[5], [6], [3]], "max_tokens": 100}) == ("prompt", "refused")
    live.wait(lambda: live.engine.running == 0)
    assert len(live.engine.aborted) == 2


def test_echo_scores_a_prompt_for_an_evaluation_harness(live: Live) -> None:
    """Fields and evaluation of lm-eval's `local-completions`: token ids, echo, logprobs and one token."""
    context, continuation = [420, 71, 72], [78, 80, 81]
    answer = live.complete(
        [context + continuation, context],
        model="toy",
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    choice = sorted(answer["choices"], key=lambda c: c["index"])[0]
    start = len(context)
    found = choice["logprobs"]["token_logprobs"][start:-1]
    tops = choice["logprobs"]["top_logprobs"][start:-1]
    assert found == [LIKELY, LIKELY, UNLIKELY]
    assert [logprob == max(top.values()) for logprob, top in zip(found, tops, strict=True)] == [True, True, False]
    request = next(r for r in live.engine.requests if len(r.prompt_token_ids) == 6)
    assert request.sampling.prompt_logprobs == 1 and request.sampling.max_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_scores_only(live: Live, stream: bool) -> None:
    body = {"prompt": [420, 71, 72], "max_tokens": 0, "echo": True, "logprobs": 0, "stream": stream}
    if stream:
        events = live.stream("/v1/completions", body)
        first, last = events[0]["choices"][0], events[-2]["choices"][0]
        assert last["finish_reason"] == "length" and last["text"] == ""
    else:
        answer = live.complete(**body)
        first = answer["choices"][0]
        assert first["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
    assert first["text"] == "hi"
    assert first["logprobs"] == {
        "tokens": ["<|bos|>", "h", "i"],
        "token_logprobs": [None, UNLIKELY, LIKELY],
        "top_logprobs": [None, {"h": UNLIKELY}, {"i": LIKELY}],
        "text_offset": [0, 0, 1],
    }


def test_logprobs_cover_every_generated_token_even_the_last(live: Live) -> None:
    live.engine.eos_after = 2
    choice = live.complete(max_tokens=9, logprobs=2)["choices"][0]
    assert choice["text"] == "bc" and choice["finish_reason"] == "stop" and choice["stop_reason"] == 421
    assert choice["logprobs"]["tokens"] == ["b", "c", "<|eos|>"]
    assert choice["logprobs"]["top_logprobs"][0] == {"a": LIKELY, "b": UNLIKELY}
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_text_offsets_count_characters_not_bytes(live: Live) -> None:
    ids = live.tokenizer.encode("é日x", add_special_tokens=False)
    choice = live.complete(ids, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert choice["text"] == "é日x"
    offsets = choice["logprobs"]["text_offset"]
    # Several byte tokens make up each of the first two characters; all of them begin where their character does.
    starts = [key for key, _ in groupby(offsets)]
    assert starts == [0, 1, 2] and len(offsets) == len(ids) > 3
    assert all(math.isfinite(x) for x in choice["logprobs"]["token_logprobs"][1:])
    assert any(token.startswith("bytes:") for token in choice["logprobs"]["tokens"])


def test_streamed_logprobs_equal_complete_ones(live: Live) -> None:
    body = {"prompt": "hello world", "max_tokens": 7, "logprobs": 3, "echo": True, "n": 2, "stop": ["db"]}
    whole = live.complete(**body)["choices"]
    joined = [{"text": "", "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in whole]
    for event in live.stream("/v1/completions", body)[:-1]:
        for choice in event["choices"]:
            part = joined[choice["index"]]
            part["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                part[name] += values
    for choice, part in zip(whole, joined, strict=True):
        assert part.pop("text") == choice["text"] == "hello worldbc"
        assert part == choice["logprobs"]


def test_prompt_logprobs_and_token_ids(live: Live) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "prompt_logprobs": 2, "return_token_ids": True}
    choice = live.complete(**body)["choices"][0]
    assert choice["prompt_token_ids"] == [420, 71, 72] and choice["token_ids"] == [65, 66]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {
            "70": {"logprob": LIKELY, "rank": 1, "decoded_token": "g"},
            "71": {"logprob": UNLIKELY, "rank": 2, "decoded_token": "h"},
        },
        {
            "72": {"logprob": LIKELY, "rank": 1, "decoded_token": "i"},
            "73": {"logprob": UNLIKELY, "rank": 2, "decoded_token": "j"},
        },
    ]
    events = live.stream("/v1/completions", body)
    assert events[0]["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]
    assert events[0]["choices"][0]["prompt_token_ids"] == [420, 71, 72]
    assert [t for e in events[1:-1] for t in e["choices"][0]["token_ids"]] == [65, 66]


def test_best_of_returns_the_most_likely(live: Live) -> None:
    answer = live.complete(max_tokens=3, n=2, best_of=5)
    assert len(answer["choices"]) == 2 and answer["choices"][0]["logprobs"] is None
    assert live.engine.requests[0].sampling.n == 5 and live.engine.requests[0].sampling.logprobs == 0
    assert answer["usage"]["completion_tokens"] == 15
    live.refuse("/v1/completions", {"prompt": "a", "n": 2, "best_of": 1})
    error = live.refuse("/v1/completions", {"prompt": "a", "best_of": 2, "stream": True})
    assert error["param"] == "best_of"


@pytest.mark.parametrize("tokens_per_output", [1, 3])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(live: Live, include: bool, tokens_per_output: int) -> None:
    live.engine.tokens_per_output = tokens_per_output
    live.engine.delay = 0.001
    body = {"prompt": "a", "max_tokens": 50, "stop": ["cdb"], "include_stop_str_in_output": include}
    choice = live.complete(**body)["choices"][0]
    assert choice["text"] == ("bcdb" if include else "b")
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "cdb"
    live.wait(lambda: len(live.engine.aborted) == 1)
    events = live.stream("/v1/completions", body)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == ("bcdb" if include else "b")
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_ends_one_sample_and_counts_its_tokens_only(live: Live) -> None:
    live.engine.tokens_per_output = 4
    answer = live.complete(max_tokens=12, n=2, stop="c")
    assert texts(answer) == ["b", "b"]
    assert answer["usage"]["completion_tokens"] == 4
    (request,) = live.engine.requests
    assert live.engine.ended == [(request.request_id, 0)]  # the last one ends with the request


def test_stop_token_ids_and_min_tokens(live: Live) -> None:
    answer = live.complete(max_tokens=9, stop_token_ids=[66], min_tokens=3)
    assert texts(answer) == ["bcdb"]
    assert answer["choices"][0]["stop_reason"] == 66
    assert texts(live.complete(max_tokens=9, stop=["cd"], min_tokens=4)) == ["bcdbc"[:4]]


def test_special_tokens_on_request(live: Live) -> None:
    live.engine.reply = [65, 420, 66]
    assert texts(live.complete(max_tokens=3)) == ["bc"]
    assert texts(live.complete(max_tokens=3, skip_special_tokens=False)) == ["b<|bos|>c"]
    live.complete("x", max_tokens=1, add_special_tokens=False)
    assert live.engine.requests[-1].prompt_token_ids == [87]


def test_truncation_keeps_the_end(live: Live) -> None:
    answer = live.complete("hello world", max_tokens=1, truncate_prompt_tokens=2, echo=True)
    assert live.engine.requests[0].prompt_token_ids == live.tokenizer.encode("hello world")[-2:]
    assert "hello world".endswith(texts(answer)[0][:-1]) and len(texts(answer)[0]) < len("hello worldb")
    live.complete(list(range(300)), max_tokens=1, truncate_prompt_tokens=5)
    assert live.engine.requests[-1].prompt_token_ids == [295, 296, 297, 298, 299]


def test_truncation_side_right_keeps_the_beginning(live: Live) -> None:
    whole = live.tokenizer.encode("hello world")
    cut = {"truncate_prompt_tokens": 2, "max_tokens": 1}
    for side, kept in (("right", whole[:2]), ("left", whole[-2:]), (None, whole[-2:])):
        live.complete("hello world", truncation_side=side, **cut)
        assert live.engine.requests[-1].prompt_token_ids == kept
        live.complete(whole, truncation_side=side, **cut)
        assert live.engine.requests[-1].prompt_token_ids == kept
    live.complete("hello world", truncation_side="right", max_tokens=1)  # nothing is cut
    assert live.engine.requests[-1].prompt_token_ids == whole
    live.chat("hi", max_tokens=1)
    rendered = live.engine.requests[-1].prompt_token_ids
    live.chat("hi", truncation_side="right", **cut)
    assert live.engine.requests[-1].prompt_token_ids == rendered[:2] != rendered[-2:]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_as_ids(live: Live, stream: bool) -> None:
    live.engine.reply = [65, 66, 67]
    asked = {"max_tokens": 3, "return_tokens_as_token_ids": True, "stream": stream}

    def logprobs(path: str, body: dict) -> list:
        if stream:
            return [c["logprobs"] for e in live.stream(path, body)[:-1] for c in e["choices"] if c["logprobs"]]
        return [live.post(path, body).json()["choices"][0]["logprobs"]]

    found = logprobs("/v1/completions", {"prompt": "a", "logprobs": 1, **asked})
    tokens = [token for piece in found for token in piece["tokens"]]
    assert tokens == ["token_id:65", "token_id:66", "token_id:67"]
    tops = [top for piece in found for top in piece["top_logprobs"]]
    assert all(
        token in top and all(name.startswith("token_id:") for name in top)
        for token, top in zip(tokens, tops, strict=True)
    )
    found = logprobs(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1, **asked},
    )
    entries = [entry for piece in found for entry in piece["content"]]
    assert [entry["token"] for entry in entries] == tokens
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == b"bcd"
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])


def test_characters_split_over_tokens_arrive_complete(live: Live) -> None:
    live.engine.reply = live.tokenizer.encode("a日b😀", add_special_tokens=False)
    events = live.stream("/v1/completions", {"prompt": "x", "max_tokens": len(live.engine.reply)})
    parts = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(parts) == "a日b😀" and not any("�" in part for part in parts)
    choice = live.complete("x", max_tokens=len(live.engine.reply) - 1)["choices"][0]
    assert choice["text"] == "a日b�"


def test_usage_in_streams(live: Live) -> None:
    live.engine.cached_tokens = 1
    body = {"prompt": "hi", "max_tokens": 3}
    assert all("usage" not in e for e in live.stream("/v1/completions", body)[:-1])
    events = live.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert [e["usage"] for e in events[:-2]] == [None] * 3
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = live.stream("/v1/completions", {**body, "stream_options": options})
    assert [e["usage"]["completion_tokens"] for e in events[:-1]] == [1, 2, 3, 3]
    error = live.refuse("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert error["param"] == "stream_options"


def test_the_openai_client(live: Live) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["toy"]
        answer = client.completions.create(model="toy", prompt=["a", "b"], max_tokens=3, logprobs=1, n=2)
        assert [choice.text for choice in answer.choices] == ["bcd"] * 4
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens == ["b", "c", "d"]
        stream = client.completions.create(
            model="toy", prompt="a", max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].text for c in chunks if c.choices) == "bcd"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
        answer = client.completions.create(model="toy", prompt="a", max_tokens=2, extra_body={"top_k": 5, "min_p": 0.1})
        assert live.engine.requests[-1].sampling.top_k == 5
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="toy", prompt="a", extra_body={"no_such_field": 1})
        assert caught.value.param == "no_such_field"
