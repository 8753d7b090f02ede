"""The oldest turns of a chat, left out until the chat and its answer fit the context.

Decides which messages may go and how many turns do; knows nothing of templates, tokenizers or HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from windlass.server.errors import ApiError, without_older_turns
from windlass.server.protocol.chat import ChatMessage

T = TypeVar("T")

_KEPT_ROLES = frozenset({"system", "developer"})
_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Fitted(Generic[T]):
    """A chat that fits. made: what came of its messages; dropped: how many turns it lacks."""

    made: T
    dropped: int


def old_turns(messages: Sequence[ChatMessage]) -> list[list[int]]:
    """The turns that may be dropped, oldest first, each as the indices of its messages.

    A turn is a message of the user and all behind it up to the next: calls and their results go together. What stands before
    the first of them is a turn, too. System messages belong to none, and the last turn of the user is never among them.
    """
    turns: list[list[int]] = []
    current: list[int] = []
    spoken = False  # by the user
    for index, message in enumerate(messages):
        if message.role in _KEPT_ROLES:
            continue
        if message.role == "user":
            if current:
                turns.append(current)
            current, spoken = [], True
        current.append(index)
    return turns if spoken else []


def without(messages: Sequence[ChatMessage], turns: Sequence[Sequence[int]]) -> list[ChatMessage]:
    """The messages that are in none of `turns`, in their order."""
    gone = {index for turn in turns for index in turn}
    return [message for index, message in enumerate(messages) if index not in gone]


async def fit_turns(
    messages: Sequence[ChatMessage],
    make: Callable[[list[ChatMessage]], Awaitable[tuple[T, int]]],
    *,
    context: int,
    room: int,
) -> Fitted[T]:
    """The chat with as few turns dropped as leave `room` tokens of `context` to the answer.

    make: what comes of messages, and its tokens; it may raise ApiError context_length_exceeded. It is called once where nothing
    has to go, else at most 2 + log2(turns) times. Where even the shortest chat leaves less than `room`, it sets what is
    left to the answer. Raises what `make` raises of the shortest chat.
    """
    turns = old_turns(messages)

    async def attempt(dropped: int) -> tuple[T, int] | None:
        try:
            return await make(without(messages, turns[:dropped]))
        except ApiError as error:
            if error.code != _TOO_LONG:
                raise
            if dropped == len(turns):
                raise (without_older_turns(error) if turns else error) from None
            return None

    found = await attempt(0)
    if found is not None and (not turns or found[1] + room <= context):
        return Fitted(found[0], 0)
    fewest, most = 0, len(turns)  # too few dropped, enough dropped
    best = await attempt(most)
    assert best is not None
    room = min(room, context - best[1])
    while most - fewest > 1:
        middle = (fewest + most) // 2
        found = await attempt(middle)
        if found is not None and found[1] + room <= context:
            best, most = found, middle
        else:
            fewest = middle
    return Fitted(best[0], most)
