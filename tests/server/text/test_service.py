"""What the text service keeps between requests, and what it does on the event loop: both bounded whatever callers send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers.toy_tokenizers import byte_level

from windlass.server.options.settings import ServerSettings
from windlass.server.text.service import MAX_BREAKER_LISTS_KEPT, MAX_BREAKERS_KEPT, TextService
from windlass.server.text.tokenizer import Tokenizer

Found = tuple[frozenset[int], frozenset[tuple[int, ...]]]


@pytest.fixture
def service() -> TextService:
    return TextService(
        Tokenizer(byte_level(), {}, {"default": "{{ messages }}"}), ServerSettings(served_model_name="m")
    )


def answering(service: TextService, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], Any]) -> list[Any]:
    """The arguments of the pool's jobs, which `answer` does in its place."""
    asked: list[Any] = []

    async def run(task: str, *args: Any, **more: Any) -> Any:
        asked.append(args[0])
        return answer(args[0])

    monkeypatch.setattr(service._pool, "run", run)
    return asked


def test_lists_of_breakers_are_kept_as_long_as_there_is_room(
    service: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Found = (frozenset(), frozenset())
    many: Found = (frozenset(range(MAX_BREAKERS_KEPT // 4)), frozenset())
    asked = answering(service, monkeypatch, lambda key: many if key[0].startswith("many") else nothing)

    def ask(*lists: Sequence[str]) -> int:
        """Lists among them that were not kept."""

        async def all_of_them() -> int:
            before = len(asked)
            for breakers in lists:
                await service.breaker_tokens(breakers, param="", caller="")
            return len(asked) - before

        return asyncio.run(all_of_them())

    rare = [[f"{number:05}" * 8] * 32 for number in range(4 * MAX_BREAKER_LISTS_KEPT)]  # which no token holds
    assert ask(*rare) == len(rare)
    assert len(service._breakers) <= MAX_BREAKER_LISTS_KEPT
    assert sum(len(word) for key in service._breakers for word in key) <= MAX_BREAKERS_KEPT
    assert ask(rare[-1], rare[-2]) == 0 and ask(rare[0]) == 1
    assert ask(["many a"], ["many b"], rare[0], ["many c"]) == 3
    assert ask(rare[0], ["many b"], ["many a"]) == 0
    assert ask(["many d"], ["many e"]) == 2 and ask(rare[1]) == 1 and ask(["many a"]) == 0
