"""Thinking over a real server: a budget ends it at its token, whole and streamed, with proposed tokens too."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from e2e_helpers.thinking_model import thinking_model
from helpers.real_server import serve

from windlass.clients import Client

MESSAGES = [{"role": "user", "content": "What does horse mean?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = thinking_model(tmp_path_factory.mktemp("model"))
    with (
        serve("--kv-cache-memory", "64MiB", "--speculative-ngram", "4", model=model) as server,
        Client(server.url) as client,
    ):
        yield client


@pytest.mark.parametrize("budget", [0, 1, 9])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 3, "n": 2}], ids=str)
def test_a_budget_ends_the_thinking(client: Client, budget: int, sampling: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "thinking_budget": budget, **sampling}
    answer = client.chat(MESSAGES, return_token_ids=True, **options)
    (close,) = client.tokenize("</think>", add_special_tokens=False).tokens
    for choice in answer.choices:
        assert choice.token_ids is not None and choice.token_ids.index(close) == budget
        assert bool(choice.message.reasoning_content) == (budget > 0)
        assert choice.message.content and "think" not in choice.message.content
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == (budget + 1) * len(answer.choices)
    with client.chat(MESSAGES, stream=True, **options) as stream:
        final = stream.get_final()
        assert (stream.reasoning, stream.text) == (answer.reasoning, answer.text)
    assert [choice.message for choice in final.choices] == [choice.message for choice in answer.choices]


def test_without_a_budget_it_thinks_on(client: Client) -> None:
    answer = client.chat(MESSAGES, max_tokens=12, ignore_eos=True, temperature=0)
    assert answer.reasoning and not answer.text and answer.choices[0].finish_reason == "length"


def test_a_chat_in_the_terminal_shows_both(client: Client) -> None:
    """The answer on standard output, the thinking beside it; only the answer is sent along."""
    settings = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "thinking_budget": 9}
    first = client.chat(MESSAGES, **settings)
    messages = [*MESSAGES, {"role": "assistant", "content": first.text}, *MESSAGES]
    second = client.chat(messages, **settings)
    lines = ["/params temperature=0 max_tokens=24 ignore_eos=true thinking_budget=9", *[MESSAGES[0]["content"]] * 2]
    command = [sys.executable, "-m", "windlass.server.cli.main", "chat", "--url", client.base_url]
    ran = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout == f"{first.text}\n{second.text}\n"
    assert first.reasoning + "\n\n" in ran.stderr and second.reasoning + "\n\n" in ran.stderr


@dataclasses.dataclass
class Wanted:
    animal: Literal["horse", "fish"]
    legs: Literal[0, 2, 4]


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["horse", "sea"]}}, "required": ["word"]},
    },
}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 5, "n": 2}], ids=str)
def test_the_form_of_an_answer_holds_behind_the_thinking(client: Client, sampling: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "thinking_budget": 7, **sampling}
    answer = client.chat(MESSAGES, answer_type=Wanted, **options)
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Wanted) and choice.message.reasoning_content
        assert choice.finish_reason == "stop"
    with client.chat(MESSAGES, answer_type=Wanted, stream=True, **options) as stream:
        assert stream.until_done().parsed == answer.parsed
        assert stream.reasoning == answer.reasoning


def test_the_form_holds_where_the_model_need_not_think(client: Client) -> None:
    """Whether to think is the model's to say."""
    leaving = {"chat_template_kwargs": {"opened": False}, "max_tokens": 60, "temperature": 0}
    answer = client.chat(MESSAGES, answer_type=Wanted, thinking_budget=7, **leaving)
    assert isinstance(answer.parsed, Wanted)
    assert client.chat(MESSAGES, tools=[TOOL], tool_choice="required", **leaving).tool_calls


def test_a_call_is_forced_behind_the_thinking(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 80, "thinking_budget": 7, "temperature": 0, "parallel_tool_calls": False}
    answer = client.chat(MESSAGES, tools=[TOOL], tool_choice="required", **options)
    (call,) = answer.tool_calls
    assert call.name == "look_up" and call.function.values["word"] in ("horse", "sea")
    assert answer.reasoning and not answer.text and answer.choices[0].finish_reason == "tool_calls"
    with client.chat(MESSAGES, tools=[TOOL], tool_choice="required", stream=True, **options) as stream:
        assert [seen.function for seen in stream.until_done().tool_calls] == [call.function]
