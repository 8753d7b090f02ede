"""Dropped turns against a linear search, for chats with tool calls."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from windlass.server.errors import ApiError, bad_request
from windlass.server.schemas.chat import ChatMessage
from windlass.server.serving.prompts import droppable_turns, fit_turns, without_turns

CONTEXT = 400


def a_chat(draw: random.Random) -> list[ChatMessage]:
    """Turns with answers, calls and results, and system messages between them."""
    messages: list[dict[str, object]] = []

    def say(role: str, **more: object) -> None:
        messages.append({"role": role, "content": "x" * draw.randrange(1, 60), **more})

    if draw.random() < 0.7:
        say(draw.choice(["system", "developer"]))
    if draw.random() < 0.3:
        say("assistant")
    for turn in range(draw.randrange(0, 9)):
        say("user")
        for step in range(draw.randrange(0, 3)):
            ids = [f"call-{turn}-{step}-{number}" for number in range(draw.randrange(1, 4))]
            calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids]
            say("assistant", tool_calls=calls)
            for each in draw.sample(ids, len(ids)):
                say("tool", tool_call_id=each)
        if draw.random() < 0.8:
            say("assistant")
        if draw.random() < 0.2:
            say("system")
    if not messages:
        say("user")
    return [ChatMessage.model_validate(message) for message in messages]


def tokens_of(messages: list[ChatMessage]) -> int:
    return sum(len(message.content) + 4 for message in messages) + 3


def fit(messages: list[ChatMessage], reserved_tokens: int) -> tuple[list[ChatMessage], int, int]:
    """The messages that fit, the number of turns dropped, and the number of chats encoded."""
    encoded = 0

    async def encode(kept: list[ChatMessage]) -> tuple[list[ChatMessage], int]:
        nonlocal encoded
        encoded += 1
        if tokens_of(kept) > CONTEXT:
            raise bad_request("too long", "messages", "context_length_exceeded")
        return kept, tokens_of(kept)

    kept, dropped = asyncio.run(fit_turns(messages, encode, context=CONTEXT, reserved_tokens=reserved_tokens))
    return kept, dropped, encoded


@pytest.mark.parametrize("seed", range(300))
def test_the_fewest_turns_are_dropped_and_none_in_part(seed: int) -> None:
    draw = random.Random(seed)
    messages, reserved_tokens = a_chat(draw), draw.choice([0, 1, 16, 100, 390, 10_000])
    turns = droppable_turns(messages)
    shortest = tokens_of(without_turns(messages, turns))
    if shortest > CONTEXT:
        with pytest.raises(ApiError, match="too long"):
            fit(messages, reserved_tokens)
        return
    kept, dropped, encoded = fit(messages, reserved_tokens)
    left = min(reserved_tokens, CONTEXT - shortest)
    expected = next(n for n in range(len(turns) + 1) if tokens_of(without_turns(messages, turns[:n])) + left <= CONTEXT)
    assert dropped == expected and kept == without_turns(messages, turns[:expected])
    assert encoded <= 2 + math.log2(max(2, len(turns))) + 1
    # Messages that must never be dropped, found without the code's own definition of turns.
    numbers = [next(i for i, each in enumerate(messages) if each is message) for message in kept]
    assert numbers == sorted(set(numbers))
    made = {call.id for message in kept for call in message.tool_calls or ()}
    assert made == {message.tool_call_id for message in kept if message.role == "tool"}
    gone = set(range(len(messages))) - set(numbers)
    assert not any(messages[i].role in ("system", "developer") for i in gone)
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    if users:
        assert all(i < users[-1] for i in gone)
        if gone:
            first_left = next(i for i in users if i not in gone)
            assert gone == {i for i in range(first_left) if messages[i].role not in ("system", "developer")}
    else:
        assert not gone


def test_other_errors_are_not_a_reason_to_drop_turns() -> None:
    async def encode(kept: list[ChatMessage]) -> tuple[None, int]:
        raise bad_request("the template refuses", "messages", "template_error")

    messages = [ChatMessage(role="user", content="a") for _ in range(5)]
    with pytest.raises(ApiError, match="the template refuses"):
        asyncio.run(fit_turns(messages, encode, context=10, reserved_tokens=1))
