"""The `prompt` field of completions: its four shapes, counted and checked before anything is tokenized."""

from __future__ import annotations

from typing import Any

from windlass.server.errors import bad_request, context_length_exceeded


def split_prompts(value: Any, *, max_prompts: int) -> list[str] | list[list[int]]:
    """A list of texts or a list of token-id lists; raises ApiError for mixed shapes, empty and too long lists."""
    if isinstance(value, str):
        return [value]
    kind = type(value[0])
    if kind is int:
        return [value]
    if len(value) > max_prompts:
        raise bad_request(
            f"prompt holds {len(value)} prompts, at most {max_prompts} are allowed in a request", "prompt"
        )
    for index, item in enumerate(value):
        if type(item) is not kind:
            raise bad_request(f"prompt mixes kinds: item {index} is not a {_NAMES[kind]}", "prompt")
        if kind is list and not item:
            raise bad_request(f"prompt[{index}] is empty: give at least one token", "prompt", "empty_prompt")
    return value  # type: ignore[no-any-return]


_IDS_AT_ONCE = 100_000  # checked in one go: each go holds the interpreter lock

_NAMES: dict[Any, str] = {str: "string", list: "list of token ids"}


def check_token_prompts(
    prompts: list[list[int]],
    vocab_size: int,
    longest: int,
    *,
    truncate: int | None,
    keep_first: bool = False,
    param: str = "prompt",
    numbered: bool = False,
) -> list[list[int]]:
    """The prompts, cut to their last `truncate` ids, or to the first. longest: tokens that one may have.

    param: the field that they came from. numbered: errors name a prompt's place in it, too.

    Raises ApiError for one that is too long or holds no valid ids. Lengths come first, as they cost nothing:
    32 MiB of digits are refused without being looked at.
    """
    if truncate is None:
        for index, ids in enumerate(prompts):
            if len(ids) > longest:
                raise context_length_exceeded(longest, len(ids), param=f"{param}[{index}]" if numbered else param)
    checked = []
    for index, ids in enumerate(prompts):
        check_token_ids(ids, vocab_size, f"{param}[{index}]" if numbered else param)
        checked.append(ids if truncate is None else ids[:truncate] if keep_first else ids[-truncate:])
    return checked


def check_token_ids(ids: list[Any], vocab_size: int, param: str) -> None:
    """Raise ApiError unless all are integers inside the vocabulary. Slow for millions: call it beside the event loop."""
    for start in range(0, len(ids), _IDS_AT_ONCE):
        some = ids[start : start + _IDS_AT_ONCE]
        if set(map(type, some)) != {int}:
            raise bad_request(f"{param}: token ids must be integers", param)
        if min(some) < 0 or max(some) >= vocab_size:
            wrong = min(some) if min(some) < 0 else max(some)
            shown = str(wrong) if abs(wrong) < 2**63 else "of more than 64 bits"
            raise bad_request(
                f"{param}: token id {shown} is outside the vocabulary, ids run from 0 to {vocab_size - 1}", param
            )
