"""Fill-in-the-middle: token ids of prompt and suffix, and refused requests."""

from __future__ import annotations

import pytest
from helpers.live_server import Live, live_server
from helpers.toy_tokenizers import taught

from windlass.clients import Client
from windlass.server.serving import prompts

PATH = "/v1/completions"
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
DIALECTS = [
    QWEN,
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
]


def plain(live: Live, text: str) -> list[int]:
    return live.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("names", DIALECTS)
def test_gap_uses_the_fill_in_tokens_of_the_model(names: tuple[str, str, str], special: bool) -> None:
    backend = taught(names, special=special)
    with live_server(backend=backend) as live:
        live.complete("def f(x):\n    ", suffix="\n    return y")
        (request,) = live.engine.requests
        # Token ids of the text in the model cards, by transformers' tokenizers.
        text = f"{names[0]}def f(x):\n    {names[1]}\n    return y{names[2]}"
        assert request.prompt_token_ids == backend.encode(text, add_special_tokens=True).ids
        assert live.http.get("/v1/models").json()["data"][0]["tasks"][:2] == ["generate", "infill"]


def test_each_prompt_has_its_own_gap(live: Live) -> None:
    prefix, suffix, middle = map(live.tokenizer.backend.token_to_id, QWEN)
    after = plain(live, "the dog")
    live.http.post(PATH, json={"prompt": ["The ", "fox"], "suffix": "the dog", "max_tokens": 2})
    live.http.post(PATH, json={"prompt": [300, 301], "suffix": "the dog", "max_tokens": 2, "add_special_tokens": False})
    bos = live.tokenizer.bos_token_id
    assert [request.prompt_token_ids for request in live.engine.requests] == [
        [bos, prefix, *plain(live, "The "), suffix, *after, middle],
        [bos, prefix, *plain(live, "fox"), suffix, *after, middle],
        [prefix, 300, 301, suffix, *after, middle],
    ]


@pytest.mark.parametrize("field", ["prompt", "suffix"])
def test_special_tokens_in_texts_are_plain_text(live: Live, field: str) -> None:
    hostile = "".join(QWEN) + QWEN[2] * 3 + "x"
    live.complete(**{"prompt": "a", "suffix": "b", field: hostile})
    (request,) = live.engine.requests
    ids = [live.tokenizer.backend.token_to_id(name) for name in QWEN]
    assert [request.prompt_token_ids.count(token) for token in ids] == [1, 1, 1]
    before, after = request.prompt_token_ids.index(ids[1]), len(request.prompt_token_ids) - 1
    part = request.prompt_token_ids[2:before] if field == "prompt" else request.prompt_token_ids[before + 1 : after]
    assert live.tokenizer.decode(part, skip_special_tokens=False) == hostile


def test_a_gap_at_the_start_of_a_file(live: Live) -> None:
    prefix, suffix, middle = map(live.tokenizer.backend.token_to_id, QWEN)
    live.complete("", suffix="fox")
    ids = [live.tokenizer.bos_token_id, prefix, suffix, *plain(live, "fox"), middle]
    assert live.engine.requests[0].prompt_token_ids == ids


def test_repeated_suffixes_have_a_total_limit(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_SUFFIX_TOKENS", 20)
    error = live.refuse(PATH, {"prompt": ["a"] * 3, "suffix": live.tokenizer.decode([300] * 7)})
    assert error["param"] == "suffix" and "at most 20" in error["message"] and not live.engine.requests


def test_empty_suffix_has_no_effect(live: Live) -> None:
    live.complete("The king", suffix="")
    assert live.engine.requests[0].prompt_token_ids == live.tokenizer.encode("The king")


def test_echo_repeats_the_text_before_the_gap(live: Live) -> None:
    answer = live.http.post(PATH, json={"prompt": "The king", "suffix": "said", "echo": True, "max_tokens": 0}).json()
    assert answer["choices"][0]["text"] == "The king"


def test_prefix_and_suffix_too_long_together_are_refused(live: Live) -> None:
    most = live.engine.info.max_model_len
    half = [300] * (most // 2 + 1)
    error = live.refuse(PATH, {"prompt": half, "suffix": live.tokenizer.decode(half)})
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_model_without_fill_in_tokens(stream: bool) -> None:
    with live_server() as live:
        error = live.refuse(PATH, {"prompt": "a", "suffix": "b", "stream": stream})
        assert error["param"] == "suffix" and error["code"] == "no_fill_in_the_middle"
        assert live.http.get("/v1/models").json()["data"][0]["tasks"][:2] == ["generate", "embed"]


def test_a_template_is_applied(live: Live) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with Client(live.url) as client:
        assert client.apply_template(messages) == "<|bos|>[user]Hi\n[assistant]"
        assert client.apply_template(messages, add_generation_prompt=False) == "<|bos|>[user]Hi\n"
        assert client.apply_template(messages, chat_template_kwargs={"prefix": "P"}).startswith("<|bos|>P[user]")
    ids = live.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = live.http.post("/apply_template", json={"messages": messages}).json()["prompt"]
    assert live.tokenizer.encode(text, add_special_tokens=False) == ids


def test_invalid_templates_are_named(live: Live) -> None:
    assert live.refuse("/apply_template", {"messages": []})["param"] == "messages"
    assert live.refuse("/apply_template", {"prompt": "a"})["type"] == "invalid_request_error"
    forbidden = {"messages": [{"role": "forbidden", "content": "a"}]}
    assert live.refuse("/apply_template", forbidden)["param"].startswith("messages")
    with live_server(template=None) as bare:
        error = bare.refuse("/apply_template", {"messages": [{"role": "user", "content": "Hi"}]})
        assert error["code"] == "no_chat_template"
    with live_server(max_response_bytes=100) as small:
        messages = [{"role": "user", "content": "x" * 200}]
        assert small.refuse("/apply_template", {"messages": messages})["code"] == "response_too_large"
