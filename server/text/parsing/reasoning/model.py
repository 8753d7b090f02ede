"""How the served model thinks: its format, how answers are parsed, and what its chat template lets a request choose."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from windlass.engine.interface.request import ThinkingBudget
from windlass.server.errors import bad_request
from windlass.server.text.parsing.events import OutputParser, ParsingPlan, PlainText
from windlass.server.text.parsing.reasoning.channels import ChannelParser
from windlass.server.text.parsing.reasoning.formats import (
    AUTO,
    FORMATS,
    HARMONY,
    HARMONY_CLOSES,
    HARMONY_OPENS,
    Place,
    format_of_template,
)
from windlass.server.text.parsing.reasoning.parser import ThinkingParser
from windlass.server.text.parsing.tools.harmony import without_calls

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer

_SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn thinking on and off
_EFFORT = "reasoning_effort"
_BUDGET = "thinking_budget"
_BESIDE = ("", " ", "\n", "\n\n")  # what may share a token with a marker
_HARMONY_EFFORTS = ("low", "medium", "high")
_HARMONY_NEAREST = {"minimal": "low", "xhigh": "high", "max": "high"}


class ThinkingModel:
    """One per app. name: of the format, `none` where the model's thinking is not told apart.

    parser: what the operator chose.
    """

    def __init__(self, parser: str, tokenizer: Tokenizer) -> None:
        template = tokenizer.chat_template or tokenizer.tool_template
        self._template = template or ""
        self._budgets: dict[
            tuple[str, ...], ThinkingBudget
        ] = {}  # by closing markers: dozens of texts are tokenized for one
        self.name = format_of_template(template) if parser == AUTO else parser
        self.format = FORMATS.get(self.name)
        self._tokenizer = tokenizer
        self._read = variables_read(self._template + (tokenizer.tool_template or ""), (*_SWITCHES, _EFFORT))

    @property
    def choices(self) -> frozenset[str]:
        """The variables by which its template lets a request choose."""
        return self._read

    @property
    def told_apart(self) -> bool:
        """Whether thinking is told apart from the rest of an answer, so that a budget can end it."""
        return self.format is not None or self.name == HARMONY

    def place(self, prompt: str, continued: str | None) -> Place:
        """Where an answer to the rendered prompt begins; see `ThinkingFormat.place`."""
        if self.format is None:
            return "before" if self.name == HARMONY else "behind"
        return self.format.place(prompt, continued)

    def parsing(self, plan: ParsingPlan | None, place: Place) -> ParsingPlan | None:
        """The plan with a stage in front that takes the thinking off."""
        format = self.format
        if format is None:  # messages in channels are told apart by the parser of calls
            return without_calls() if plan is None and self.name == HARMONY else plan
        rest = ParsingPlan(PlainText) if plan is None else plan
        stage = ChannelParser if format.anywhere else ThinkingParser

        def make() -> OutputParser:
            return stage(format, place, rest.make())

        return replace(rest, make=make, markers=rest.markers | format.markers)

    def budget(self, tokens: int | None, place: Place) -> ThinkingBudget | None:
        """What ends the thinking of an answer that begins at `place` after so many tokens; None: nothing needs to.

        Raises ApiError where thinking is not told apart.
        """
        if tokens is None:
            return None
        if self.format is not None:
            opens, closes = self.format.openings, self.format.closes
        elif self.name == HARMONY:
            opens, closes = HARMONY_OPENS, HARMONY_CLOSES
        else:
            raise bad_request(
                "this server tells no thinking apart (--reasoning-parser)", _BUDGET, "unsupported_parameter"
            )
        if place == "behind":
            return None
        if closes not in self._budgets:
            close = tuple(self.ids(min(closes, key=lambda one: (len(self.ids(one)) > 1, one not in self._template))))
            others = tuple(found for found in self._spellings(closes) if found != close)
            self._budgets[closes] = ThinkingBudget(0, close, self._spellings(opens), others)
        known = self._budgets[closes]
        return replace(known, tokens=tokens, opens=() if place == "inside" else known.opens)

    def _spellings(self, markers: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The token ids that these texts may have in an answer: white space beside a text may be in its first and last token.

        Those that hold another one are left out.
        """
        texts = [before + marker + behind for marker in markers for before in _BESIDE for behind in _BESIDE]
        found = sorted({tuple(self.ids(text)) for text in texts}, key=lambda ids: (len(ids), ids))
        kept = list[tuple[int, ...]]()
        for ids in found:
            if not any(ids[at : at + len(short)] == short for short in kept for at in range(len(ids))):
                kept.append(ids)
        return tuple(kept)

    def ids(self, marker: str) -> list[int]:
        """Token ids of a marker: one, mostly."""
        return self._tokenizer.encode(marker, add_special_tokens=False)

    def switched_on(self) -> dict[str, Any]:
        """The template's variables that let the model think; empty where it has no such choice."""
        return {name: True for name in _SWITCHES if name in self._read}

    def nearest_effort(self, effort: str) -> str | None:
        """The effort nearest to this one that the model can be told; None where its template has no such choice."""
        if self.name == HARMONY:
            effort = _HARMONY_NEAREST.get(effort, effort)
        return effort if self._read or effort == "none" else None

    def variables(self, effort: str | None, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """The template's variables for a request: `chat_template_kwargs`, which win, and what `effort` comes to.

        Raises ApiError where the effort would change nothing, as an answer must not look as if it had.
        """
        if effort is None:
            return given
        if self.name == HARMONY and effort not in _HARMONY_EFFORTS:
            raise bad_request(
                f"this model knows the efforts {', '.join(_HARMONY_EFFORTS)}, got {effort!r}", _EFFORT, "invalid_value"
            )
        found: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in self._read}
        if _EFFORT in self._read:
            found[_EFFORT] = effort
        if not found and (effort != "none" or self.name != "none"):
            raise bad_request(
                "this model's chat template has no such choice: leave reasoning_effort out",
                _EFFORT,
                "unsupported_parameter",
            )
        return {**found, **(given or {})}


_CODE = re.compile(r"\{[%{](.*?)[%}]\}", re.DOTALL)
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def variables_read(template: str, names: tuple[str, ...]) -> frozenset[str]:
    """Those of the names that the code of a template uses as variables: not in text, not in strings, not as attributes."""
    code = "\n".join(_STRING.sub("''", block) for block in _CODE.findall(template))
    return frozenset(name for name in names if re.search(rf"(?<![\w.]){name}(?!\w)", code))
