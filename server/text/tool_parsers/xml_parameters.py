"""Tool calls with XML tags for functions and parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from windlass.server.text.schema_rewriting import resolve_reference
from windlass.server.text.stream_parser import MAX_NAME, CallOptions, ParserSteps
from windlass.server.text.tool_parsers.call_grammars import (
    CDATA,
    CDATA_END,
    ITEM,
    TEXT_TYPES,
    definitions,
    parameter_types,
    typed_json,
)
from windlass.server.text.tool_parsers.json_calls import JsonCallParser

MAX_DEPTH = 64  # of elements in a value; deeper ones are left out
_NAME = re.compile(r"[^<>\s=\"']")
_ATTRIBUTES = re.compile(r"[^<>\n]")
_GLM_NAME = re.compile(r"[^<>\s{\[]")
_GLM_KEY = re.compile(r"[^<>]")
_TAG = re.compile(r"[^<>]")
_TAG_REST = re.compile(r"[^<>\n]*[<>\n]")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_STRING_REST = re.compile(r'[^"\\\n]*["\\\n]')
_TAG_NAME = re.compile(r"\s*[\"']?([^<>\s=\"']+)")
_NEXT_TAG = re.compile(r"\s*(?:[^<\s]|<[^>]*>)")
_CONTAINERS = frozenset({"array", "object"})
_M3_ENDS = ("<invoke name=", "</invoke>", "</tool_call>")


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlForm:
    """Tags of calls whose parameters are elements.

    wrappers, wrapper_ends: around one or several calls; optional. function, parameter: text before their names, which end at
    `>`. newlines: a line break after the opening and before the closing tag of a parameter does not belong to the value.
    """

    wrappers: tuple[str, ...] = ()
    wrapper_ends: tuple[str, ...] = ()
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    newlines: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that may follow a parameter."""
        return (self.parameter, self.function_end, *self.wrapper_ends, self.function, *self.wrappers)

    @property
    def excluded(self) -> tuple[str, ...]:
        """Texts that end a value, or change its meaning."""
        return (self.parameter_end, *self.tags, CDATA)


QWEN3_CODER = XmlForm(
    wrappers=("<tool_call>",),
    wrapper_ends=("</tool_call>",),
    function="<function=",
    function_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    newlines=True,
)
SEED = replace(QWEN3_CODER, wrappers=("<seed:tool_call>",), wrapper_ends=("</seed:tool_call>",), newlines=False)
MINIMAX_M2 = XmlForm(
    wrappers=("<minimax:tool_call>",),
    wrapper_ends=("</minimax:tool_call>",),
    function="<invoke name=",
    function_end="</invoke>",
    parameter="<parameter name=",
    parameter_end="</parameter>",
)
DSML = XmlForm(
    wrappers=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    wrapper_ends=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    function="<｜DSML｜invoke name=",
    function_end="</｜DSML｜invoke>",
    parameter="<｜DSML｜parameter name=",
    parameter_end="</｜DSML｜parameter>",
)
MINICPM5 = XmlForm(
    function="<function name=", function_end="</function>", parameter="<param name=", parameter_end="</param>"
)
M3_NAMESPACE = "]<]minimax[>["
MINIMAX_M3 = XmlForm(
    wrappers=(f"{M3_NAMESPACE}<tool_call>",),
    wrapper_ends=(f"{M3_NAMESPACE}</tool_call>",),
    function=f"{M3_NAMESPACE}<invoke name=",
    function_end=f"{M3_NAMESPACE}</invoke>",
    parameter=f"{M3_NAMESPACE}<",
    parameter_end=f"{M3_NAMESPACE}</",
)


def glm_form(tag: str) -> XmlForm:
    """Return the tags of GLM. The value has a tag of its own. tag: before their names."""
    return XmlForm(
        function=f"<{tag}tool_call>",
        function_end=f"</{tag}tool_call>",
        parameter=f"<{tag}arg_key>",
        parameter_end=f"</{tag}arg_value>",
    )


@dataclass(slots=True)
class _OpenCall:
    """Call whose parameters are read. types: of parameters read so far. names: of all parameters, empty if unknown."""

    schema: Mapping[str, Any]
    types: dict[str, frozenset[str]]
    names: frozenset[str]
    written: set[str] = field(default_factory=set)


class XmlParametersParser(JsonCallParser):
    """Parser of calls whose parameters are XML elements.

    A value is text if the schema permits only text, or text and null (written `null`). Otherwise it is parsed as JSON,
    and is text if it is not valid JSON. A parameter without a closing tag ends at the next tag, and a call at the next call.
    Calls in JSON, as a whole or between the tags of a function, are accepted too, because models sometimes write them.
    """

    def __init__(self, form: XmlForm, options: CallOptions) -> None:
        self._form = form
        self._types: dict[str, dict[str, frozenset[str]]] = {}  # by function
        super().__init__(options)

    def run(self) -> ParserSteps:
        form = self._form
        while marker := (yield from self.pass_until((*form.wrappers, form.function), self.emit_content)):
            if marker != form.function:
                yield from self.take_all(*form.wrappers)
                if (yield from self.peek()) == "{":
                    if (yield from self.call_list()):
                        yield from self._close()
                    self.emit_taken()
                    continue
                if not (yield from self.take_literal(form.function)):
                    self.emit_taken()
                    continue
            while (yield from self._function()):
                yield from self._close()
                if not (yield from self._next_function()):
                    break
            self.emit_taken()

    def _next_function(self) -> Generator[None, None, bool]:
        """Take the beginning of another call."""
        return bool((yield from self.take_literal(self._form.function)))

    def _close(self) -> ParserSteps:
        """Take closing tags after a call."""
        yield from self.take_all(self._form.function_end, *self._form.wrapper_ends)
        self.discard_taken()

    def _function(self) -> Generator[None, None, bool]:
        """Take a call after the tag of its function; return False if the rest of the text is content."""
        name = self.known_name((yield from self._function_name()))
        if not self.may_call(name):
            return False
        yield from self.skip_space()
        if (yield from self.peek_object()):
            self.begin_call(name)
            closed = yield from self.take_arguments()
            self.discard_taken()
            return closed
        schema = self.options.schemas.get(name, {})
        found = schema.get("properties")
        names = frozenset(found) if isinstance(found, Mapping) else frozenset[str]()
        self.begin_call(name)
        return (yield from self._parameters(_OpenCall(schema, self._types.setdefault(name, {}), names)))

    def _function_name(self) -> Generator[None, None, str]:
        """Take a function's name and the end of its tag; return an empty string if there is none."""
        name, _, closed = yield from self._name()
        if not closed:
            yield from self.skip_space()
            if not (yield from self.follows(self._form.parameter)):
                return ""
        return name

    def _name(self) -> Generator[None, None, tuple[str, str, bool]]:
        """Take a name, with or without quotes, attributes and `>`; return name, attributes and whether there was a `>`."""
        yield from self.take_literal('"', "'")
        name = yield from self.take_while(_NAME)
        yield from self.take_literal('"', "'")
        attributes = (yield from self.take_while(_ATTRIBUTES)) if name else ""
        closed = yield from self.take_literal(">")
        return ("" if len(name) >= MAX_NAME else name), attributes, bool(closed)

    def _parameters(self, call: _OpenCall) -> Generator[None, None, bool]:
        """Take parameters and emit them; return False if the text ends, or is content again."""
        form = self._form
        self.emit_arguments("{")
        self.discard_taken()
        while True:
            yield from self.skip_space()
            tag = yield from self.take_literal(*form.tags)
            if tag == form.parameter:
                if not (yield from self._parameter(call)):
                    self.discard_taken()
                    return False
                self.discard_taken()
                continue
            if not tag and (self.take_truncated_tag(form.tags) or not (yield from self.peek())):
                self.discard_taken()  # the answer was cut: the arguments stay open
                return False
            self.emit_arguments("}")
            self.end_call()
            if tag == form.function or tag in form.wrappers:  # the next call
                self.put_back(len(tag))
            if tag:
                self.discard_taken()
            return bool(tag)

    def _parameter(self, call: _OpenCall) -> Generator[None, None, bool]:
        """Take a parameter after the beginning of its tag and emit it; return False if the text ends."""
        name, attributes = yield from self._parameter_name()
        if not name:
            tag = yield from self.pass_until(self._form.tags, _drop)
            self.put_back(len(tag))
            return bool(tag)
        if name not in call.types:
            call.types[name] = parameter_types(call.schema, name)
        types = frozenset({"string"}) if 'string="true"' in attributes else call.types[name]
        value = yield from self._value(call, may_be_json=not types or not types <= TEXT_TYPES)
        if value is None:
            return False
        self._emit_member(call, name, typed_json(value, types))
        return True

    def _emit_member(self, call: _OpenCall, name: str, value: str) -> None:
        if name not in call.written:
            before = ", " if call.written else ""
            call.written.add(name)
            self.emit_arguments(f"{before}{json.dumps(name)}: {value}")

    def _parameter_name(self) -> Generator[None, None, tuple[str, str]]:
        """Take a parameter's name and the end of its tag, or of the line; return name and attributes."""
        name, attributes, closed = yield from self._name()
        if not closed and (yield from self.peek()) != "\n" and "\n" not in attributes:
            return "", ""
        return name, attributes

    def _value(self, call: _OpenCall, *, may_be_json: bool) -> Generator[None, None, str | None]:
        """Take a value and its closing tag, if it has one; return None if the text ends before.

        may_be_json: tags in its JSON strings belong to the value.
        """
        form = self._form
        parts: list[str] = []
        if (yield from self.take_literal(CDATA)):
            if not (yield from self.pass_until((CDATA_END,), parts.append)):
                return None
            yield from self.skip_space()
            yield from self.take_literal(form.parameter_end)
            self.take_truncated_tag((form.parameter_end,))
            return "".join(parts)
        closed, num_scanned, in_string = "", 0, False
        while not closed:
            closed = yield from self.pass_until((form.parameter_end, *form.tags), parts.append)
            if not closed:
                return None
            if may_be_json and "".join(parts[:2]).lstrip()[:1] in ("{", "[", '"'):
                in_string = _ends_in_string("".join(parts[num_scanned:]), in_string)
                num_scanned = len(parts)
            if in_string and (yield from self._string_goes_on()):
                parts.append(closed)
                closed = ""
                continue
            if closed == form.parameter_end:
                break
            if (yield from self._ends_value(closed, call, "".join(parts[-1:])[-1:] == "\n")):
                self.put_back(len(closed))
                break
            parts.append(closed)
            closed = ""
        value = "".join(parts)
        if form.newlines or closed != form.parameter_end:
            value = value.removeprefix("\n").removesuffix("\n") if form.newlines else value.rstrip("\n")
        return value

    def _string_goes_on(self) -> Generator[None, None, bool]:
        """Return whether the end of a JSON string follows in this line, so that the last tag was a part of it."""
        ahead = yield from self.look_ahead(_STRING_REST)
        found = _STRING_REST.match(ahead)
        return len(ahead) == MAX_NAME if found is None else found[0][-1] != "\n"

    def _ends_value(self, tag: str, call: _OpenCall, on_new_line: bool) -> Generator[None, None, bool]:
        """Return whether a tag within a value that has no closing tag so far ends it, rather than being a part of it."""
        form = self._form
        if tag == form.parameter:
            ahead = yield from self.look_ahead(_TAG_REST)
            name = _TAG_NAME.match(ahead)
            return name is not None and (not call.names or name[1] in call.names) and name[1] not in call.written
        if tag != form.function_end or form.function_end in form.wrapper_ends or on_new_line:
            return True
        ahead = (yield from self.look_ahead(_NEXT_TAG)).lstrip()
        return any(ahead.startswith(each) or each.startswith(ahead) for each in form.tags)


class GlmParser(XmlParametersParser):
    """Parser of GLM's calls: `<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>`."""

    def __init__(self, form: XmlForm, options: CallOptions) -> None:
        self._key_end = form.parameter.replace("<", "</")
        self._value_begin = form.parameter_end.replace("</", "<")
        super().__init__(form, options)

    def run(self) -> ParserSteps:
        form = self._form
        while (yield from self.pass_until((form.function,), self.emit_content)):
            while True:
                yield from self.skip_space()
                if (yield from self.peek()) in ("{", "["):
                    made = yield from self.call_list()
                else:
                    made = yield from self._function()
                if self.emit_taken() or not made:
                    break
                yield from self._close()
                if not (yield from self.take_literal(form.function)):
                    break
            self.emit_taken()

    def _function_name(self) -> Generator[None, None, str]:
        name = yield from self.take_while(_GLM_NAME)
        yield from self.skip_space()
        if (yield from self.follows(self._form.parameter)) or (yield from self.peek_object()):
            return name
        known = self.known_name(name) in self.options.schemas
        return name if known and (yield from self.follows(self._form.function_end)) else ""

    def _parameter_name(self) -> Generator[None, None, tuple[str, str]]:
        name = (yield from self.take_while(_GLM_KEY)).strip()
        yield from self.take_literal(self._key_end)
        yield from self.skip_space()
        return (name if (yield from self.take_literal(self._value_begin)) else ""), ""


def _ends_in_string(text: str, in_string: bool) -> bool:
    """Return whether JSON ends within a string. in_string: whether it also begins within one."""
    return '"' in _JSON_STRING.sub("", f'"{text}' if in_string else text)


def _drop(text: str) -> None:
    """Ignore text between elements."""


class _Element:
    """Element of a value of MiniMax M3, with its text and its children."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text: list[str] = []
        self.children: list[_Element] = []

    def json(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """Return the JSON of the element. schema: of an object with a member of this name."""
        types = parameter_types({**definitions(root), **schema}, self.name)
        if not self.children:
            text = "".join(self.text)
            if not text.strip() and types and types <= _CONTAINERS:
                return "[]" if "array" in types else "{}"
            return typed_json(text, types)
        found = schema.get("properties")
        own = found.get(self.name) if isinstance(found, Mapping) else None
        if isinstance(own, Mapping) and isinstance(reference := own.get("$ref"), str):
            own = resolve_reference(root, reference)
        own = own if isinstance(own, Mapping) else {}
        if all(child.name == ITEM for child in self.children) and ("array" in types or "object" not in types):
            members = {"properties": {ITEM: own.get("items")}}
            return f"[{', '.join(child.json(members, root) for child in self.children)}]"
        unique = {child.name: child for child in reversed(self.children)}
        written = (f"{json.dumps(name)}: {unique[name].json(own, root)}" for name in reversed(unique))
        return f"{{{', '.join(written)}}}"


class MiniMaxM3Parser(XmlParametersParser):
    """Parser of MiniMax M3's calls: each parameter is an element of its name, and values are elements too.

    Every tag follows a namespace marker. Elements named `item` are a list, others an object.
    """

    _begun = False  # whether the last call ended with the beginning of another one

    def _function_name(self) -> Generator[None, None, str]:
        name, _, closed = yield from self._name()
        return name if closed else ""

    def _next_function(self) -> Generator[None, None, bool]:
        begun, self._begun = self._begun, False
        return begun or (yield from super()._next_function())

    def _parameters(self, call: _OpenCall) -> Generator[None, None, bool]:
        self.emit_arguments("{")
        self.discard_taken()
        opened: list[_Element] = []
        while True:
            out = opened[-1].text.append if opened else _drop
            if not (yield from self.pass_until((M3_NAMESPACE,), out)):
                self.discard_taken()
                return False
            tag = yield from self.take_literal(*_M3_ENDS, "</", "<")
            if tag in _M3_ENDS:
                if opened:
                    self._emit_element(call, opened[0])
                self.emit_arguments("}")
                self.end_call()
                self._begun = tag == _M3_ENDS[0]
                return True
            if not tag:
                continue
            name = (yield from self.take_while(_TAG)).strip()
            yield from self.take_literal(">")
            self.discard_taken()
            if tag == "<" and name:
                child = _Element(name)
                if opened:
                    opened[-1].children.append(child)
                if len(opened) < MAX_DEPTH:
                    opened.append(child)
            elif any(each.name == name for each in opened):
                while (closed := opened.pop()).name != name:
                    pass
                if not opened:
                    self._emit_element(call, closed)

    def _emit_element(self, call: _OpenCall, element: _Element) -> None:
        if element.children:
            element.text.clear()
        self._emit_member(call, element.name, element.json(call.schema, call.schema))
