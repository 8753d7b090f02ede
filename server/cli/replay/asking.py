"""From a recorded request to one that asks for the same again, and what its answers have to be. Sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from windlass.server.cli.replay.reading import RecordedLine, RecordedRows

# Of one client or one moment: a repetition has its own.
_NOT_AGAIN = ("request_id", "timeout", "user", "metadata", "stream_options", "model", "safety_identifier")

_TASKS = {"all": "token_embed", "classify": "classify", "classify tokens": "token_classify", "answer": "classify"}


@dataclass(frozen=True, slots=True)
class AskedAgain:
    """path, body: what is posted. wanted: the digests of its answers by choice, None where there is nothing to compare with.

    some: whether the answers are some of `wanted`, as the best of several are.
    """

    recorded: RecordedLine
    path: str
    body: dict[str, Any]
    wanted: tuple[str, ...] | None = None
    some: bool = False


def asked_again(recorded: RecordedLine, ordinary: Sequence[int]) -> AskedAgain:
    """ordinary: token ids to make prompts of, where those of the request are not known."""
    if recorded.pooling is not None:
        return _pooled_again(recorded, recorded.pooling, ordinary)
    path = "/v1/completions"
    if recorded.prompt_token_ids is None:
        return AskedAgain(recorded, path, {**_common(recorded), **_synthetic(recorded, ordinary)})
    wanted = None
    if recorded.exact and recorded.ended_well:
        digests = [answer.digest for answer in sorted(recorded.answers, key=lambda answer: answer.choice)]
        wanted = tuple(digest for digest in digests if digest is not None)
    if recorded.body is not None:
        kept = {name: value for name, value in recorded.body.items() if name not in _NOT_AGAIN}
        body = {**kept, **_common(recorded), "seed": recorded.fields.get("seed"), **_as_far(recorded, kept)}
        some = bool(wanted) and (kept.get("best_of") or 1) > (kept.get("n") or 1)
        return AskedAgain(recorded, "/v1/chat/completions" if recorded.chat else path, body, wanted, some)
    ids: Any = recorded.prompt_token_ids
    body = {**recorded.fields, **recorded.texts, **_common(recorded), "prompt": ids[0] if len(ids) == 1 else ids}
    return AskedAgain(recorded, path, {**body, **_as_far(recorded, body)}, wanted)


def _as_far(recorded: RecordedLine, body: dict[str, Any]) -> dict[str, Any]:
    """The limits of one that did not end well: whoever left was not given more, and nobody asked for the rest."""
    if recorded.ended_well:
        return {}
    most = max(1, recorded.tokens)
    limits = {"max_tokens": most, "min_tokens": min(body.get("min_tokens") or 0, most)}
    return limits | ({"max_completion_tokens": most} if "max_completion_tokens" in body else {})


def _pooled_again(recorded: RecordedLine, rule: RecordedRows, ordinary: Sequence[int]) -> AskedAgain:
    """Whatever was made of the rows, such as scores: the rows themselves, as float32, so that they can be compared."""
    kind: dict[str, Any] = {"task": _TASKS[rule.kind]} if rule.kind in _TASKS else {"pooling": rule.kind}
    if kind.get("task") in ("classify", "token_classify"):
        kind["use_activation"] = False
    else:
        kind |= {"normalize": rule.normalize}
        if rule.dimensions is not None:
            kind["dimensions"] = rule.dimensions
    wanted = None
    if recorded.exact and recorded.ended_well:
        digests = [answer.digest for answer in sorted(recorded.answers, key=lambda answer: answer.choice)]
        wanted = tuple(digest for digest in digests if digest is not None)
    ids = recorded.prompt_token_ids or _other_prompts(recorded, ordinary)
    body = {**recorded.fields, **recorded.texts, **kind, **_named(recorded), "encoding_format": "base64", "input": ids}
    return AskedAgain(recorded, "/pooling", body, wanted)


def _common(recorded: RecordedLine) -> dict[str, Any]:
    """What holds for every repetition of a generation."""
    return {"stream": recorded.stream, "return_token_ids": True, **_named(recorded)}


def _named(recorded: RecordedLine) -> dict[str, Any]:
    """Only an adapter is asked for by its name: the model may be called something else now."""
    return {"model": recorded.model} if recorded.model and recorded.model != recorded.of.model else {}


def _other_prompts(recorded: RecordedLine, ordinary: Sequence[int]) -> list[list[int]]:
    """As long, of other tokens; the same ones each time the file is repeated."""
    random = Random(f"{recorded.line}/{recorded.request_id}")
    return [random.choices(ordinary, k=max(1, count)) for count in recorded.prompt_tokens]


def _synthetic(recorded: RecordedLine, ordinary: Sequence[int]) -> dict[str, Any]:
    """As long a prompt and as long an answer."""
    prompts = _other_prompts(recorded, ordinary)
    tokens = recorded.tokens if recorded.ended_well or recorded.answers else 1
    fixed = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    return {**recorded.fields, **fixed, "prompt": prompts[0] if len(prompts) == 1 else prompts}
