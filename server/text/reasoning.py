"""Reasoning parsers: formats of thinking, and the stage that separates it from the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from windlass.engine.interface.request import ThinkingBudget
from windlass.server.errors import bad_request
from windlass.server.text.stream_parser import (
    CallStart,
    Content,
    Event,
    OutputParser,
    ParsingPlan,
    PlainTextParser,
    Reasoning,
    TracksThinking,
    find_marker,
    partial_marker_length,
)
from windlass.server.text.tool_parsers.harmony import channel_parsing_plan

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer

ThinkingPhase = Literal["before", "inside", "after"]

HARMONY, AUTO, NONE = "gpt_oss", "auto", "none"  # names in addition to those of `FORMATS`
HARMONY_OPENS = ("<|channel|>analysis<|message|>",)
HARMONY_CLOSES = ("<|end|>",)
SPACE = " \t\r\n"
# Characters after an opener of calls within the thinking until it must be clear whether a call follows.
MAX_PROBED = 1 << 14
MAX_FAILED_PROBES = 64  # openers within the thinking without a call; further ones are not examined
PROBE_PIECE = 256  # characters
_MAX_HELD = 1024  # characters of markup and white space that may precede an answer
MAX_LEADING_SPACE = 64  # characters of white space before an opening marker
_SWITCHES = ("enable_thinking", "thinking")  # template variables that turn thinking on and off
_EFFORT = "reasoning_effort"
_BUDGET = "thinking_budget"
_ADJACENT_SPACE = ("", " ", "\n", "\n\n")  # white space that may share a token with a marker
# The levels of gpt-oss are low, medium and high.
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_THOUGHT_SEPARATOR = "\n\n"  # between separate thoughts
_JINJA_CODE = re.compile(r"\{[%{](.*?)[%}]\}", re.DOTALL)
_JINJA_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingFormat:
    """Markers around the thinking at the beginning of an answer.

    opens, closes: the markers, the most usual spelling first. always: thinking begins with the first token, even without
    an opening marker. wrappers: pairs of markers around the answer after the thinking, which are omitted.
    label: word after an opening marker. may_recur: thinking may be opened repeatedly and anywhere, and markers are never
    text. interrupts: markers that end the thinking and belong to the answer.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    always: bool = False
    wrappers: tuple[tuple[str, str], ...] = ()
    label: str = ""
    may_recur: bool = False
    interrupts: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        """Opening markers with the label."""
        return tuple(marker + self.label for marker in self.opens)

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that the parser must see."""
        return frozenset((*self.opens, *self.closes, *(marker for pair in self.wrappers for marker in pair)))

    def phase(self, prompt: str, continued: str | None = None) -> ThinkingPhase:
        """Return where an answer to this rendered prompt begins.

        continued: text of the last message if the answer continues it. Its thinking is over unless the text opens it.
        """
        if continued is not None:
            opened, closed = _last_index(continued, self.openings), _last_index(continued, self.closes)
            return "inside" if opened > closed else "after"
        end = prompt[-256:].rstrip()
        if end.endswith(self.openings):
            return "inside"
        if end.endswith(self.closes):
            return "after"  # templates close the thinking at once if it is disabled
        return "inside" if self.always else "before"


def _last_index(text: str, markers: Sequence[str]) -> int:
    return max(text.rfind(marker) for marker in markers)


QWEN3 = ThinkingFormat(name="qwen3", opens=("<think>",), closes=("</think>",))
DEEPSEEK_R1 = replace(QWEN3, name="deepseek_r1", always=True)

GRANITE = ThinkingFormat(
    name="granite",
    opens=("<think>", "Here is my thought process:", "Here's my thought process:"),
    closes=("</think>", "Here is my response:", "Here's my response:"),
    wrappers=(("<response>", "</response>"),),
)

GEMMA4 = ThinkingFormat(
    name="gemma4",
    opens=("<|channel>",),
    closes=("<channel|>",),
    label="thought",
    may_recur=True,
    interrupts=("<|tool_call>",),
)

APERTUS = ThinkingFormat(name="apertus", opens=("<|inner_prefix|>",), closes=("<|inner_suffix|>",), may_recur=True)
COHERE = ThinkingFormat(
    name="cohere",
    opens=("<|START_THINKING|>",),
    closes=("<|END_THINKING|>",),
    wrappers=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
)
HUNYUAN = replace(QWEN3, name="hunyuan", wrappers=(("<answer>", "</answer>"),))
LONGCAT = ThinkingFormat(name="longcat", opens=("<longcat_think>",), closes=("</longcat_think>",))
MINICPM3 = ThinkingFormat(name="minicpm3", opens=("<|thought_start|>",), closes=("<|thought_end|>",))
MINIMAX_M3 = ThinkingFormat(name="minimax_m3", opens=("<mm:think>",), closes=("</mm:think>",))
MISTRAL = ThinkingFormat(name="mistral", opens=("[THINK]",), closes=("[/THINK]",))
SEED_OSS = ThinkingFormat(name="seed_oss", opens=("<seed:think>",), closes=("</seed:think>",))
_WITH_OWN_MARKERS = (APERTUS, COHERE, LONGCAT, MINICPM3, MINIMAX_M3, MISTRAL, SEED_OSS)

FORMATS = {
    each.name: each
    for each in (
        *(DEEPSEEK_R1, QWEN3, GRANITE, GEMMA4, APERTUS, COHERE, HUNYUAN, LONGCAT, MINICPM3, MINIMAX_M3, MISTRAL),
        SEED_OSS,
    )
}
NAMES = (AUTO, *FORMATS, HARMONY, NONE)


def format_of_template(template: str | None) -> str:
    """Return the name of the thinking format that a chat template contains, or `none`."""
    if template is None:
        return NONE
    if "<|channel|>" in template:
        return HARMONY
    if GEMMA4.opens[0] in template:
        return GEMMA4.name
    for each in _WITH_OWN_MARKERS:
        if each.opens[0] in template or each.closes[0] in template:
            return each.name
    if "thought process" in template or ("<think>" in template and "<response></response>" in template):
        return GRANITE.name
    if "</think>" not in template and "<think>" not in template:
        return NONE
    if "<answer>" in template:
        return HUNYUAN.name
    # DeepSeek's models always think, even if their template does not open the thinking.
    return DEEPSEEK_R1.name if "<\uff5cAssistant\uff5c>" in template else QWEN3.name


class _ThinkingStage:
    """State shared by the parsers that separate thinking from the answer. See `OutputParser` and `TracksThinking`.

    phase: where the text begins. plan: parses the answer.
    """

    def __init__(self, format: ThinkingFormat, phase: ThinkingPhase, plan: ParsingPlan) -> None:
        self._format = format
        self._plan = plan
        self._rest: OutputParser = plan.new_parser()
        self._opened = phase == "inside"
        self._held = ""  # possibly the beginning of a marker or label
        self._spaces: list[str] = []  # white space that is thinking only if more thinking follows
        self._emitted = False  # whether some thinking was emitted
        self._separate = False  # whether the next thought is separate from the last one

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    @property
    def has_thought(self) -> bool:
        return self._opened

    def _reasoning_events(self, text: str) -> list[Event]:
        """Return the events of thinking, without white space around each thought."""
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


class ThinkingParser(_ThinkingStage):
    """Parser of answers with one thought at the beginning.

    White space around the thinking belongs neither to it nor to the answer. A call after an opener of calls ends the
    thinking; text after such a marker that is not a call belongs to the thinking.
    """

    def __init__(self, format: ThinkingFormat, phase: ThinkingPhase, plan: ParsingPlan) -> None:
        super().__init__(format, phase, plan)
        self._phase = phase
        self._at_start = phase != "after"  # whether a marker may follow
        self._ends = (*format.closes, *plan.call_openers)
        self._probe: _InterruptingCall | None = None  # parses `_held`, which begins with an opener of calls
        self._failed_probes = 0
        if phase == "after":
            self._begin_unthinking_answer()

    @property
    def in_call(self) -> bool:
        return self._rest.in_call and self._phase == "after"

    @property
    def thinking(self) -> bool:
        return self._phase != "after"

    def feed(self, text: str) -> list[Event]:
        if self._at_start:
            text, self._held = self._start(self._held + text)
        if not text:
            return []
        return self._think(text) if self.thinking else self._rest.feed(text)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        while self._probe is not None:
            made = self._probe.finish()
            if made and isinstance(made[0], CallStart):
                self._phase = "after"
                return events + made
            events += self._think(self._give_up_probe(events))
        held, self._held = self._held, ""
        if self._phase == "after":
            return [*events, *self._rest.finish()]
        if self._at_start and not self._opened:  # possibly an incomplete marker
            return [*self._rest.feed(held), *self._rest.finish()]
        return [*events, *self._reasoning_events(held), *self._rest.finish()]

    def _start(self, text: str) -> tuple[str, str]:
        """Skip a marker; return the text after it and the text held back until the marker is complete."""
        markers = self._format.opens if self._opened else (*self._format.opens, *self._format.closes)
        visible = text.lstrip(SPACE)
        if len(text) - len(visible) <= MAX_LEADING_SPACE:
            for marker in markers:
                if visible.startswith(marker):
                    self._at_start = False
                    rest = visible[len(marker) :]
                    if marker not in self._format.opens:  # a model that was asked not to think closes the thinking
                        self._begin_answer()
                        return rest, ""
                    self._phase, self._opened = "inside", True
                    return rest, ""
            if any(marker.startswith(visible) for marker in markers):
                return "", text
        self._at_start = False
        if not self._opened:
            self._begin_unthinking_answer()
        return text, ""

    def _begin_unthinking_answer(self) -> None:
        self._phase = "after"
        if self._format.wrappers:
            self._rest = _AnswerParser(self._rest, self._format.wrappers, keep_space=True)

    def _begin_answer(self) -> None:
        self._phase = "after"
        self._rest = _AnswerParser(self._rest, self._format.wrappers)

    def _think(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._probe is None:
                buffer, self._held = self._held + text, ""
                found = find_marker(buffer, self._ends)
                if found is None:
                    safe = len(buffer) - partial_marker_length(buffer, self._ends)
                    self._held = buffer[safe:]
                    return events + self._reasoning_events(buffer[:safe])
                start, end = found
                events += self._reasoning_events(buffer[:start])
                if buffer[start:end] in self._format.closes:
                    self._begin_answer()
                    return events + self._rest.feed(buffer[end:])
                text = buffer[start:]
                self._probe = _InterruptingCall(self._plan.new_parser(), self._format.closes)
            # In pieces, because most probes fail at once, and up to a limit that does not depend on how the text is split.
            piece = text[: min(PROBE_PIECE, MAX_PROBED - len(self._held))]
            self._held, text = self._held + piece, text[len(piece) :]
            made = self._probe.feed(piece)
            if made and isinstance(made[0], CallStart):
                return events + made + self._interrupt(self._probe, text)
            if made or len(self._held) >= MAX_PROBED:
                text = self._give_up_probe(events) + text
        return events

    def _interrupt(self, rest: OutputParser, text: str) -> list[Event]:
        """Continue with the text after the beginning of a call."""
        self._held, self._probe, self._phase, self._rest = "", None, "after", rest
        return rest.feed(text) if text else []

    def _give_up_probe(self, events: list[Event]) -> str:
        """Add the opener to the thinking and return the text after it."""
        text, self._held, self._probe = self._held, "", None
        self._failed_probes += 1
        if self._failed_probes == MAX_FAILED_PROBES:
            self._ends = self._format.closes
        opener = max(len(marker) for marker in self._plan.call_openers if text.startswith(marker))
        events += self._reasoning_events(text[:opener])
        return text[opener:]


class _InterruptingCall:
    """Parser of a call within the thinking and of the text after it, without the closing marker of the thinking."""

    def __init__(self, rest: OutputParser, closes: tuple[str, ...]) -> None:
        self._rest = rest
        self._closes = closes
        self._held = ""

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    def feed(self, text: str) -> list[Event]:
        buffer, self._held = self._held + text, ""
        events: list[Event] = []
        while buffer:
            found = find_marker(buffer, self._closes)
            if found is None:
                safe = len(buffer) - partial_marker_length(buffer, self._closes)
                self._held = buffer[safe:]
                return events + (self._rest.feed(buffer[:safe]) if safe else [])
            start, end = found
            events += self._rest.feed(buffer[:start]) if start else []
            if self._rest.in_call:
                events += self._rest.feed(buffer[start:end])
            buffer = buffer[end:]
        return events

    def finish(self) -> list[Event]:
        return [*(self._rest.feed(self._held) if self._held else ()), *self._rest.finish()]


class _AnswerParser:
    """Parser of the answer after the thinking: removes leading white space and the markers around the answer."""

    def __init__(self, rest: OutputParser, wrappers: tuple[tuple[str, str], ...], *, keep_space: bool = False) -> None:
        self._rest = rest
        self._keep_space = keep_space  # unless a wrapper follows
        self._wrappers = wrappers  # empty once one was read or can no longer follow
        self._closing = ""  # end of the wrapper, after its beginning was read
        self._started = False
        self._held = ""

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    def feed(self, text: str) -> list[Event]:
        buffer, self._held = self._held + text, ""
        if not self._started:
            visible = buffer.lstrip(SPACE)
            for opening, closing in self._wrappers:
                if visible.startswith(opening):
                    buffer = visible = visible[len(opening) :].lstrip(SPACE)
                    self._closing, self._wrappers, self._keep_space = closing, (), False
            if any(opening.startswith(visible) for opening, _ in self._wrappers) and len(buffer) <= MAX_LEADING_SPACE:
                self._held = buffer
                return []
            if not self._keep_space:
                buffer = visible
            self._started = bool(buffer)
        if self._closing:
            at = buffer.find(self._closing)
            if at < 0:
                safe = len(buffer) - partial_marker_length(buffer, (self._closing,))
                safe = max(len(buffer[:safe].rstrip(SPACE)), safe - MAX_LEADING_SPACE)
                buffer, self._held = buffer[:safe], buffer[safe:]
            else:
                buffer = buffer[:at].rstrip(SPACE) + buffer[at + len(self._closing) :]
                self._closing = ""
        return self._rest.feed(buffer) if buffer else []

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        return [*(self._rest.feed(held) if held else ()), *self._rest.finish()]


class ChannelParser(_ThinkingStage):
    """Parser of answers with any number of thoughts.

    White space around the thinking belongs neither to it nor to the answer until the answer has begun.
    Every channel is thinking, with or without the label.
    """

    def __init__(self, format: ThinkingFormat, phase: ThinkingPhase, plan: ParsingPlan) -> None:
        super().__init__(format, phase, plan)
        self._interrupts = (*format.interrupts, *plan.call_openers)
        self._inside = self._opened
        self._may_open = phase == "before"
        self._labelled = False  # whether the last text was an opening marker
        self._leading_space = ""  # white space that is content only if no thinking follows
        self._started = False  # whether the answer has begun

    @property
    def thinking(self) -> bool:
        return self._inside or self._may_open

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
            markers = (*self._format.opens, *self._format.closes, *(self._interrupts if self._inside else ()))
            found = find_marker(buffer, markers)
            if found is None:
                safe = len(buffer) - partial_marker_length(buffer, markers)
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
        """Process a marker; return False if it belongs to the answer."""
        if self._inside:
            self._labelled = marker in self._format.opens
            self._inside = self._labelled
            self._separate = not self._inside
            self._started = self._started or marker in self._interrupts
            return marker not in self._interrupts
        if self._rest.in_call:
            return False
        if marker in self._format.opens:
            self._inside = self._opened = self._labelled = True
            self._may_open, self._leading_space = False, ""
        return True

    def _handle_text(self, text: str) -> list[Event]:
        """Process text without markers."""
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


class AnswerLocator:
    """Finds the answer in a text with thinking and markup, so that stop strings are searched only there.

    parser: emits the answer as content.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._held = ""  # may belong to the answer

    @property
    def in_answer(self) -> bool:
        """Whether the text so far ends in the answer."""
        return not (isinstance(self._parser, TracksThinking) and self._parser.thinking)

    def feed(self, text: str, *, final: bool = False) -> list[tuple[str, bool]]:
        """Return the text in pieces, and whether each belongs to the answer. final: no text follows."""
        events = self._parser.feed(text) if text else []
        if final:
            events += self._parser.finish()
        answer = "".join(event.text for event in events if isinstance(event, Content))
        held = self._held + text
        pieces: list[tuple[str, bool]] = []
        if answer:
            at = held.rfind(answer)
            # Markup within the answer is searched with it.
            start, end = (0, len(held)) if at < 0 else (at, at + len(answer))
            pieces = [(held[:start], False), (held[start:end], True)]
            held = held[end:]
        parser = self._parser
        thinks = isinstance(parser, TracksThinking) and parser.thinking and parser.has_thought
        if final or thinks or len(held) > _MAX_HELD:
            pieces.append((held, False))
            held = ""
        self._held = held
        return [piece for piece in pieces if piece[0]]


class ThinkingControl:
    """Thinking of the served model; one instance per application.

    parser: value of `--reasoning-parser`. name: of the format, `none` if thinking is not separated from answers.
    choices: variables by which the chat template lets a request control the thinking.
    """

    def __init__(self, parser: str, tokenizer: Tokenizer) -> None:
        template = tokenizer.chat_template or tokenizer.tool_template
        self._template = template or ""
        # By closing markers and those of calls. Cached, because dozens of texts are tokenized for one budget.
        self._budgets: dict[tuple[tuple[str, ...], ...], ThinkingBudget] = {}
        self.name = format_of_template(template) if parser == AUTO else parser
        self.format = FORMATS.get(self.name)
        self._tokenizer = tokenizer
        self.choices = variables_read(self._template + (tokenizer.tool_template or ""), (*_SWITCHES, _EFFORT))

    @property
    def separates_thinking(self) -> bool:
        """Whether thinking is separated from the answer, so that a budget can end it."""
        return self.format is not None or self.name == HARMONY

    def phase(self, prompt: str, continued: str | None) -> ThinkingPhase:
        """Return where an answer to the rendered prompt begins; see `ThinkingFormat.phase`."""
        if self.format is None:
            return "before" if self.name == HARMONY else "after"
        return self.format.phase(prompt, continued)

    def parsing(self, plan: ParsingPlan | None, phase: ThinkingPhase) -> ParsingPlan | None:
        """Return the plan with a stage before it that separates the thinking."""
        format = self.format
        if format is None:  # the tool call parser of harmony separates its channels
            return channel_parsing_plan() if plan is None and self.name == HARMONY else plan
        rest = ParsingPlan(PlainTextParser) if plan is None else plan
        stage = ChannelParser if format.may_recur else ThinkingParser
        return replace(rest, new_parser=lambda: stage(format, phase, rest), markers=rest.markers | format.markers)

    def answer_locator(self, phase: ThinkingPhase) -> AnswerLocator | None:
        """Return a locator of the answer, None if everything is the answer."""
        if self.format is not None and phase == "after" and not self.format.may_recur:
            return None
        plan = self.parsing(None, phase)
        return None if plan is None else AnswerLocator(plan.new_parser())

    def budget(self, tokens: int | None, phase: ThinkingPhase, plan: ParsingPlan | None) -> ThinkingBudget | None:
        """Return the budget that ends the thinking after `tokens` tokens, None without a limit or without thinking.

        plan: of the answer. A call within the thinking is finished first.
        Raises ApiError if the thinking is not separated from answers.
        """
        if tokens is None:
            return None
        if self.format is not None:
            opens, closes = self.format.openings, self.format.closes
        elif self.name == HARMONY:
            opens, closes = HARMONY_OPENS, HARMONY_CLOSES
        else:
            raise bad_request(
                "this server does not separate thinking from answers: leave it out, or set --reasoning-parser",
                _BUDGET,
                "unsupported_parameter",
            )
        if phase == "after":
            return None
        calls = () if plan is None else plan.call_openers, () if plan is None else plan.call_closers
        known = self._budgets.get((closes, *calls))
        if known is None:
            close = tuple(self.ids(min(closes, key=lambda one: (len(self.ids(one)) > 1, one not in self._template))))
            others = tuple(found for found in self._spellings(closes) if found != close)
            known = ThinkingBudget(0, close, self._spellings(opens), others, *map(self._spellings, calls))
            self._budgets[closes, *calls] = known
        return replace(known, tokens=tokens, opens=() if phase == "inside" else known.opens)

    def _spellings(self, markers: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of these markers with white space before and after, which may share a token with them.

        Sequences that contain a shorter one are omitted.
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
        """Return the token ids of a marker, usually one."""
        return self._tokenizer.encode(marker, add_special_tokens=False)

    def variables_to_enable(self) -> dict[str, Any]:
        """Return the template variables that turn thinking on; empty if the template has none."""
        return {name: True for name in _SWITCHES if name in self.choices}

    def nearest_effort(self, effort: str) -> str:
        """Return the level of the model that is nearest to an effort, if the model has levels."""
        return _HARMONY_EFFORTS.get(effort, effort) if self.name == HARMONY else effort

    def ignores_effort(self, effort: str) -> bool:
        """Return whether an effort has no effect. Without thinking, the effort `none` needs none."""
        return not self.choices and self.name != HARMONY and (effort != "none" or self.name != NONE)

    def variables(self, effort: str | None, template_kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the template variables of a request: those of `effort`, overridden by `chat_template_kwargs`.

        An effort that the template does not use has no effect.
        """
        if effort is None or self.ignores_effort(effort):
            return template_kwargs
        found: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in self.choices}
        if _EFFORT in self.choices:
            found[_EFFORT] = self.nearest_effort(effort)
        return {**found, **(template_kwargs or {})}


def variables_read(template: str, names: tuple[str, ...]) -> frozenset[str]:
    """Return those of the names that a template uses as variables, ignoring text, strings and attributes."""
    code = "\n".join(_JINJA_STRING.sub("''", block) for block in _JINJA_CODE.findall(template))
    return frozenset(name for name in names if re.search(rf"(?<![\w.]){name}(?!\w)", code))
