"""Tool calls whose arguments are JSON: call objects and lists of them, and names followed by arguments."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from windlass.server.text.stream_parser import MAX_NAME, CallOptions, ParserSteps, StreamParser

FENCE = "```"
_LANGUAGES = ("json", "JSON", "xml", "tool_call")
_LINES = ("\n{", "\n[")
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]")
_WORD = re.compile(r"[\w.\-]")
_SPACELESS = re.compile(r"[^\s<{]")
_CALL_ID = re.compile(r":\d+$")
_NAMESPACE = "functions."


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonForm:
    """Text around a call object or a list of them.

    opens: each begins calls of any function. uncertain: each begins calls of the request's functions, and is text otherwise.
    closes: optional text after calls. dropped: markers that are never content.
    starts, lines: JSON at the start of the text or of a line is a call if it names a function of the request.
    by_name: the name of the function is the key of its arguments. no_calls: names that mean an answer without calls.
    """

    opens: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    starts: bool = False
    lines: bool = False
    by_name: bool = False
    no_calls: tuple[str, ...] = ()


_TAGS = ("tools", "tool", "function_call", "response", "xml", "json", "JSON")
_FUNCTION_TAGS = ("<function=", "<function name=")
_UNCERTAIN = tuple(f"<{tag}>" for tag in _TAGS)
_CLOSES = ("</tool_call>", "<|/tool_call|>", *(f"</{tag}>" for tag in _TAGS), "</function>")
# Qwen 2.5 and its derivatives often write the tags of their prompt instead of those that they were asked for.
HERMES = JsonForm(
    opens=("<tool_call>", "<|tool_call|>"),
    uncertain=(*_UNCERTAIN, *_FUNCTION_TAGS, FENCE),
    closes=_CLOSES,
    starts=True,
    lines=True,
)
PLAIN = JsonForm(
    uncertain=("<tool_call>", "<|tool_call|>", "[TOOL_CALLS]", *HERMES.uncertain),
    closes=_CLOSES,
    starts=True,
    lines=True,
)
LLAMA3 = JsonForm(uncertain=("<|python_tag|>",), starts=True)
NEMOTRON = JsonForm(opens=("<TOOLCALL>",), closes=("</TOOLCALL>",))
HUNYUAN = JsonForm(opens=("<tool_calls>", "<tool_call>"), closes=("</tool_calls>", "</tool_call>"))
COHERE = JsonForm(
    opens=("<|START_ACTION|>",),
    uncertain=("Action:", FENCE),
    closes=("<|END_ACTION|>",),
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    no_calls=("directly_answer", "directly-answer"),
)
APERTUS = JsonForm(opens=("<|tools_prefix|>",), closes=("<|tools_suffix|>",), by_name=True)
PHI4_MINI = JsonForm(opens=("<|tool_call|>", "functools"), closes=("<|/tool_call|>",))
GRANITE_20B = JsonForm(opens=("<function_call>",), closes=("</function_call>",), no_calls=("no_function",))
INTERNLM = JsonForm(
    opens=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),  # with the space of older tokenizers
    closes=("<|action_end|>",),
)
LONGCAT = JsonForm(opens=("<longcat_tool_call>",), closes=("</longcat_tool_call>",))
GIGACHAT3 = JsonForm(opens=("function call<|role_sep|>", "<|function_call|>"), dropped=("<|message_sep|>",))


@dataclass(slots=True)
class _CallHead:
    """Members of a call object read so far."""

    name: str | None = None
    arguments: list[str] | None = None  # read before the name
    started: bool = False


class JsonCallParser(StreamParser):
    """Base of parsers of JSON call objects. by_name, no_calls: see `JsonForm`."""

    by_name = False
    no_calls: tuple[str, ...] = ()

    def known_name(self, written: str) -> str:
        """Return the name of a function without the namespace and the number that some models add to it."""
        if written in self.options.schemas:
            return written
        name = _CALL_ID.sub("", written)
        return name.removeprefix(_NAMESPACE) if name.startswith(_NAMESPACE) else name

    def call_object(self, known_only: bool = False) -> Generator[None, None, bool]:
        """Take {"name": …, "arguments": {…}} and emit the call; return False if the text is not one.

        known_only: accept only tools of the request, for formats without a marker before calls.
        The text of an emitted call is discarded; otherwise the caller can still emit the taken text as content.
        """
        head = _CallHead()
        complete = (yield from self.peek()) == "{" and (yield from self._members(head, known_only))
        if complete and not head.started and head.name:
            head.started = True
            if head.name not in self.no_calls:
                self.begin_call(head.name)
                self.emit_arguments("".join(head.arguments) if head.arguments is not None else "{}")
                self.end_call()
        if head.started:
            self.discard_taken()
        return head.started

    def _members(self, head: _CallHead, known_only: bool) -> Generator[None, None, bool]:
        """Take an object; return False if it is not a call or is not closed."""
        self.take(1)
        doubled = yield from self.take_literal("{")  # copied from a prompt with escaped braces
        while True:
            yield from self.skip_space()
            if (yield from self.take_literal("}")):
                break
            key = yield from self.take_string()
            yield from self.skip_space()
            if key is None or not (yield from self.take_literal(":")):
                return False
            yield from self.skip_space()
            if not (yield from self._member(key, head, known_only)):
                return False
            yield from self.skip_space()
            if not (yield from self.take_literal(",")):
                if (yield from self.take_literal("}")):
                    break
                return False
        if doubled:
            yield from self.skip_space()
            yield from self.take_literal("}")
        return True

    def _member(self, key: str, head: _CallHead, known_only: bool) -> Generator[None, None, bool]:
        character = yield from self.peek()
        if key == "function" and character == "{" and head.name is None:
            return (yield from self._members(head, known_only))
        if key in _NAME_KEYS and not (self.by_name and character == "{"):
            name = yield from self.take_string()
            if name is None or head.name is not None or not self._may_name(name, known_only):
                return False
            head.name = name
            return True
        if self.by_name and head.name is None and character == "{" and self._may_name(key, known_only):
            head.name = key
            return (yield from self._members_of_arguments(head))
        if key not in _ARGUMENT_KEYS or head.started or head.arguments is not None:
            return (yield from self._skip(character))
        if character == "{":
            return (yield from self._members_of_arguments(head))
        if character == '"':  # arguments as a JSON string
            inner = yield from self.take_string()
            head.arguments = None if inner is None else [inner.strip() or "{}"]
            return inner is not None and inner.lstrip()[:1] in ("{", "")
        return bool((yield from self.take_literal("null")))

    def _may_name(self, name: str, known_only: bool) -> bool:
        return (name in self.options.schemas if known_only else self.may_call(name)) or name in self.no_calls

    def _members_of_arguments(self, head: _CallHead) -> Generator[None, None, bool]:
        doubled = yield from self.take_literal("{{")
        if doubled:
            self.put_back(1)
        if head.name is None or head.name in self.no_calls:
            head.arguments = []
            closed = yield from self.take_brackets(head.arguments.append)
        elif (yield from self.peek_object()):
            self.begin_call(head.name)
            head.started = True
            closed = yield from self.take_arguments()
        else:
            return False
        if closed and doubled:
            yield from self.skip_space()
            yield from self.take_literal("}")
        return closed

    def _skip(self, first: str) -> Generator[None, None, bool]:
        """Take the value of an unknown member."""
        if first == '"':
            return (yield from self.take_string()) is not None
        if first and first in "{[":
            return (yield from self.take_brackets(lambda text: None))
        return bool((yield from self.take_while(_SCALAR)))

    def call_list(self, known_only: bool = False) -> Generator[None, None, bool]:
        """Take one call object or an array of them; return False if no call was emitted. See `call_object`."""
        if (yield from self.peek()) != "[":
            return (yield from self.call_object(known_only))
        self.take(1)
        return (yield from self.rest_of_list(known_only))

    def rest_of_list(self, known_only: bool = False) -> Generator[None, None, bool]:
        """Take the rest of an array of call objects after its opening bracket."""
        made = False
        while True:
            yield from self.skip_space()
            if not (yield from self.call_object(known_only)):
                return made
            made = True
            yield from self.skip_space()
            if not (yield from self.take_literal(",")):
                if (yield from self.take_literal("]")):
                    self.discard_taken()
                return made

    def take_all(self, *choices: str) -> Generator[None, None, bool]:
        """Take any number of `choices` and the white space around them; return whether there were any."""
        found = False
        while True:
            yield from self.skip_space()
            if not (yield from self.take_literal(*choices)):
                return self.take_truncated_tag(choices) or found
            found = True


class JsonFormParser(JsonCallParser):
    """Parser of call objects and lists of them, in the surroundings that a form describes."""

    def __init__(self, form: JsonForm, options: CallOptions) -> None:
        self._form = form
        self.by_name, self.no_calls = form.by_name, form.no_calls
        self._openers = (*form.opens, *form.uncertain)
        super().__init__(options)

    def run(self) -> ParserSteps:
        form = self._form
        markers = (*self._openers, *form.dropped, *(_LINES if form.lines else ()))
        if form.starts:
            yield from self.skip_space()
            if (yield from self.peek()) in ("{", "["):
                yield from self._calls("")
            self.emit_taken()
        while marker := (yield from self.pass_until(markers, self.emit_content)):
            if marker in form.dropped:
                self.discard_taken()
                continue
            if marker in _LINES:
                self.put_back(1)
            yield from self._calls(marker)

    def _calls(self, marker: str) -> ParserSteps:
        """Take the calls after an opening marker, and what closes them."""
        form = self._form
        certain, fenced = marker in form.opens, marker == FENCE
        tagged = marker in self._openers
        while True:  # further markers
            if fenced and marker == FENCE:
                yield from self.take_literal(*_LANGUAGES)
            yield from self.skip_space()
            found = yield from self.take_literal(*self._openers)
            if not found:
                break
            marker, tagged = found, True
            certain, fenced = certain or found in form.opens, fenced or found == FENCE
        if marker in _FUNCTION_TAGS:
            made = yield from self._tagged_function()
        else:
            made = yield from self.call_list(known_only=not certain)
        if self.emit_taken() or not made:
            return
        while True:
            yield from self.skip_space()
            closes = (*form.closes, *form.dropped, *((FENCE,) if fenced else ()), *(("}", "]") if tagged else ()))
            if closes and (found := (yield from self.take_literal(*closes))):
                fenced = fenced and found != FENCE
                tagged = tagged and found in ("}", "]")
                certain = certain and tagged
                self.discard_taken()
                continue
            if self.take_truncated_tag(closes):
                self.discard_taken()
                return
            separated = yield from self.take_literal(",", ";")
            yield from self.skip_space()
            if (yield from self.peek()) not in ("{", "["):
                if separated:
                    self.emit_taken()
                self.discard_taken()
                return
            if not (form.starts or certain or fenced):
                self.emit_taken()
                return
            self.discard_taken()
            made = yield from self.call_list(known_only=not certain)
            if self.emit_taken() or not made:
                return

    def _tagged_function(self) -> Generator[None, None, bool]:
        """Take `weather>{…}` or `"weather">{…}`, the rest of a tag and the arguments after it."""
        yield from self.take_literal('"', "'")
        name = yield from self.take_while(_WORD)
        yield from self.take_literal('"', "'")
        if not (yield from self.take_literal(">")) or name not in self.options.schemas:
            return False
        yield from self.skip_space()
        if not (yield from self.peek_object()):
            return False
        self.begin_call(name)
        yield from self.take_arguments()
        self.discard_taken()
        return True


class MistralParser(JsonCallParser):
    """Parser of both formats of Mistral: JSON objects, or name and arguments between markers."""

    def run(self) -> ParserSteps:
        while (yield from self.pass_until(("[TOOL_CALLS]",), self.emit_content)):
            yield from self.skip_space()
            character = yield from self.peek()
            if character and character in "[{":
                yield from self.call_list()
            else:
                yield from self._named()
            self.emit_taken()

    def _named(self) -> Generator[None, None, None]:
        name = yield from self.take_while(_WORD)
        if (yield from self.take_literal("[CALL_ID]")):
            yield from self.take_while(_WORD)
        yield from self.take_literal("[ARGS]")
        yield from self.skip_space()
        if self.may_call(name) and (yield from self.peek_object()):
            self.begin_call(name)
            yield from self.take_arguments()
            self.discard_taken()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparatedForm:
    """Markers of a call whose name and arguments are separated by a marker: around all calls and around each."""

    calls: str
    call: str
    separator: str
    call_end: str
    calls_end: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.calls, self.call, self.separator, self.call_end, self.calls_end


DEEPSEEK = SeparatedForm(
    calls="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    calls_end="<｜tool▁calls▁end｜>",
)
KIMI_K2 = SeparatedForm(
    calls="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    calls_end="<|tool_calls_section_end|>",
)


class SeparatedParser(JsonCallParser):
    """Parser of name, separator and arguments.

    DeepSeek V3 writes the kind of call before the separator, and name and fenced JSON after it; DeepSeek V3.1 and Kimi K2
    write the name before it.
    """

    def __init__(self, form: SeparatedForm, options: CallOptions) -> None:
        self._form = form
        super().__init__(options)

    def run(self) -> ParserSteps:
        form = self._form
        while marker := (yield from self.pass_until((form.calls, form.call), self.emit_content)):
            if marker == form.calls:
                yield from self.skip_space()
                if not (yield from self.take_literal(form.call)):
                    self.emit_taken()
                    continue
            made = yield from self._call()
            self.emit_taken()
            if made:
                yield from self.take_all(FENCE, form.call_end, form.calls_end)
                self.discard_taken()

    def _call(self) -> Generator[None, None, bool]:
        yield from self.skip_space()
        name = yield from self.take_while(_SPACELESS)
        yield from self.skip_space()
        if not (yield from self.take_literal(self._form.separator)):
            return False
        yield from self.skip_space()
        if (yield from self.peek()) != "{":  # DeepSeek V3: the first word was the kind of call
            name = yield from self.take_while(_SPACELESS)
            yield from self.skip_space()
            yield from self.take_literal("```json")
            yield from self.skip_space()
        name = self.known_name(name)
        if len(name) >= MAX_NAME or not self.may_call(name) or not (yield from self.peek_object()):
            return False
        self.begin_call(name)
        yield from self.take_arguments()
        self.discard_taken()
        return True


RECIPIENT, TO_ALL = ">>>", "all"


class RecipientParser(JsonCallParser):
    """Parser of Functionary 3.2: `>>>weather\\n{…}`, and `>>>all\\n` before text. The prompt contains the first `>>>`."""

    def run(self) -> ParserSteps:
        marker = RECIPIENT
        while marker:
            made = yield from self._recipient()
            self.discard_taken() if made else self.emit_taken()
            marker = yield from self.pass_until((RECIPIENT,), self.emit_content)

    def _recipient(self) -> Generator[None, None, bool]:
        yield from self.take_literal(RECIPIENT)
        name = yield from self.take_while(_WORD)
        line = yield from self.take_literal("\n")
        if name in self.options.schemas:
            yield from self.skip_space()
            if (yield from self.peek_object()):
                self.begin_call(name)
                yield from self.take_arguments()
                return True
        return name == TO_ALL and bool(line)
