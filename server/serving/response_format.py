"""JSON pieces of responses: log-probabilities, rotary reports, and large JSON in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from windlass.engine.interface.context import ContextReport, ContextRule
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.outputs import TokenLogprobs
from windlass.engine.rotary.auto_scaling import AutoScalingThresholds
from windlass.engine.rotary.rope_scaling import RotaryGroup, main_group, original_len
from windlass.engine.rotary.rotary_policy import RotaryReport, make_auto_plan
from windlass.server.text.tokenizer import TextOffsets

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer


MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have


class JsonList:
    """A JSON array that is encoded as items are added; only its text is stored. size: bytes of that text."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size = 0

    def extend(self, items: Sequence[Any]) -> None:
        """Append items. At most a few hundred at once: encoding them blocks the event loop."""
        if items:
            part = to_json(items)[1:-1]
            self._parts.append(part)
            self.size += len(part) + 1

    def take(self, other: JsonList) -> None:
        """Append the items of another array."""
        self._parts += other._parts
        self.size += other.size

    def __add__(self, other: JsonList) -> JsonList:
        both = JsonList()
        both._parts = self._parts + other._parts
        both.size = self.size + other.size
        return both

    def __bool__(self) -> bool:
        return bool(self._parts)

    def pieces(self) -> Iterator[bytes]:
        """The array's text."""
        yield b"["
        for number, part in enumerate(self._parts):
            if number:
                yield b","
            yield part
        yield b"]"


def encode_pieces(value: Any) -> Iterator[bytes]:
    """The JSON text of a value in which any array may be a `JsonList`. Other arrays and strings come in one piece."""
    if isinstance(value, JsonList):
        yield from value.pieces()
    elif isinstance(value, dict):
        before = b"{"
        for key, item in value.items():
            yield before + to_json(key) + b":"
            yield from encode_pieces(item)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict | JsonList):
        before = b"["
        for item in value:
            yield before
            yield from encode_pieces(item)
            before = b","
        yield b"]"
    else:
        yield to_json(value)


def encode(value: Any) -> bytes:
    """The text of `encode_pieces` in one piece."""
    return b"".join(encode_pieces(value))


def token_name(token_id: int) -> str:
    """Unambiguous name of a token; several tokens may have the same text."""
    return f"token_id:{token_id}"


def clamp_logprob(logprob: float) -> float:
    """The log-probability, or MIN_LOGPROB for minus infinity and NaN, which JSON does not have."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


class CompletionLogprobLists:
    """Builds the parallel lists of a completions choice, chunk by chunk.

    top: alternatives per token. Each entry of `top_logprobs` also has the token itself, so it may have top + 1 items; of two
    alternatives with the same text the more probable one is used.
    start: characters before the first token. names: name tokens by their ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool, start: int = 0, names: bool = False
    ) -> None:
        self._text = token_name if names else tokenizer.token_text
        self._top = top
        self._offsets = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens, start=start)

    @property
    def position(self) -> int:
        """Offset of the next token in characters."""
        return self._offsets.position

    def layout(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The lists of further tokens, one entry each; None for a token without a preceding one."""
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
            own = clamp_logprob(entry.logprob)
            logprobs.append(own)
            top: dict[str, float] = {}
            for other, logprob in entry.top[: self._top]:
                top.setdefault(text(other), clamp_logprob(logprob))
            top.setdefault(tokens[-1], own)
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int, *, names: bool = False
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice. names: name tokens by their ids."""
    text = token_name if names else tokenizer.token_text

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": text(token_id),
            "logprob": clamp_logprob(logprob),
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
    """`prompt_logprobs` of a response: an object by token id for each prompt token, null for the first."""
    result: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        described = {
            str(token_id): {
                "logprob": clamp_logprob(logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token_id),
            }
            for rank, (token_id, logprob) in enumerate(entry.top[:top], start=1)
        }
        described.setdefault(
            str(entry.token_id),
            {
                "logprob": clamp_logprob(entry.logprob),
                "rank": entry.rank,
                "decoded_token": tokenizer.token_text(entry.token_id),
            },
        )
        result.append(described)
    return result


def rotary_object(
    report: RotaryReport, context: ContextReport | None, rule: ContextRule, dropped_turns: int | None
) -> dict[str, Any]:
    """The `rotary` field of a response. dropped_turns: of a chat, None if none may be dropped."""
    shown: dict[str, Any] = {
        "rope_type": report.rope_type,
        "parameters": report.parameters,
        "policy": report.policy,
        "effective_length": report.effective_length,
        "fingerprint": report.fingerprint,
        "moves": report.moves,
    }
    if report.groups:
        shown["groups"] = report.groups
    context_fields = _context_object(context, rule)
    if dropped_turns is not None:
        context_fields["dropped_turns"] = dropped_turns
    if context_fields:
        shown["context"] = context_fields
    if report.auto is not None:
        shown["auto"] = report.auto
    return shown


def _context_object(report: ContextReport | None, rule: ContextRule) -> dict[str, int]:
    """The fields that apply under `rule`; empty without a report."""
    shown: dict[str, int] = {}
    if report is None:
        return shown
    if rule.attention_window is not None:
        shown |= {"attention_window": rule.attention_window, "attention_sinks": rule.attention_sinks}
    elif report.window is not None:
        shown |= {
            "window": report.window,
            "kept_tokens": report.kept_tokens,
            "dropped_tokens": report.dropped_tokens,
            "shifts": report.shifts,
        }
    if report.reused_passages:
        shown |= {"reused_tokens": report.reused_tokens, "reused_passages": report.reused_passages}
    return shown


def model_rotary_object(info: ModelInfo) -> dict[str, Any] | None:
    """The `rotary` field of `/v1/models`; None for a model without rotary attention."""
    return groups_object(info.rotary_groups) if main_group(info.rotary_groups).base.unrotated is None else None


def groups_object(groups: tuple[RotaryGroup, ...]) -> dict[str, Any]:
    """Scaling and dimensions of the main group, and of every group under `groups`."""
    described = {group.name: _group(group) for group in groups}
    return {**described[groups[0].name], "groups": described}


def _group(group: RotaryGroup) -> dict[str, Any]:
    return {
        "rope_type": group.scaling.rope_type,
        **group.parameters(),
        "rotary_dim": group.base.rotary_dim,
        "original_max_position_embeddings": original_len(group.scaling, group.base),
        "max_position_embeddings": group.base.trained_len,
    }


def auto_scaling_object(info: ModelInfo) -> dict[str, Any] | None:
    """The thresholds of `auto`; None for a model that cannot be scaled."""
    if info.rotary_ladder is None:
        return None
    return {"default": info.rotary_auto, "steps": _steps(info.rotary_ladder, info.max_model_len)}


@lru_cache(maxsize=8)
def _steps(ladder: AutoScalingThresholds, longest: int) -> list[dict[str, Any]]:
    """The stages of a request that grows to `longest` tokens, up to the last threshold."""
    longest = longest if ladder.end is None else min(longest, ladder.end)
    plan, shown = make_auto_plan(ladder, longest, "recompute"), []
    length: int | None = 1
    while length is not None:
        stage = plan.stage(length)
        assert stage.choice is not None
        main = main_group(plan.groups_in(stage))
        effective = stage.effective_lengths[plan.groups.index(main_group(plan.groups))]
        step = {"up_to": stage.choice.up_to, "rope_scaling": main.scaling.to_dict(), "effective_length": effective}
        shown.append(step if stage.choice.step.profile is None else {**step, "profile": stage.choice.step.profile})
        length = None if stage.last_length is None else stage.last_length + 1
    return shown
