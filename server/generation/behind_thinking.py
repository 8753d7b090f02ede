"""Grammars for models that think: what a request asks of its answer holds for the answer, and thinking stays free.

Knows grammars as llguidance reads them, as text; knows nothing of who asked for what.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from windlass.server.text.parsing.reasoning.formats import HARMONY, Place, ThinkingFormat
from windlass.server.text.parsing.reasoning.model import ThinkingModel

_ANSWER = "answer"
# As much as may stand before an opening marker where a budget counts from it, and a little more behind a closing one.
_SPACES = (r"BEFORE: /[ \t\r\n]{0,2}/", r"SPACE: /[ \t\r\n]{0,4}/")


def behind_thinking(
    grammar: str, model: ThinkingModel, place: Place, eos_ids: Collection[int], *, calls: bool = False
) -> str:
    """The grammar of an answer, as one of all that is generated: thinking, if the model thinks, then the answer.

    grammar: a list of grammars as JSON, or Lark. place: where the output begins. eos_ids: what would end it, and must not
    while the model thinks. calls: the grammar is one of calls, which name their channels themselves.
    """
    if place == "behind" or (calls and model.name == HARMONY):
        return grammar
    if model.name == HARMONY:
        lark = _channels(model.ids, eos_ids)
    elif model.format is not None:
        lark = _tags(model.format, place, model.ids, eos_ids)
    else:
        return grammar
    given: dict[str, Any] = json.loads(grammar) if grammar.lstrip().startswith("{") else {}
    first, *others = given.get("grammars") or [{"lark_grammar": grammar}]
    grammars = [{"lark_grammar": lark}, {**first, "name": _ANSWER}, *others]
    return json.dumps({**given, "grammars": grammars})


def _tags(format: ThinkingFormat, place: Place, ids: Callable[[str], list[int]], eos_ids: Collection[int]) -> str:
    closes = _single(ids, format.closes)
    if closes:
        others = {*eos_ids, *_single(ids, format.interrupts)}
        rules = [f"thought: {_anything_but({*closes, *others})}* {_tokens(closes)}"]
    else:  # the markers are text; the shortest match ends with the first of them
        ends = "|".join(_in_regex(close) for close in format.closes)
        rules = [rf"thought[lazy]: /(.|\n)*({ends})/"]
    opens = [_tokens(found) if len(found := ids(text)) == 1 else json.dumps(text) for text in format.opens]
    label = f"{json.dumps(format.label)} " if format.label else ""
    opened = f"BEFORE ({' | '.join(opens)}) {label}thought"
    begin = "thought" if place == "inside" else f"({opened})?"
    return "\n".join([f"start: {begin} SPACE @{_ANSWER}", *rules, *(_SPACES[1:] if place == "inside" else _SPACES)])


def _channels(ids: Callable[[str], list[int]], eos_ids: Collection[int]) -> str:
    def token(text: str) -> str:
        return _tokens(found) if len(found := ids(text)) == 1 else json.dumps(text)

    channel, message, end = token("<|channel|>"), token("<|message|>"), ids("<|end|>")
    free = f"{_anything_but({*end, *eos_ids})}* {_tokens(end)}" if len(end) == 1 else "unmarked"
    return "\n".join(
        [
            f'start: ({channel} "analysis" {message} thought {token("<|start|>")} "assistant")? '
            f'{channel} "final" {message} @{_ANSWER}',
            f"thought: {free}",
            *(() if len(end) == 1 else (r"unmarked[lazy]: /(.|\n)*<\|end\|>/",)),
        ]
    )


def _single(ids: Callable[[str], list[int]], texts: Collection[str]) -> list[int]:
    """Those of the texts that are one token each."""
    return [found[0] for found in map(ids, texts) if len(found) == 1]


def _tokens(ids: Collection[int]) -> str:
    return f"<[{','.join(map(str, sorted(ids)))}]>"


def _anything_but(ids: Collection[int]) -> str:
    return f"<[^{','.join(map(str, sorted(ids)))}]>"


def _in_regex(text: str) -> str:
    """The text inside `/…/`."""
    return re.sub(r"([.^$*+?()\[\]{}|\\/])", r"\\\1", text)
