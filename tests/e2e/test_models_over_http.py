"""Models with special abilities over real servers: infilling, reasoning, recurrent states, and no rotation."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import tokenizers
from helpers.device import DEVICE
from helpers.marks import slow_but
from helpers.real_server import RealServer, serve
from helpers.refused import inside, program, reason
from helpers.tiny_models import make_model
from helpers.tiny_unrotated import logits_of, make_unrotated
from tokenizers import models, pre_tokenizers

from windlass.clients import BadRequestError, Client

DEMO = Path(__file__).parents[2] / "models" / "demo"
COMPLETIONS = "/v1/completions"

# ---- infilling -----------------------------------------------------------------------------------------------------------
MARKERS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>")
# On a GPU, results after a cached prefix are otherwise not bitwise equal.
EXACT = () if DEVICE == "cpu" else ("--deterministic",)
BEFORE, AFTER = "Once upon a time there was a little ", " who lived in a house near the sea."
GAP = f"{MARKERS[0]}{BEFORE}{MARKERS[1]}{AFTER}{MARKERS[2]}"


@pytest.fixture(scope="module")
def infilling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, tokenizers.Tokenizer]]:
    """The bundled model, with its rarest tokens renamed to markers."""
    folder = tmp_path_factory.mktemp("models") / "taught"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "*.md", "*.png"))
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    vocab, added = data["model"]["vocab"], data["added_tokens"]
    rarest = sorted(vocab.items(), key=lambda item: -item[1])[: len(MARKERS)]
    data["model"]["merges"] = data["model"]["merges"][: -len(MARKERS)]
    for name, (token, index) in zip(MARKERS, rarest, strict=True):
        del vocab[token]
        vocab[name] = index
        added.append({**added[0], "id": index, "content": name})
    added.sort(key=lambda token: token["id"])
    file.write_text(json.dumps(data), encoding="utf-8")
    with serve("--max-num-batched-tokens", "64", *EXACT, model=folder) as server:
        yield server, tokenizers.Tokenizer.from_file(str(file))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0.8, "seed": 5, "n": 3},
        {"temperature": 0.8, "seed": 5, "best_of": 3},
        {"temperature": 0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "return_token_ids": True},
        {"temperature": 0, "stop": ["."], "prompt_logprobs": 1},
        {"temperature": 0, "structured_outputs": {"regex": "[a-z ]{4,12}"}},
    ],
)
def test_suffix_gives_the_completion_of_its_token_ids(
    infilling: tuple[RealServer, tokenizers.Tokenizer], fields: dict[str, Any]
) -> None:
    server, tokenizer = infilling
    ids = tokenizer.encode(GAP).ids
    by_text = server.complete(BEFORE, suffix=AFTER, max_tokens=12, **fields)
    by_ids = server.complete(ids, max_tokens=12, **fields)
    assert by_text["choices"] == by_ids["choices"] and by_text["usage"]["prompt_tokens"] == len(ids)


def test_echo_repeats_the_prefix_and_scores_the_entire_prompt(
    infilling: tuple[RealServer, tokenizers.Tokenizer],
) -> None:
    server, tokenizer = infilling
    ids = tokenizer.encode(GAP).ids
    body = {"max_tokens": 4, "echo": True, "logprobs": 0}
    choice = server.complete(BEFORE, suffix=AFTER, **body)["choices"][0]
    scored = server.complete(ids, **body)["choices"][0]
    assert choice["text"].startswith(BEFORE) and len(choice["logprobs"]["tokens"]) == len(ids) + 4
    assert choice["logprobs"]["token_logprobs"] == scored["logprobs"]["token_logprobs"]


def test_infill_equals_a_suffix_and_its_passages_stay_cached(
    infilling: tuple[RealServer, tokenizers.Tokenizer],
) -> None:
    server, tokenizer = infilling
    fields = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 12, "temperature": 0}
    by_suffix = server.complete(BEFORE, suffix=AFTER, max_tokens=12)
    assert server.ask("/infill", **fields)["content"] == by_suffix["choices"][0]["text"]
    extra = [{"filename": "a.txt", "text": "The king said that the sea was wide. " * 8}]
    first = server.ask("/infill", input_extra=extra, **fields)
    again = server.ask("/infill", input_extra=extra, prompt="girl", **fields)
    passages = tokenizer.encode(f"{MARKERS[4]}myproject\n{MARKERS[3]}a.txt\n{extra[0]['text']}").ids
    assert again["tokens_cached"] >= (len(passages) - 16) // 16 * 16 > first["tokens_cached"]
    assert again["timings"]["prompt_n"] == again["tokens_evaluated"] - again["tokens_cached"]


# ---- reasoning -----------------------------------------------------------------------------------------------------------
MESSAGES = [{"role": "user", "content": "What does horse mean?"}]
THINKING_MARKERS = {"<|pad|>": "</think>", "<|system|>": "<think>"}
# The prompt opens the reasoning, unless a template argument leaves that to the model.
OPENING = "{%- if add_generation_prompt and opened | default(true) %}{{- '<think>\\n' }}{%- endif %}"
GREEDY = {"temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["horse", "sea"]}}, "required": ["word"]},
    },
}


@dataclasses.dataclass
class Wanted:
    animal: Literal["horse", "fish"]
    legs: Literal[0, 2, 4]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The bundled model, with two of its special tokens renamed to markers of reasoning."""
    model = tmp_path_factory.mktemp("thinker")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DEMO / name, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (DEMO / name).read_text(encoding="utf-8")
        for old, new in THINKING_MARKERS.items():
            text = text.replace(old, new)
        if name == "tokenizer_config.json":
            config = json.loads(text)
            text = json.dumps({**config, "chat_template": config["chat_template"] + OPENING})
        (model / name).write_text(text, encoding="utf-8")
    with (
        serve("--kv-cache-memory", "64MiB", "--speculative-ngram", "4", model=model) as server,
        Client(server.url) as client,
    ):
        yield client


@pytest.mark.parametrize("budget", [0, 1, 9])
@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 1.0, "seed": 3, "n": 2}], ids=str)
def test_thinking_budget_ends_the_reasoning(thinking: Client, budget: int, sampling: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "thinking_budget": budget, **sampling}
    answer = thinking.chat(MESSAGES, return_token_ids=True, **options)
    (close,) = thinking.tokenize("</think>", add_special_tokens=False).tokens
    for choice in answer.choices:
        assert choice.token_ids is not None and choice.token_ids.index(close) == budget
        assert bool(choice.message.reasoning_content) == (budget > 0)
        assert choice.message.content and "think" not in choice.message.content
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == (budget + 1) * len(answer.choices)
    with thinking.chat(MESSAGES, stream=True, **options) as stream:
        final = stream.get_final()
        assert (stream.reasoning, stream.text) == (answer.reasoning, answer.text)
    assert [choice.message for choice in final.choices] == [choice.message for choice in answer.choices]


def test_reasoning_without_a_budget_continues(thinking: Client) -> None:
    answer = thinking.chat(MESSAGES, max_tokens=12, ignore_eos=True, temperature=0)
    assert answer.reasoning and not answer.text and answer.choices[0].finish_reason == "length"


def test_chat_in_the_terminal_shows_answer_and_reasoning(thinking: Client) -> None:
    """The answer is written to standard output, the reasoning to standard error. The history contains the answer only."""
    settings = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "thinking_budget": 9}
    first = thinking.chat(MESSAGES, **settings)
    messages = [*MESSAGES, {"role": "assistant", "content": first.text}, *MESSAGES]
    second = thinking.chat(messages, **settings)
    lines = ["/params temperature=0 max_tokens=24 ignore_eos=true thinking_budget=9", *[MESSAGES[0]["content"]] * 2]
    command = [sys.executable, "-m", "windlass.server.cli.main", "chat", "--url", thinking.base_url]
    ran = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout == f"{first.text}\n{second.text}\n"
    assert first.reasoning + "\n\n" in ran.stderr and second.reasoning + "\n\n" in ran.stderr


@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 1.0, "seed": 5, "n": 2}], ids=str)
def test_answer_after_reasoning_has_the_requested_type(thinking: Client, sampling: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "thinking_budget": 7, **sampling}
    answer = thinking.chat(MESSAGES, answer_type=Wanted, **options)
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Wanted) and choice.message.reasoning_content
        assert choice.finish_reason == "stop"
    with thinking.chat(MESSAGES, answer_type=Wanted, stream=True, **options) as stream:
        assert stream.until_done().parsed == answer.parsed
        assert stream.reasoning == answer.reasoning


def test_answer_without_opened_reasoning_has_the_requested_type(thinking: Client) -> None:
    leaving = {"chat_template_kwargs": {"opened": False}, "max_tokens": 60, "temperature": 0}
    answer = thinking.chat(MESSAGES, answer_type=Wanted, thinking_budget=7, **leaving)
    assert isinstance(answer.parsed, Wanted)
    assert thinking.chat(MESSAGES, tools=[TOOL], tool_choice="required", **leaving).tool_calls


def test_tool_call_is_forced_after_reasoning(thinking: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 80, "thinking_budget": 7, "temperature": 0, "parallel_tool_calls": False}
    answer = thinking.chat(MESSAGES, tools=[TOOL], tool_choice="required", **options)
    (call,) = answer.tool_calls
    assert call.name == "look_up" and call.function.values["word"] in ("horse", "sea")
    assert answer.reasoning and not answer.text and answer.choices[0].finish_reason == "tool_calls"
    with thinking.chat(MESSAGES, tools=[TOOL], tool_choice="required", stream=True, **options) as stream:
        assert [seen.function for seen in stream.until_done().tool_calls] == [call.function]


# ---- recurrent states ----------------------------------------------------------------------------------------------------
QUESTION = "Tell me a long story about a horse and its friends, about the sea, the moon and the stars above them. " * 2


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, Client]]:
    vocabulary = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    model = make_model("qwen3_5", tmp_path_factory.mktemp("states"), vocab_size=vocabulary)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, model)
    with (
        serve("--kv-cache-memory", "16MiB", "--max-num-seqs", "6", model=model) as server,
        Client(server.url) as client,
    ):
        yield server, client


def test_recurrent_model_caches_turns_and_shifts_its_context(recurrent: tuple[RealServer, Client]) -> None:
    _, client = recurrent
    greedy = {"temperature": 0, "ignore_eos": True}
    message = {"role": "user", "content": QUESTION}
    first = client.chat([message], max_tokens=40, **greedy)
    assert first.usage is not None
    again = client.chat([message], max_tokens=40, **greedy)
    assert again.text == first.text and again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == (first.usage.prompt_tokens - 1) // 16 * 16
    samples = client.chat([message], max_tokens=12, n=3, temperature=1.0, seed=5, ignore_eos=True)
    assert len({choice.message.content for choice in samples.choices}) == 3
    with client.chat([message], max_tokens=400, context_overflow="shift", stream=True, **greedy) as stream:
        final = stream.get_final()
    assert final.usage is not None and final.usage.completion_tokens == 400
    assert final.text.startswith(first.text)


def test_recurrent_model_reports_its_states_and_refuses_reuse(recurrent: tuple[RealServer, Client]) -> None:
    server, client = recurrent
    groups = server.get("/v1/cache")["groups"]
    assert [(group["states"], group["window"]) for group in groups] == [(False, None), (True, None)]
    assert sum(groups[1]["held"]) == 0 < sum(groups[1]["idle"])
    assert "carry a state" in client.models()[0].context["reuse_refusal"]
    with pytest.raises(BadRequestError, match="cache_reuse: layers of this model carry a state"):
        client.chat([{"role": "user", "content": QUESTION}], max_tokens=4, cache_reuse=32)


# ---- no rotation ---------------------------------------------------------------------------------------------------------
def make_lettered(directory: Path, family: str) -> Path:
    """Save a model without rotation, whose first tokens are letters."""
    made = tokenizers.Tokenizer(models.WordLevel({chr(ord("a") + i): i for i in range(26)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    make_unrotated(family, directory)
    made.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("family", slow_but(["gpt2", "bloom", "falcon_rw"], "gpt2"))
def test_model_without_rotation_answers_and_refuses_scalings(family: str, tmp_path: Path) -> None:
    model = make_lettered(tmp_path, family)
    body = {"prompt": "a b c d e f g h", "max_tokens": 4, "temperature": 0}
    with serve("--max-model-len", "256", model=model) as server:
        ids = list(range(8))
        for token in server.ask(COMPLETIONS, **body, return_token_ids=True)["choices"][0]["token_ids"]:
            assert int(logits_of(model, ids)[-1].argmax()) == token
            ids.append(token)
        for scaling in ({"rope_type": "yarn", "factor": 2}, "auto"):
            assert server.refuse(COMPLETIONS, **body, rope_scaling=scaling)["param"].startswith("rope_scaling")
        for field, value in (("context_overflow", "shift"), ("cache_reuse", 32)):
            if family == "gpt2":
                error = server.refuse(COMPLETIONS, **body, **{field: value})
                assert "learned" in error["message"] and error["param"] == field
            else:
                server.ask(COMPLETIONS, **body, **{field: value})
        card = server.get("/v1/models")["data"][0]
        assert card["rotary"] is None and card["rotary_auto"] is None and "generate" in card["tasks"]
        assert server.get("/v1/rotary")["error"]["code"] == "no_rotation"
        assert "rotary    none: " in server.log.read_text()


@pytest.mark.parametrize(
    ("family", "option", "message"),
    [
        ("gpt2", ("--context-overflow", "shift"), "are learned"),
        ("gpt2", ("--max-model-len", "300"), "a table of 256"),
        ("gpt2", ("--rope-scaling", '{"rope_type": "yarn", "factor": 2}'), "does not rotate"),
        ("bloom", ("--rope-scaling", "auto"), "no rotation that could be scaled"),
        ("bloom", ("--attention-window", "64,16"), "lose by the distance"),
    ],
)
def test_refused_starts_without_rotation(family: str, option: tuple[str, ...], message: str, tmp_path: Path) -> None:
    start = program if option[-1] == "auto" else inside
    assert message in reason(start("serve", make_lettered(tmp_path, family), "--port", "0", *option))
