"""Fill-in-the-middle by `/infill` and by the suffix of completions: prompts, truncation, ends of answers and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from api_helpers.any_client import any_client
from helpers.live_server import Live, live_server, server_fixture
from helpers.scripted_engine import ScriptedEngine, model_info
from helpers.toy_tokenizers import taught

from windlass.clients import Client
from windlass.server.serving import prompts

PATH = "/infill"
COMPLETIONS = "/v1/completions"
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
FILES = ("<|file_sep|>", "<|repo_name|>")
GAP = {"input_prefix": "def f(x):\n    ", "input_suffix": "\n    return y"}
shared = server_fixture(backend=taught((*QWEN, *FILES), special=False))


def ids_of(live: Live, *parts: str) -> list[int]:
    """Each part, tokenized separately."""
    return [token for part in parts for token in live.tokenizer.encode(part, add_special_tokens=False)]


def fill(live: Live, **fields: Any) -> dict[str, Any]:
    return live.request(PATH, **{**GAP, "n_predict": 3, **fields})


def asked(live: Live) -> list[int]:
    """The only prompt of the engine, without the special tokens at its start."""
    (request,) = live.engine.requests
    assert request.prompt_token_ids[0] == live.tokenizer.bos_token_id
    return request.prompt_token_ids[1:]


def test_an_answer_in_llama_cpps_form(live: Live) -> None:
    answer = fill(live, return_tokens=True)
    assert asked(live) == ids_of(live, QWEN[0], GAP["input_prefix"], QWEN[1], GAP["input_suffix"], QWEN[2])
    assert answer["content"] == live.tokenizer.decode([65, 66, 67]) and answer["tokens"] == [65, 66, 67]
    assert (answer["stop"], answer["stop_type"], answer["index"]) == (True, "limit", 0)
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (3, len(asked(live)) + 1)
    assert answer["timings"]["predicted_n"] == 3 and not answer["truncated"]
    assert "tokens" in fill(live) and fill(live)["tokens"] == []


def test_prompt_follows_the_prefix_and_passages_come_first(live: Live) -> None:
    extra = [{"filename": "a.py", "text": "x = 1\n"}, {"text": "y", "time": 17}]
    fill(live, prompt="ret", input_extra=extra)
    assert asked(live) == ids_of(
        live, FILES[1], "myproject\n", FILES[0], "a.py\n", "x = 1\n", FILES[0], "tmp\n", "y", FILES[0], "filename\n",
        QWEN[0], GAP["input_prefix"], "ret", QWEN[1], GAP["input_suffix"], QWEN[2],
    )  # fmt: skip


def test_a_model_without_names_of_files_gets_a_rule_between_passages() -> None:
    names = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
    with live_server(backend=taught(names)) as live:
        fill(live, input_extra=[{"filename": "a.py", "text": "x"}])
        rule = "\n\n--- snippet ---\n\n"
        expected = ids_of(live, rule, "x", names[0], GAP["input_prefix"], names[1], GAP["input_suffix"], names[2])
        assert asked(live) == expected


@pytest.mark.parametrize("field", ["input_prefix", "input_suffix", "prompt", "input_extra"])
def test_special_tokens_in_infill_fields_are_plain_text(live: Live, field: str) -> None:
    hostile = "".join((*QWEN, *FILES)) + "<|eos|><|bos|>"
    given: Any = [{"filename": hostile, "text": hostile}] if field == "input_extra" else hostile
    fill(live, **{field: given})
    for name in (*QWEN, *FILES):
        token = live.tokenizer.backend.token_to_id(name)
        own = {FILES[0]: 2, FILES[1]: 1}.get(name, 1) if field == "input_extra" else name in QWEN
        assert asked(live).count(token) == own
    assert live.tokenizer.bos_token_id not in asked(live) and live.tokenizer.eos_token_id not in asked(live)


def test_truncation_keeps_the_text_next_to_the_gap(live: Live) -> None:
    most = live.engine.info.max_model_len
    a, b, c = (live.tokenizer.decode([token]) for token in (276, 287, 266))
    assert ids_of(live, a * 2, b * 2, c * 2) == [276, 276, 287, 287, 266, 266]
    assert ids_of(live, a * 3 + b) == [276, 276, 276, 287]
    prefix, suffix, middle = map(live.tokenizer.backend.token_to_id, QWEN)
    room = most - 10 - 4

    answer = fill(live, input_prefix=a * 1000 + b, input_suffix=c * 1000, n_predict=10)
    expected = [prefix, *[276] * (room - room // 4 - 1), 287, suffix, *[266] * (room // 4), middle]
    assert asked(live) == expected and answer["truncated"]

    live.engine.reset()
    answer = fill(live, input_prefix=b, input_suffix=c * 1000, n_predict=10)
    assert asked(live) == [prefix, 287, suffix, *[266] * (room - 1), middle] and answer["truncated"]

    # Passages get the remaining space, the last ones first, undivided.
    live.engine.reset()
    passages = [{"filename": "f", "text": a * size} for size in (50, 100, 60)]
    answer = fill(live, input_prefix=b * 5, input_suffix=c * 5, input_extra=passages, n_predict=10)
    assert asked(live).count(276) == 160 and answer["truncated"]
    assert asked(live)[-13:] == [prefix, *[287] * 5, suffix, *[266] * 5, middle]
    assert len(asked(live)) + 1 + 10 <= most


def test_a_huge_prefix_costs_little(live: Live) -> None:
    answer = fill(live, input_prefix="fox " * 3_000_000, input_suffix=QWEN[0] * 100_000)
    assert answer["truncated"] and len(asked(live)) < live.engine.info.max_model_len


def test_n_predict_0_only_reads_the_prompt(live: Live) -> None:
    # Request of llama.vim that caches its passages in advance.
    answer = fill(
        live, input_prefix="", input_suffix="", prompt="", n_predict=0, samplers=[], t_max_predict_ms=1,
        input_extra=[{"filename": "a", "text": "x"}], response_fields=[""], cache_prompt=True, id_slot=0,
    )  # fmt: skip
    assert answer == {} and live.engine.requests[0].sampling.max_tokens == 0


def test_fields_of_editors_are_accepted(live: Live) -> None:
    # llama.vim's fields, and llama.vscode's.
    fields = [
        "content",
        "timings/prompt_n",
        "timings/predicted_per_second",
        "truncated",
        "tokens_cached",
        "nothing/at/all",
    ]
    answer = fill(
        live, id_slot=0, input_extra=[{"text": "x", "time": 1.5, "filename": "a.py"}], prompt="    r", stop=[],
        n_indent=4, top_k=40, top_p=0.9, samplers=["top_k", "top_p", "infill"], stream=False, cache_prompt=True,
        t_max_prompt_ms=500, t_max_predict_ms=1000, response_fields=fields, lora=[],
    )  # fmt: skip
    assert set(answer) == set(fields[:-1])
    sampling = live.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 40, 0.9)


def test_samplers_that_are_not_listed_have_no_effect(live: Live) -> None:
    given = {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.2, "repeat_penalty": 1.5, "presence_penalty": 1.0}
    fill(live, **given)
    fill(live, **given, samplers="kt")
    fill(live, **given, samplers=[])
    kept, some, none = (request.sampling for request in live.engine.requests)
    assert (kept.temperature, kept.top_k, kept.min_p, kept.repetition_penalty) == (0.5, 5, 0.2, 1.5)
    assert (some.temperature, some.top_k, some.top_p, some.min_p, some.repetition_penalty) == (0.5, 5, 1.0, 0.0, 1.0)
    assert (none.temperature, none.top_k, none.presence_penalty) == (1.0, 0, 0.0)


def test_the_answer_ends_before_a_line_that_is_indented_too_little(live: Live) -> None:
    live.engine.reply = ids_of(live, "a\n", "  b\n", "c\n", "d")
    answer = fill(live, n_predict=50, n_indent=2)
    assert answer["content"] == "a\n  b\n" and answer["stop_type"] == "limit" and answer["has_new_line"]
    whole = fill(live, n_predict=len(live.engine.reply))
    assert whole["content"] == "a\n  b\nc\nd"
    events = live.stream(PATH, {**GAP, "n_predict": 50, "n_indent": 2})
    assert "".join(event["content"] for event in events) == "a\n  b\n" and events[-1]["stop"]


def test_the_answer_ends_at_a_stop_string_with_the_blanks_before_it(live: Live) -> None:
    live.engine.reply = ids_of(live, "a\n", "  STOP")
    answer = fill(live, n_predict=50, n_indent=1, stop=["STOP"])
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("a\n  ", "word", "STOP")


def test_the_answer_ends_after_a_while_once_it_has_a_line(live: Live) -> None:
    live.engine.reply, live.engine.delay = ids_of(live, "a", "b\n", "c"), 0.02
    answer = fill(live, n_predict=200, t_max_predict_ms=100)
    assert answer["stop_type"] == "limit" and 5 <= answer["tokens_predicted"] < 100


def test_last_event_of_a_stream_has_the_result(live: Live) -> None:
    live.engine.eos_after = 2
    events = live.stream(PATH, {**GAP, "n_predict": 9})
    *pieces, last = events
    assert [event["stop"] for event in pieces] == [False] * len(pieces) and "".join(
        event["content"] for event in pieces
    ) == live.tokenizer.decode([65, 66])
    assert (last["content"], last["stop"], last["stop_type"], last["model"]) == ("", True, "eos", "toy")


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_clients_fill_gaps(live: Live, kind: str) -> None:
    async with any_client(kind, live.url) as client:
        whole = await client.infill(
            "a", "b", n_predict=3, return_tokens=True, rope_scaling={"rope_type": "linear", "factor": 2.0}
        )
        assert whole.content == live.tokenizer.decode([65, 66, 67]) and whole.tokens == (65, 66, 67)
        assert whole.stop_type == "limit" and whole.timings.predicted_n == 3 and whole.request_id
        assert live.engine.requests[0].rope_scaling.rope_type == "linear"


def test_a_clients_stream_becomes_the_whole(live: Live) -> None:
    with Client(live.url) as client:
        whole = client.infill("a", "b", n_predict=3)
        with client.infill("a", "b", n_predict=3, stream=True) as stream:
            pieces = list(stream)
        final = stream.get_final()
        assert "".join(piece.content for piece in pieces) == final.content == whole.content == stream.text
        assert (final.stop_type, final.tokens_predicted, stream.usage.completion_tokens) == ("limit", 3, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_infill_by_a_model_without_the_tokens_is_refused(stream: bool) -> None:
    with live_server() as live:
        assert live.refusal(PATH, {**GAP, "stream": stream}) == ("input_prefix", "no_fill_in_the_middle")


def test_gap_that_leaves_no_space_is_refused() -> None:
    engine = ScriptedEngine(info=model_info(max_model_len=4))
    with live_server(engine, backend=taught(QWEN)) as live:
        assert live.refuse(PATH, GAP)["code"] == "context_length_exceeded"


# ---- the suffix of completions ----------------------------------------------------------------------------------------
DIALECTS = [
    QWEN,
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
]


@pytest.mark.quick_cases(2)
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
    after = ids_of(live, "the dog")
    live.http.post(COMPLETIONS, json={"prompt": ["The ", "fox"], "suffix": "the dog", "max_tokens": 2})
    live.http.post(
        COMPLETIONS, json={"prompt": [300, 301], "suffix": "the dog", "max_tokens": 2, "add_special_tokens": False}
    )
    bos = live.tokenizer.bos_token_id
    assert [request.prompt_token_ids for request in live.engine.requests] == [
        [bos, prefix, *ids_of(live, "The "), suffix, *after, middle],
        [bos, prefix, *ids_of(live, "fox"), suffix, *after, middle],
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


def test_gap_at_the_start_of_a_file(live: Live) -> None:
    prefix, suffix, middle = map(live.tokenizer.backend.token_to_id, QWEN)
    live.complete("", suffix="fox")
    ids = [live.tokenizer.bos_token_id, prefix, suffix, *ids_of(live, "fox"), middle]
    assert live.engine.requests[0].prompt_token_ids == ids


def test_repeated_suffixes_have_a_total_limit(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_SUFFIX_TOKENS", 20)
    error = live.refuse(COMPLETIONS, {"prompt": ["a"] * 3, "suffix": live.tokenizer.decode([300] * 7)})
    assert error["param"] == "suffix" and "at most 20" in error["message"] and not live.engine.requests


def test_empty_suffix_has_no_effect(live: Live) -> None:
    live.complete("The king", suffix="")
    assert live.engine.requests[0].prompt_token_ids == live.tokenizer.encode("The king")


def test_echo_repeats_the_text_before_the_gap(live: Live) -> None:
    answer = live.http.post(
        COMPLETIONS, json={"prompt": "The king", "suffix": "said", "echo": True, "max_tokens": 0}
    ).json()
    assert answer["choices"][0]["text"] == "The king"


def test_prefix_and_suffix_too_long_together_are_refused(live: Live) -> None:
    most = live.engine.info.max_model_len
    half = [300] * (most // 2 + 1)
    error = live.refuse(COMPLETIONS, {"prompt": half, "suffix": live.tokenizer.decode(half)})
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_model_without_fill_in_tokens(stream: bool) -> None:
    with live_server() as live:
        error = live.refuse(COMPLETIONS, {"prompt": "a", "suffix": "b", "stream": stream})
        assert error["param"] == "suffix" and error["code"] == "no_fill_in_the_middle"
        assert live.http.get("/v1/models").json()["data"][0]["tasks"][:2] == ["generate", "embed"]
