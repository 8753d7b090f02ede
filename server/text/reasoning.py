"""Reasoning parsers: formats of thinking, and the stage that separates it from the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from windlass.engine.interface.request import ThinkingBudget
from windlass.server.errors import bad_request
from windlass.server.text.stream_parser import Event, OutputParser, ParsingPlan, PlainTextParser, Reasoning
from windlass.server.text.tool_parsers.harmony import channel_parsing_plan

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer


ThinkingPhase = Literal["before", "inside", "behind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingFormat:
    """Thinking stands at the beginning of an answer, between an opening and a closing marker.

    opens, closes: the markers, the usual spelling first. always: thinking begins with the first token, whether a marker
    opens it or not. wrapper: markers around the answer behind the thinking, which are no part of it.
    label: a word right behind an opening marker, which says that thinking follows. anywhere: thinking may be opened at any
    place of an answer, again and again, and no marker is text. interrupts: what ends the thinking and belongs to the answer.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    always: bool = False
    wrapper: tuple[str, str] | None = None
    label: str = ""
    may_recur: bool = False
    interrupts: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        """What opens thinking: the markers, each with the label."""
        return tuple(marker + self.label for marker in self.opens)

    @property
    def markers(self) -> frozenset[str]:
        """Every text that the parser has to see, even where it is a special token."""
        return frozenset((*self.opens, *self.closes, *(self.wrapper or ())))

    def phase(self, prompt: str, continued: str | None = None) -> ThinkingPhase:
        """Where an answer to this rendered prompt begins.

        continued: the text of the last message, where the answer goes on with it.
        """
        if continued is not None:
            # Where the message is continued its thinking is over, unless it says so itself.
            opened, closed = _last_index(continued, self.openings), _last_index(continued, self.closes)
            return "inside" if opened > closed else "behind"
        end = prompt[-256:].rstrip()
        if end.endswith(self.openings):
            return "inside"
        if end.endswith(self.closes):
            return "behind"  # a template that was told not to think closes what it opened
        return "inside" if self.always else "before"


def _last_index(text: str, markers: Sequence[str]) -> int:
    return max(text.rfind(marker) for marker in markers)


QWEN3 = ThinkingFormat(name="qwen3", opens=("<think>",), closes=("</think>",))

DEEPSEEK_R1 = replace(QWEN3, name="deepseek_r1", always=True)

GRANITE = ThinkingFormat(
    name="granite",
    opens=("<think>", "Here is my thought process:", "Here's my thought process:"),
    closes=("</think>", "Here is my response:", "Here's my response:"),
    wrapper=("<response>", "</response>"),
)

GEMMA4 = ThinkingFormat(
    name="gemma4",
    opens=("<|channel>",),
    closes=("<channel|>",),
    label="thought",
    may_recur=True,
    interrupts=("<|tool_call>",),
)

FORMATS = {each.name: each for each in (DEEPSEEK_R1, QWEN3, GRANITE, GEMMA4)}

HARMONY = "gpt_oss"

HARMONY_OPENS = ("<|channel|>analysis<|message|>",)

HARMONY_CLOSES = ("<|end|>",)

AUTO = "auto"

NONE = "none"

NAMES = (AUTO, *FORMATS, HARMONY, NONE)


def format_of_template(template: str | None) -> str:
    """The name of the format that a chat template speaks of, `none` where it speaks of none."""
    if template is None:
        return NONE
    if "<|channel|>" in template:
        return HARMONY
    if GEMMA4.opens[0] in template:
        return GEMMA4.name
    if "thought process" in template or ("<think>" in template and "<response>" in template):
        return GRANITE.name
    if "</think>" not in template and "<think>" not in template:
        return NONE
    # DeepSeek's models think whether or not their template opens the thinking for them.
    return DEEPSEEK_R1.name if "<\uff5cAssistant\uff5c>" in template else QWEN3.name


SPACE = " \t\r\n"

MAX_LEADING_SPACE = 64  # characters of white space that may stand before an opening marker


class ThinkingParser:
    """See `OutputParser`. White space around the thinking and between it and the answer belongs to neither.

    place: where the text begins. rest: reads the answer.
    thinking: whether what comes next is thinking, or may turn out to open it. thought: whether there was any thinking.
    """

    def __init__(self, format: ThinkingFormat, phase: ThinkingPhase, rest: OutputParser) -> None:
        self._format = format
        self._rest: OutputParser = rest
        self._phase = phase
        self._opened = phase == "inside"
        self._at_start = phase != "behind"  # an opening marker may come
        self._held = ""  # may be the beginning of a marker
        self._spaces: list[str] = []  # white space that is thinking only if more thinking follows
        self._emitted = False  # some thinking was told

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    @property
    def thinking(self) -> bool:
        return self._phase != "behind"

    @property
    def has_thought(self) -> bool:
        return self._opened

    def feed(self, text: str) -> list[Event]:
        if self._at_start:
            text, self._held = self._start(self._held + text)
        if not text:
            return []
        return self._think(text) if self.thinking else self._rest.feed(text)

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._phase == "behind":
            return self._rest.finish()
        if self._at_start and not self._opened:  # it ended before it could be told from an opening marker
            return [*self._rest.feed(held), *self._rest.finish()]
        return [*self._reasoning_events(held), *self._rest.finish()]

    def _start(self, text: str) -> tuple[str, str]:
        """The text behind an opening marker, if there is one; and what must wait as long as that is open."""
        visible = text.lstrip(SPACE)
        if len(text) - len(visible) <= MAX_LEADING_SPACE:
            for marker in self._format.opens:
                if visible.startswith(marker):
                    self._phase, self._at_start, self._opened = "inside", False, True
                    return visible[len(marker) :], ""
            if any(marker.startswith(visible) for marker in self._format.opens):
                return "", text
        self._at_start = False
        if not self._opened:
            self._phase = "behind"
        return text, ""

    def _think(self, text: str) -> list[Event]:
        buffer = self._held + text
        found = first_marker(buffer, self._format.closes)
        if found is None:
            safe = len(buffer) - partial_marker(buffer, self._format.closes)
            self._held = buffer[safe:]
            return self._reasoning_events(buffer[:safe])
        start, end = found
        self._held = ""
        events = self._reasoning_events(buffer[:start])
        self._phase = "behind"
        self._rest = AnswerText(self._rest, self._format.wrapper)
        return events + self._rest.feed(buffer[end:])

    def _reasoning_events(self, text: str) -> list[Event]:
        body = text.rstrip(SPACE)
        if not body:
            if text and self._emitted:
                self._spaces.append(text)
            return []
        reasoning = "".join((*self._spaces, body)) if self._emitted else body.lstrip(SPACE)
        self._spaces = [text[len(body) :]]
        self._emitted = True
        return [Reasoning(reasoning)]


class AnswerText:
    """What stands behind the thinking: without white space at its beginning, and without the wrapper, if there is one."""

    def __init__(self, rest: OutputParser, wrapper: tuple[str, str] | None) -> None:
        self._rest = rest
        self._wrapper = wrapper  # until it has come, or cannot come any more
        self._closing = ""  # the end of the wrapper, once its beginning has come
        self._started = False
        self._held = ""

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    def feed(self, text: str) -> list[Event]:
        buffer, self._held = self._held + text, ""
        if not self._started:
            buffer = buffer.lstrip(SPACE)
            if self._wrapper is not None and buffer.startswith(self._wrapper[0]):
                buffer = buffer[len(self._wrapper[0]) :].lstrip(SPACE)
                self._closing, self._wrapper = self._wrapper[1], None
            if self._wrapper is not None and self._wrapper[0].startswith(buffer):
                self._held = buffer
                return []
            self._started = bool(buffer)
        if self._closing:
            at = buffer.find(self._closing)
            if at < 0:
                safe = len(buffer) - partial_marker(buffer, (self._closing,))
                buffer, self._held = buffer[:safe], buffer[safe:]
            else:
                buffer = buffer[:at] + buffer[at + len(self._closing) :]
                self._closing = ""
        return self._rest.feed(buffer) if buffer else []

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        return [*(self._rest.feed(held) if held else ()), *self._rest.finish()]


def first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, int] | None:
    """Start and end of the marker that begins first."""
    found = [(at, at + len(marker)) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None)


def partial_marker(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end may be the beginning of a marker."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(len(marker) > length and text.endswith(marker[:length]) for marker in markers):
            return length
    return 0


_THOUGHT_SEPARATOR = "\n\n"  # thoughts that were apart


class ChannelParser:
    """See `OutputParser` and `ThinkingParser`. White space around the thinking belongs to neither, as long as no answer began.

    Every channel is thinking, whether the label names it or not.
    """

    def __init__(self, format: ThinkingFormat, phase: ThinkingPhase, rest: OutputParser) -> None:
        self._format = format
        self._rest = rest
        self._inside = self._opened = phase == "inside"
        self._may_open = phase == "before"
        self._labelled = False  # an opening marker was the last that came
        self._held = ""  # may be the beginning of a marker or the label
        self._spaces: list[str] = []  # white space that is thinking only if more thinking follows
        self._emitted = False  # some thinking was told
        self._separate = False  # what is thought next is apart from it
        self._leading_space = ""  # white space that is the answer's only if no thinking follows
        self._started = False  # the answer has

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    @property
    def thinking(self) -> bool:
        return self._inside or self._may_open

    @property
    def has_thought(self) -> bool:
        return self._opened

    def feed(self, text: str) -> list[Event]:
        buffer, self._held = self._held + text, ""
        events: list[Event] = []
        while buffer:
            if self._labelled:
                label = self._format.label
                if len(buffer) < len(label) and label.startswith(buffer):
                    self._held = buffer
                    break
                buffer, self._labelled = buffer.removeprefix(label), False
                continue
            markers = (*self._format.opens, *self._format.closes, *(self._format.interrupts if self._inside else ()))
            found = first_marker(buffer, markers)
            if found is None:
                safe = len(buffer) - partial_marker(buffer, markers)
                events += self._handle_text(buffer[:safe])
                self._held = buffer[safe:]
                break
            start, end = found
            events += self._handle_text(buffer[:start])
            if not self._handle_marker(buffer[start:end]):
                events += self._rest.feed(buffer[start:end])
            buffer = buffer[end:]
        return events

    def finish(self) -> list[Event]:
        events = [] if self._labelled else self._handle_text(self._held)
        if self._leading_space:
            events += self._rest.feed(self._leading_space)
        return events + self._rest.finish()

    def _handle_marker(self, marker: str) -> bool:
        """Take a marker; False where it is text, or the answer's."""
        if self._inside:
            self._labelled = marker in self._format.opens
            self._inside = self._labelled
            self._separate = not self._inside
            self._started = self._started or marker in self._format.interrupts
            return marker not in self._format.interrupts
        if self._rest.in_call:
            return False
        if marker in self._format.opens:
            self._inside = self._opened = self._labelled = True
            self._may_open, self._leading_space = False, ""
        return True

    def _handle_text(self, text: str) -> list[Event]:
        """Text without markers, which is thinking or the answer's."""
        if self._inside:
            return self._reasoning_events(text)
        if not self._started:
            visible = text.lstrip(SPACE)
            if not self._opened:
                self._leading_space += text[: len(text) - len(visible)]
            if not visible and len(self._leading_space) <= MAX_LEADING_SPACE:
                return []
            text, self._leading_space = self._leading_space + visible, ""
            self._started, self._may_open = True, False
        return self._rest.feed(text) if text else []

    def _reasoning_events(self, text: str) -> list[Event]:
        body = text.rstrip(SPACE)
        if not body:
            if text and self._emitted and not self._separate:
                self._spaces.append(text)
            return []
        if not self._emitted or self._separate:
            reasoning = (_THOUGHT_SEPARATOR if self._emitted else "") + body.lstrip(SPACE)
        else:
            reasoning = "".join((*self._spaces, body))
        self._spaces = [text[len(body) :]]
        self._emitted, self._separate = True, False
        return [Reasoning(reasoning)]


_SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn thinking on and off

_EFFORT = "reasoning_effort"

_BUDGET = "thinking_budget"

_ADJACENT_SPACE = ("", " ", "\n", "\n\n")  # what may share a token with a marker

_HARMONY_EFFORTS = ("low", "medium", "high")

_HARMONY_EFFORT_ALIASES = {"minimal": "low", "xhigh": "high", "max": "high"}


class ThinkingControl:
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
        self._template_variables = variables_read(
            self._template + (tokenizer.tool_template or ""), (*_SWITCHES, _EFFORT)
        )

    @property
    def choices(self) -> frozenset[str]:
        """The variables by which its template lets a request choose."""
        return self._template_variables

    @property
    def separates_thinking(self) -> bool:
        """Whether thinking is told apart from the rest of an answer, so that a budget can end it."""
        return self.format is not None or self.name == HARMONY

    def phase(self, prompt: str, continued: str | None) -> ThinkingPhase:
        """Where an answer to the rendered prompt begins; see `ThinkingFormat.phase`."""
        if self.format is None:
            return "before" if self.name == HARMONY else "behind"
        return self.format.phase(prompt, continued)

    def parsing(self, plan: ParsingPlan | None, phase: ThinkingPhase) -> ParsingPlan | None:
        """The plan with a stage in front that takes the thinking off."""
        format = self.format
        if format is None:  # messages in channels are told apart by the parser of calls
            return channel_parsing_plan() if plan is None and self.name == HARMONY else plan
        rest = ParsingPlan(PlainTextParser) if plan is None else plan
        stage = ChannelParser if format.may_recur else ThinkingParser

        def make() -> OutputParser:
            return stage(format, phase, rest.make())

        return replace(rest, make=make, markers=rest.markers | format.markers)

    def budget(self, tokens: int | None, phase: ThinkingPhase) -> ThinkingBudget | None:
        """What ends the thinking of an answer that begins at `phase` after so many tokens; None: nothing needs to.

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
        if phase == "behind":
            return None
        if closes not in self._budgets:
            close = tuple(self.ids(min(closes, key=lambda one: (len(self.ids(one)) > 1, one not in self._template))))
            others = tuple(found for found in self._spellings(closes) if found != close)
            self._budgets[closes] = ThinkingBudget(0, close, self._spellings(opens), others)
        known = self._budgets[closes]
        return replace(known, tokens=tokens, opens=() if phase == "inside" else known.opens)

    def _spellings(self, markers: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The token ids that these texts may have in an answer: white space beside a text may be in its first and last token.

        Those that hold another one are left out.
        """
        texts = [
            before + marker + after for marker in markers for before in _ADJACENT_SPACE for after in _ADJACENT_SPACE
        ]
        found = sorted({tuple(self.ids(text)) for text in texts}, key=lambda ids: (len(ids), ids))
        shortest = list[tuple[int, ...]]()
        for ids in found:
            if not any(ids[at : at + len(short)] == short for short in shortest for at in range(len(ids))):
                shortest.append(ids)
        return tuple(shortest)

    def ids(self, marker: str) -> list[int]:
        """Token ids of a marker: one, mostly."""
        return self._tokenizer.encode(marker, add_special_tokens=False)

    def variables_to_enable(self) -> dict[str, Any]:
        """The template's variables that let the model think; empty where it has no such choice."""
        return {name: True for name in _SWITCHES if name in self._template_variables}

    def nearest_effort(self, effort: str) -> str | None:
        """The effort nearest to this one that the model can be told; None where its template has no such choice."""
        if self.name == HARMONY:
            effort = _HARMONY_EFFORT_ALIASES.get(effort, effort)
        return effort if self._template_variables or effort == "none" else None

    def variables(self, effort: str | None, template_kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        """The template's variables for a request: `chat_template_kwargs`, which win, and what `effort` comes to.

        Raises ApiError where the effort would change nothing, as an answer must not look as if it had.
        """
        if effort is None:
            return template_kwargs
        if self.name == HARMONY and effort not in _HARMONY_EFFORTS:
            raise bad_request(
                f"this model knows the efforts {', '.join(_HARMONY_EFFORTS)}, got {effort!r}", _EFFORT, "invalid_value"
            )
        found: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in self._template_variables}
        if _EFFORT in self._template_variables:
            found[_EFFORT] = effort
        if not found and (effort != "none" or self.name != "none"):
            raise bad_request(
                "this model's chat template has no such choice: leave reasoning_effort out",
                _EFFORT,
                "unsupported_parameter",
            )
        return {**found, **(template_kwargs or {})}


_CODE = re.compile(r"\{[%{](.*?)[%}]\}", re.DOTALL)

_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def variables_read(template: str, names: tuple[str, ...]) -> frozenset[str]:
    """Those of the names that the code of a template uses as variables: not in text, not in strings, not as attributes."""
    code = "\n".join(_STRING.sub("''", block) for block in _CODE.findall(template))
    return frozenset(name for name in names if re.search(rf"(?<![\w.]){name}(?!\w)", code))
