"""Log-probabilities in the three layouts of the API: completions, chats and `prompt_logprobs`.

Knows tokens and their texts; knows nothing of where numbers come from or how answers are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.text.offsets import TextOffsets

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot carry


def token_name(token_id: int) -> str:
    """How a token is called where texts, of which several tokens may have the same, will not do."""
    return f"token_id:{token_id}"


def finite(logprob: float) -> float:
    """The log-probability, or LOWEST for one that JSON could not carry (minus infinity, not a number)."""
    return logprob if logprob > LOWEST else LOWEST


class CompletionLogprobLists:
    """Builds the parallel lists of a completions choice, over as many chunks as it takes.

    top: alternatives per token, as the caller asked for. Each of `top_logprobs` also holds the token that stands
    there, so it may have top + 1 entries; of two alternatives with one text the likelier counts.
    start: characters that stand before the first token. names: call tokens by their ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool, start: int = 0, names: bool = False
    ) -> None:
        self._text = token_name if names else tokenizer.token_text
        self._top = top
        self._offsets = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens, start=start)

    @property
    def position(self) -> int:
        """Where the next token will begin, in characters."""
        return self._offsets.position

    def layout(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """`token_ids` and `entries` are parallel; an entry is None for a token that nothing stands before."""
        text = self._text
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            offsets.append(self._offsets.advance(token_id))
            tokens.append(text(token_id))
            if entry is None:
                logprobs.append(None)
                tops.append(None)
                continue
            own = finite(entry.logprob)
            logprobs.append(own)
            top: dict[str, float] = {}
            for other, logprob in entry.top[: self._top]:
                top.setdefault(text(other), finite(logprob))
            top.setdefault(tokens[-1], own)
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int, *, names: bool = False
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice. names: call tokens by their ids; their bytes are there all the same."""
    text = token_name if names else tokenizer.token_text

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = []
    for entry in entries:
        described = describe(entry.token_id, entry.logprob)
        described["top_logprobs"] = [describe(*other) for other in entry.top[:top]]
        content.append(described)
    return {"content": content, "refusal": None}


def prompt_logprobs_object(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], top: int
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` of an answer: per prompt token an object by token id, null for the first."""
    result: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        described = {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token_id),
            }
            for rank, (token_id, logprob) in enumerate(entry.top[:top], start=1)
        }
        described.setdefault(
            str(entry.token_id),
            {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": tokenizer.token_text(entry.token_id),
            },
        )
        result.append(described)
    return result
