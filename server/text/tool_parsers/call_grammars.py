"""Call layouts, which describe calls as templates show them, and the Lark grammars that permit only such calls.

Values in calls: their types in a schema, and JSON of values that were written in another way.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.engine.interface.validation import MAX_GRAMMAR_CHARACTERS
from windlass.server.text.schema_rewriting import (
    enforced_schema,
    expand_ascii_classes,
    names_all_members,
    resolve_reference,
)
from windlass.server.text.stream_parser import as_json

MAX_SCHEMAS = 100  # visited for the types of one parameter: references may be cyclic or point to long lists
MAX_VALUES = 1000  # in an `enum` or a list of types; longer ones are ignored
ANY_TYPE = frozenset({"string", "null", "boolean", "number", "object", "array"})
MAX_PYTHON = 16384  # characters of a value in Python syntax: parsing longer ones would block the event loop
_CONSTANTS = {"True": True, "False": False, "None": None}
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
TEXT_TYPES = frozenset({"string", "null"})
_TYPE_NAMES = {str: "string", type(None): "null", bool: "boolean", int: "number", float: "number", dict: "object"}
_LEADING_ZEROS = re.compile(r"(-?)0+(\d+(?:\.\d+)?)", re.ASCII)
_LARGE_NUMBER = re.compile(r"\d[eE]\+?\d{3}")
_STRING = re.compile(r"""'(?:[^'\\]++|\\.)*+'|"(?:[^"\\]++|\\.)*+\"""", re.DOTALL)
_LINE_BREAK = re.compile(r"\\.|[\n\r]", re.DOTALL)
_ESCAPES = {"\n": "\\n", "\r": "\\r"}


@dataclass(slots=True)
class _Budget:
    left: int = MAX_SCHEMAS


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a schema of arguments permits for one parameter."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return _schema_types(found, schema, _Budget())


def _schema_types(schema: Any, root: Mapping[str, Any], budget: _Budget) -> frozenset[str]:
    """Return the JSON types that a schema permits, or all types once the budget is spent. Integers count as numbers."""
    if not budget.left:
        return ANY_TYPE
    budget.left -= 1  # also for items that are not schemas: lists of those can be long too
    if not isinstance(schema, Mapping):
        return ANY_TYPE
    types = ANY_TYPE
    if isinstance(reference := schema.get("$ref"), str):
        types &= _schema_types(resolve_reference(root, reference), root, budget)
    if isinstance(named := schema.get("type"), str | list):
        names = [named] if isinstance(named, str) else named
        if len(names) <= MAX_VALUES:
            types &= {"number" if each == "integer" else each for each in names if isinstance(each, str)}
    if "const" in schema:
        types &= {_TYPE_NAMES.get(type(schema["const"]), "array")}
    if isinstance(values := schema.get("enum"), list) and len(values) <= MAX_VALUES:
        types &= {_TYPE_NAMES.get(kind, "array") for kind in set(map(type, values))}
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            types &= frozenset[str]().union(*_types_of_each(branches, root, budget))
    if isinstance(parts := schema.get("allOf"), list):
        types = types.intersection(*_types_of_each(parts, root, budget))
    return types


def _types_of_each(schemas: Sequence[Any], root: Mapping[str, Any], budget: _Budget) -> Iterator[frozenset[str]]:
    """Yield the types of each schema. Once the budget is spent, all types represent the rest."""
    for schema in schemas:
        yield _schema_types(schema, root, budget)
        if not budget.left:
            yield ANY_TYPE
            return


def typed_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written without quotes; `types` are those that its schema permits."""
    if not types or not types <= TEXT_TYPES:
        try:
            return as_json(_CONSTANTS[text] if text in _CONSTANTS else json.loads(text, strict=False))
        except (ValueError, RecursionError):
            pass
        if "number" in types and "string" not in types and (number := decimal_number(text)):
            return number
        if text[:1] in ("{", "[") and (value := literal_json(text)):
            return value
    return text if text == "null" and "null" in types else json.dumps(text)


def decimal_number(text: str) -> str:
    """Return the JSON of a decimal number with leading zeros, empty if the text is not one."""
    found = _LEADING_ZEROS.fullmatch(text)
    return "".join(found.groups()) if found else ""


def literal_json(text: str) -> str | None:
    """Convert a Python value to JSON; return None if it is not a literal."""
    try:
        return as_json(json.loads(text, strict=False))
    except (ValueError, RecursionError):
        pass
    if number := decimal_number(text):
        return number
    if _LARGE_NUMBER.search(text):  # JSON, but infinite as a float
        try:
            json.loads(text, parse_constant=_reject)
            return text
        except (ValueError, RecursionError):
            pass
    if len(text) > MAX_PYTHON and text[:1] not in ("'", '"'):
        return None
    try:
        return as_json(_python_value(ast.parse(_one_line(text), mode="eval").body))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _one_line(text: str) -> str:
    """Escape the line breaks inside string literals, which Python does not permit."""
    return _STRING.sub(lambda found: _LINE_BREAK.sub(lambda each: _ESCAPES.get(each[0], each[0]), found[0]), text)


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_CONSTANTS:
        return _JSON_CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        found: dict[str, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant):
                raise ValueError("a key is not a constant")
            found[str(key.value)] = _python_value(item)
        return found
    value = ast.literal_eval(node)
    if isinstance(value, bytes | complex):
        raise ValueError("not a JSON value")
    return value


MAX_GRAMMAR_CALLS = 16  # per answer, for models that never stop calling
MAX_MEMBERS = 200  # per function with one rule per member: llguidance recurses from each rule to the next
MAX_BOUND = 1 << 20  # of a minimum or maximum length
PARAMETERS_OF = "// parameters of "  # comment line before a rule, followed by the function's name
CDATA, CDATA_END = "<![CDATA[", "]]>"
ITEM = "item"  # element of a list, in values that consist of elements
_MAX_DEPTH = 16  # of elements and references; deeper values are written as JSON
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_TAG_NAME = re.compile(r"[^<>\s=\"']{1,200}")
# Models write a newline after a call, before the token that ends the answer. If it could not end there, they would have to call
# again.
_NEWLINES_AFTER = r"(/\n{1,2}/)?"
_UNSUPPORTED_KEYWORDS = ("patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if")
_TOKEN = re.compile(r"(<(?!/?｜DSML｜)[^<>\s]+>|｜DSML｜|\]<\]minimax\[>\[|\[[A-Z_]+\])")
_LAST_TAG = re.compile(r"<[^<>]*>(?=\s*$)")
_PLACEHOLDER = re.compile(r"\$([a-z]+)")
_NUMBER = "/[0-9]{1,2}/"
ANNOTATIONS = frozenset(
    {
        *("$schema", "$comment", "title", "description", "default", "example", "examples", "deprecated"),
        *("readOnly", "writeOnly"),
    }
)
# Escapes with the same meaning everywhere, and classes.
_SIMPLE_PARTS = re.compile(r"\\[^bBAZzGkpP1-9]|\[\^?(?:\\.|[^\]\\\[])+\]", re.DOTALL)
_CONTEXTUAL = re.compile(r"[\^$\\\[]|\(\?(?!:)")  # in what remains: anchors, references, assertions, unusual classes


@dataclass(frozen=True, slots=True)
class CallGrammarOptions:
    """Input of a call grammar.

    schemas: parameters of each permitted function, by name. parallel: whether several calls are permitted.
    token: returns the Lark of a marker, which is a special token of the model or plain text.
    strict: functions whose schemas are rejected if they cannot be enforced completely.
    """

    schemas: Mapping[str, Mapping[str, Any]]
    parallel: bool
    token: Callable[[str], str]
    strict: Collection[str] = ()

    def schema_options(self, name: str) -> dict[str, Any]:
        """Return llguidance's options for the schema of a function."""
        return {**_SPACING, "lenient": name not in self.strict}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLayout:
    """Text of calls as a model's chat template shows them.

    head, tail: around the arguments of a call, with `$name` for the function and `$number` for a number below 100.
    before, between, after: around and between the calls. single: an answer has one call.
    argument: text of an argument with `$key` and `$value`, and with `$text` for whether the value is a text without quotes;
    empty if the arguments are a JSON object. separator: between arguments.
    excluded: texts that a value without quotes does not contain; without any, values are JSON. cdata: such a value with `<`,
    `&` or a line break is in a CDATA section. elements: objects and lists are elements in the form of arguments.
    """

    head: str
    tail: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    single: bool = False
    argument: str = ""
    separator: str = ""
    excluded: tuple[str, ...] = ()
    cdata: bool = False
    elements: bool = False

    def example(self, name: str, key: str, value: str) -> str:
        """Return a call with one argument."""
        argument = f"{{{json.dumps(key)}: {json.dumps(value)}}}"
        if self.argument:
            argument = _filled(self.argument, key=key, value=value, text="true")
        return self.before + _filled(self.head, name=name, number="0") + argument + self.tail + self.after

    @property
    def closes(self) -> tuple[str, ...]:
        """The tag at the end of the calls, if there is one."""
        return tuple(_LAST_TAG.findall(self.after or self.tail))

    @property
    def tokens(self) -> frozenset[str]:
        """Parts of the text that may be special tokens."""
        return marker_tokens(self.before, self.head, self.argument, self.tail, self.after)


def marker_tokens(*texts: str) -> frozenset[str]:
    """Return the parts of these texts that may be special tokens."""
    return frozenset(token for text in texts for token in _TOKEN.findall(text) if "$" not in token)


def _filled(text: str, /, **values: str) -> str:
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def call_grammar(layout: CallLayout, options: CallGrammarOptions) -> str | None:
    """Return the Lark of calls in a layout, None if a schema cannot be expressed in it."""
    calls = call_rules(layout, options)
    if calls is None:
        return None
    lark = _Writer(options)
    parallel = options.parallel and not layout.single
    return "\n".join([call_sequence(parallel, *map(lark.text, (layout.before, layout.between, layout.after))), *calls])


def plain_json(several: CallLayout, one: CallLayout, options: CallGrammarOptions) -> str | None:
    """Return the Lark of a list of calls, or of one call if only one is permitted."""
    return call_grammar(several if options.parallel else one, options)


def harmony(layout: CallLayout, options: CallGrammarOptions) -> str:
    """Harmony: optional reasoning, then one message to a function. Its end marker ends the turn."""
    lark = _Writer(options)
    begin, end = lark.text("<|channel|>analysis<|message|>"), lark.text("<|end|><|start|>assistant")
    rules = call_rules(layout, options) or []
    return "\n".join([f"start: ({begin} REASONING {end})? call", r"REASONING: /(.|\n)*/", *rules])


def call_rules(layout: CallLayout, options: CallGrammarOptions) -> list[str] | None:
    """Return the rule `call` with one choice per function, and the rules of the arguments; None see `call_grammar`."""
    lark = _Writer(options)
    choices, rules = [], list[str]()
    remaining = MAX_GRAMMAR_CHARACTERS
    for number, (name, schema) in enumerate(options.schemas.items()):
        if layout.argument:
            if not _names_arguments(layout, name, schema):
                return None
            remaining -= len(json.dumps(definitions(schema))) * len(schema.get("properties") or ())
            function = _Arguments(layout, options, lark, number, name) if remaining >= 0 else None
            if function is None or not function.add_rules():
                return None
            arguments, added = function.start, function.rules
        else:
            parameters = parameters_schema(schema, strict=name in options.strict)
            arguments = f"arguments_{number}"
            added = [_json_rule(arguments, parameters, name, options)]
        choices.append(" ".join(filter(None, (lark.text(layout.head, name=name), arguments, lark.text(layout.tail)))))
        rules += added
    return [f"call: {' | '.join(choices)}", *rules]


# Rules shared by the formats


def lark_string(text: str) -> str:
    """Return a Lark string literal in ASCII."""
    return json.dumps(text)


def call_sequence(parallel: bool, before: str, between: str, after: str) -> str:
    """Return the rule `start`: calls with a separator, and newlines at the end."""
    more = f" ({between} call){{0,{MAX_GRAMMAR_CALLS - 1}}}" if parallel else ""
    return f"start: {before} call{more} {after} {_NEWLINES_AFTER}"


def parameters_schema(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return the schema of a call's arguments: an object without unnamed members, unless the schema permits them."""
    enforced = enforced_schema(schema, strict=strict)
    enforced.setdefault("type", "object")
    if names_all_members(enforced):
        enforced = {"properties": {}, **enforced, "additionalProperties": False}
    return enforced


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions that references within the schema point to."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def member_rules(suffix: str, names: Sequence[str], required: Any, separator: str) -> list[str]:
    """Return the rule `first_SUFFIX_0`: the members `value_SUFFIX_k` in order, where only required ones are mandatory.

    `first_SUFFIX_k` and `rest_SUFFIX_k` are the members from the k-th on, before and after one was written.
    """
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    rules = []
    for k, name in enumerate(names):
        value, rest = f"value_{suffix}_{k}", f"rest_{suffix}_{k + 1}"
        skip_first, skip_rest = ("", "") if name in needed else (f" | first_{suffix}_{k + 1}", f" | {rest}")
        rules.append(f"first_{suffix}_{k}: {value} {rest}{skip_first}")
        rules.append(f"rest_{suffix}_{k}: {lark_string(separator)} {value} {rest}{skip_rest}")
    last = len(names)
    return [*rules, f'first_{suffix}_{last}: ""', f'rest_{suffix}_{last}: ""']


def bounds_of(schema: Mapping[str, Any], minimum: str, maximum: str) -> tuple[int, int | None] | None:
    """Return the values of two keywords, (0, None) by default; None if they are not integers from 0 to `MAX_BOUND`."""
    low, high = schema.get(minimum, 0), schema.get(maximum)
    if type(low) is not int or not 0 <= low <= MAX_BOUND:
        return None
    return (low, high) if high is None or (type(high) is int and low <= high <= MAX_BOUND) else None


def _json_rule(rule: str, schema: Any, function: str, options: CallGrammarOptions) -> str:
    """Return a rule for JSON. The comment before it lets `grammars.py` name the function in error messages."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": options.schema_options(function)}
    return f"{PARAMETERS_OF}{function}\n{rule}: %json {json.dumps(schema)}"


def _names_arguments(layout: CallLayout, function: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a schema is a plain list of properties whose names the layout can show."""
    properties, required = schema.get("properties") or {}, schema.get("required")
    names = _TAG_NAME if layout.excluded else _IDENTIFIER
    return (
        not any(key in schema for key in _UNSUPPORTED_KEYWORDS)
        and isinstance(properties, Mapping)
        and all(
            isinstance(name, str) and name in properties for name in (required if isinstance(required, list) else ())
        )
        and len(properties) <= MAX_MEMBERS
        and all(map(names.fullmatch, properties))
        and names.fullmatch(function.replace("-", "_")) is not None
    )


class _Writer:
    """Writes text as Lark in which markers are tokens."""

    def __init__(self, options: CallGrammarOptions) -> None:
        self._token = options.token

    def text(self, text: str, /, **values: str) -> str:
        """Return the Lark of a text with placeholders."""
        return " ".join(lark for lark, _ in self.parts(text, **values))

    def parts(self, text: str, /, **values: str) -> list[tuple[str, bool]]:
        """Return the Lark of each part of a text, and whether it is plain text."""
        found = list[tuple[str, bool]]()
        for at, part in enumerate(_TOKEN.split(text)):
            if at % 2 and "$" not in part:
                lark = self._token(part)
                found.append((lark, not lark.startswith("<[")))
                continue
            for place, piece in enumerate(part.split("$number")):
                found += [(_NUMBER, True)] if place else []
                found += [(lark_string(_filled(piece, **values)), True)] if piece else []
        return found


class _Arguments:
    """Rules for the arguments of one function. start: name of the rule of all arguments."""

    def __init__(
        self, layout: CallLayout, options: CallGrammarOptions, lark: _Writer, number: int, function: str
    ) -> None:
        self._layout, self._options, self._lark, self._function = layout, options, lark, function
        self._schema = options.schemas[function]
        self._shared = definitions(self._schema)
        self._strict = function in options.strict
        self._number = number
        self._count = self._members = 0
        self._not_excluded = f"~/(?s:.*)({'|'.join(map(_escaped, layout.excluded))})(?s:.*)/"
        self.rules: list[str] = []
        self.start = f"first_{number}_0"

    def add_rules(self) -> bool:
        """Add the rules; return False if a value cannot be expressed."""
        properties = self._schema.get("properties") or {}
        return self._add_members(str(self._number), properties, self._schema.get("required"), 0)

    def _add_members(self, suffix: str, properties: Mapping[str, Any], required: Any, depth: int) -> bool:
        self._members += len(properties)
        for k, (key, value) in enumerate(properties.items()):
            rule = self._argument(key, value, depth)
            if rule is None:
                return False
            self.rules.append(f"value_{suffix}_{k}: {rule}")
        self.rules += member_rules(suffix, list(properties), required, self._layout.separator)
        return True

    def _argument(self, key: str, schema: Any, depth: int) -> str | None:
        """Return the Lark of an argument, None if a value without quotes cannot be expressed."""
        head, _, tail = self._layout.argument.partition("$value")
        types = parameter_types({**self._shared, "properties": {key: schema}}, key)
        is_text = bool(self._layout.excluded) and bool(types) and types <= TEXT_TYPES
        before = self._lark.text(head, key=key, text="true" if is_text else "false")
        after = self._lark.parts(tail, key=key)
        is_null = ""
        if is_text:
            texts = self._texts(schema, 0)
            if texts is None:
                return None
            if "$text" in head and '"null"' in texts:
                texts.remove('"null"')
                null = self._lark.text(head + "null" + tail, key=key, text="false")
                if not texts:
                    return null
                is_null = f" | {null}"
            plain = next((at for at, (_, is_plain) in enumerate(after) if not is_plain), len(after))
            # The lexer of llguidance takes the longest match: what ends a text must belong to its terminal.
            ends = " ".join(lark for lark, _ in after[:plain])
            terminal = f"TEXT_{self._number}_{self._next()}"
            self.rules.append(f"{terminal}: ({' | '.join(texts)}) {ends}")
            value, after = terminal, after[plain:]
        else:
            elements = self._elements(schema, depth) if self._layout.elements else None
            value = elements or self._json(schema)
        return " ".join((before, value, *(lark for lark, _ in after))) + is_null

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _json(self, schema: Any) -> str:
        rule = f"json_{self._number}_{self._next()}"
        if isinstance(schema, Mapping):
            shared = self._shared if '"$ref"' in json.dumps(schema) else {}
            schema = enforced_schema({**schema, **shared}, strict=self._strict)
        self.rules.append(_json_rule(rule, schema, self._function, self._options))
        return rule

    # ---- values without quotes ---------------------------------------------------------------------------------------
    def _texts(self, schema: Any, depth: int) -> list[str] | None:
        """Return terminals for the texts that a schema permits, and for null; None if they cannot be expressed."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        keys = schema.keys() - ANNOTATIONS - {"$defs", "definitions"}
        kinds = schema.get("type")
        if isinstance(reference := schema.get("$ref"), str):
            known, found = {"$ref"}, self._texts(resolve_reference(self._schema, reference), depth + 1)
        elif key := next((key for key in ("anyOf", "oneOf") if key in keys), ""):
            branches = schema[key] if isinstance(schema[key], list) else []
            listed = [self._texts(each, depth + 1) for each in branches]
            known, found = {key, "type"}, None if None in listed else [text for each in listed for text in each or ()]
        elif "const" in keys:
            known, found = {"const", "type"}, self._literals([schema["const"]])
        elif isinstance(values := schema.get("enum"), list):
            known, found = {"enum", "type"}, self._literals(values)
        elif isinstance(kinds, str | list) and _are_texts(named := [kinds] if isinstance(kinds, str) else kinds):
            known, found = {"type"}, ['"null"'] if "null" in named else []
            if "string" in named:
                bounds, pattern = bounds_of(schema, "minLength", "maxLength"), _whole_pattern(schema.get("pattern", ""))
                known |= ({"minLength", "maxLength"} if bounds else set()) | (set() if pattern is None else {"pattern"})
                low, high = bounds or (0, None)
                of_length = f"/(?s:.{{{low},{'' if high is None else high}}})/"
                found.append(self._any_text(f"{of_length} & /{pattern}/" if pattern else of_length))
        else:
            return None
        return found if found and not (self._strict and keys - known) else None

    def _any_text(self, text: str) -> str:
        if not self._layout.cdata:
            return f"({text} & {self._not_excluded})"
        return rf'({text} & ~/(?s:.*)[<&\n](?s:.*)/) | "{CDATA}" ({text} & ~/(?s:.*)\]\]>(?s:.*)/) "{CDATA_END}"'

    def _literals(self, values: Sequence[Any]) -> list[str] | None:
        texts = ["null" if value is None else value for value in values]
        if any(not isinstance(text, str) or any(each in text for each in self._layout.excluded) for text in texts):
            return None
        return [lark_string(text) for text in texts]

    # ---- values that are elements ------------------------------------------------------------------------------------
    def _elements(self, schema: Any, depth: int) -> str | None:
        """Return the name of a rule for an object or a list as elements, None if it is written as JSON."""
        if not isinstance(schema, Mapping) or depth >= _MAX_DEPTH:
            return None
        keys = schema.keys() - ANNOTATIONS
        count, number = len(self.rules), self._next()
        rule = f"elements_{self._number}_{number}"
        if schema.get("type") == "array" and keys <= {"type", "items", "minItems", "maxItems"} and "items" in keys:
            bounds, item = bounds_of(schema, "minItems", "maxItems"), self._argument(ITEM, schema["items"], depth + 1)
            if bounds is not None and item is not None:
                low, high = bounds
                self.rules.append(f"{rule}: ({item}){{{low},{'' if high is None else high}}}")
                return rule
        properties = schema.get("properties")
        if (
            schema.get("type") == "object"
            and keys <= {"type", "properties", "required", "additionalProperties"}
            and isinstance(properties, Mapping)
            and properties
            and names_all_members({**schema, "additionalProperties": False})
            and not schema.get("additionalProperties")
            and all(map(_TAG_NAME.fullmatch, properties))
            and self._members + len(properties) <= MAX_MEMBERS
            and self._add_members(f"{self._number}_{number}", properties, schema.get("required"), depth + 1)
        ):
            return f"first_{self._number}_{number}_0"
        del self.rules[count:]
        return None


def _whole_pattern(pattern: Any) -> str | None:
    """Return the pattern of all texts in which a pattern of a schema is found, None if Lark cannot express it."""
    if not isinstance(pattern, str):
        return None
    if not pattern:
        return ""
    body = pattern.removeprefix("^")
    ends = body.endswith("$") and not body.endswith("\\$")
    body = body.removesuffix("$") if ends else body
    bare = _SIMPLE_PARTS.sub("", body)
    if _CONTEXTUAL.search(bare) or (body != pattern and _has_top_level_choice(bare)):
        return None
    try:
        re.compile(body)
    except (re.error, OverflowError, RecursionError):
        return None
    whole = ("" if body != pattern and pattern[0] == "^" else "(?s:.*)") + f"(?:{body})" + ("" if ends else "(?s:.*)")
    return expand_ascii_classes(re.sub(r"\\/|/", r"\/", whole))


def _has_top_level_choice(bare: str) -> bool:
    depth = 0
    for character in bare:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "|" and not depth:
            return True
    return False


def _are_texts(kinds: Sequence[Any]) -> bool:
    return all(isinstance(kind, str) and kind in TEXT_TYPES for kind in kinds)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
