"""Bounds on the caches of the text service and on its work on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from helpers.toy_tokenizers import byte_level

from windlass.server.config.settings import ServerSettings
from windlass.server.schemas.chat import ChatMessage
from windlass.server.text.chat_messages import FittedMessages
from windlass.server.text.service import MAX_CACHED_BREAKER_LISTS, MAX_CACHED_BREAKER_SIZE, Prompt, TextService
from windlass.server.text.tokenizer import Tokenizer
from windlass.server.text.tokenizer_files import TemplateCapabilities
from windlass.server.text.workers.frames import Limits, pack_ids

Found = tuple[frozenset[int], frozenset[tuple[int, ...]]]


@pytest.fixture
def service() -> TextService:
    return TextService(
        Tokenizer(byte_level(), {}, {"default": "{{ messages }}"}), ServerSettings(served_model_name="m")
    )


def record_tasks(
    service: TextService, monkeypatch: pytest.MonkeyPatch, answer: Callable[[dict[str, Any]], Any]
) -> list[dict[str, Any]]:
    """The arguments of the pool's jobs, which `answer` does in its place."""
    asked: list[dict[str, Any]] = []

    async def run(task: partial[Any], *limits: Limits, **more: Any) -> Any:
        asked.append(task.keywords)
        return answer(task.keywords)

    monkeypatch.setattr(service._pool, "run", run)
    monkeypatch.setattr(service._pool, "run_blocking", lambda task, *limits: TemplateCapabilities())
    return asked


def test_the_cache_of_breaker_lists_is_bounded(service: TextService, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Found = (frozenset(), frozenset())
    many: Found = (frozenset(range(MAX_CACHED_BREAKER_SIZE // 4)), frozenset())
    asked = record_tasks(
        service, monkeypatch, lambda given: many if given["breakers"][0].startswith("many") else nothing
    )

    def ask(*lists: Sequence[str]) -> int:
        """Number of lists that were not cached."""

        async def all_of_them() -> int:
            before = len(asked)
            for breakers in lists:
                await service.dry_breaker_tokens(breakers, param="", caller="")
            return len(asked) - before

        return asyncio.run(all_of_them())

    rare = [[f"{number:05}" * 8] * 32 for number in range(4 * MAX_CACHED_BREAKER_LISTS)]  # which no token holds
    assert ask(*rare) == len(rare)
    assert len(service._breakers) <= MAX_CACHED_BREAKER_LISTS
    assert sum(len(word) for key in service._breakers for word in key) <= MAX_CACHED_BREAKER_SIZE
    assert ask(rare[-1], rare[-2]) == 0 and ask(rare[0]) == 1
    assert ask(["many a"], ["many b"], rare[0], ["many c"]) == 3
    assert ask(rare[0], ["many b"], ["many a"]) == 0
    assert ask(["many d"], ["many e"]) == 2 and ask(rare[1]) == 1 and ask(["many a"]) == 0


USER = {"role": "user", "content": "hi"}


def history(*arguments: Any, older: bool = False) -> list[ChatMessage]:
    """A chat with calls of these arguments, answered."""
    messages: list[dict[str, Any]] = [USER]
    for number, given in enumerate(arguments):
        function = {"name": "look", "arguments": given}
        if older:
            messages.append({"role": "assistant", "function_call": function})
            continue
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": "sunny"})
    return [ChatMessage.model_validate(message) for message in messages]


def numbers(count: int) -> str:
    return '{"a":[' + ",".join("0" * count) + "]}"


@pytest.mark.parametrize(
    ("messages", "variables", "on_loop"),
    [
        (history(*['{"city": "Rome"}'] * 20), {"a": [1, {"b": 2}]}, True),
        (history(*[{"city": "Rome"}] * 20, older=True), None, True),
        (history(*[numbers(90_000)] * 3), None, False),
        (history(*[numbers(90_000)] * 3, older=True), None, False),
        (history(*[numbers(1000)] * 20), None, False),
        (history({"a": [0] * 90_000}), None, False),
        (history({"a": [[[0] * 500] * 50]}), None, False),
        (history({"a": "x" * 500_000}), None, False),
        (history("{}"), {"a": {"b": [0] * 90_000}}, False),
        (history("{}")[:2] * 40, None, False),
        ([ChatMessage(role="user", content="x" * 900_000)], None, False),
        ([ChatMessage(role="assistant", content="", reasoning_content="x" * 900_000)], None, False),
    ],
)
def test_large_chats_are_prepared_on_a_thread(
    service: TextService,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[ChatMessage],
    variables: dict[str, Any] | None,
    on_loop: bool,
) -> None:
    threads: list[str] = []

    def prepare(*args: Any) -> FittedMessages:
        threads.append(threading.current_thread().name)
        return FittedMessages([])

    monkeypatch.setattr("windlass.server.text.service.prepare_history", prepare)
    record_tasks(service, monkeypatch, lambda given: ("text", pack_ids([1, 2])))
    options: dict[str, Any] = {"add_generation_prompt": None, "continue_final_message": None, "caller": ""}
    options |= {"add_special_tokens": False, "max_model_len": None}
    assert asyncio.run(service.encode_chat(messages, variables=variables, **options)) == Prompt([1, 2], "text")
    assert [name == threading.current_thread().name for name in threads] == [on_loop]
