"""Compiler of structured output constraints to llguidance grammars, with error messages for unsupported ones.

Runs in text workers. `windlass.engine.interface.validation` has the limits under which the engine compiles the grammar
again, on a larger stack: a grammar that could end a process ends a text worker. llguidance compiles a rule or schema by
recursion into those that it refers to, so the depth is bounded before compiling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from windlass.engine.errors import RequestError
from windlass.engine.interface.validation import GRAMMAR_LIMITS, GRAMMAR_STACK_BYTES, MAX_GRAMMAR_CHARACTERS
from windlass.engine.process_setup import thread_stack_size
from windlass.server.text.schema_rewriting import (
    LARK_LITERAL,
    enforced_schema,
    expand_ascii_classes,
    expand_ascii_classes_in_lark,
    has_no_finite_document,
    resolve_reference,
    schema_children,
    without_patterns,
)
from windlass.server.text.tool_parsers.call_grammars import PARAMETERS_OF

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from windlass.server.text.tokenizer import Tokenizer

# A node takes up to 7 KB of `GRAMMAR_STACK_BYTES` in llguidance 1.9.
MAX_GRAMMAR_DEPTH = 2000

_NAME = r"[A-Za-z_]\w*"
# A definition's parameter, attributes and priority may follow its name.
_DEFINED = rf"^[ \t]*[?!]*(?P<defined>{_NAME})(?:::\w+)?[ \t]*(?:\[[^\n]*?\])?[ \t]*(?:\.-?\d+)?[ \t]*:(?!:)"
_TOKEN = re.compile(
    rf"{LARK_LITERAL}|(?P<json>%json)\b[ \t\r\n]*|{_DEFINED}|(?P<name>{_NAME})|(?P<bracket>[()\[\]])",
    re.DOTALL | re.MULTILINE,
)

# A node is the name of a rule, or a part of a schema. A reference is a node and the levels between it and what refers to it.
_Reference = tuple[Any, int]


def check_depth(grammar: str) -> None:
    """Raise ValueError if rules or schemas of a serialized grammar refer to each other too deeply."""
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"] if grammar.startswith("{") else []
    for part in parts or [{"lark_grammar": grammar}]:
        lark, schema = part.get("lark_grammar"), part.get("json_schema")
        depth = _depth([(schema, 1)], partial(_of_schema, root=schema)) if lark is None else _lark_depth(lark)
        if depth > MAX_GRAMMAR_DEPTH:
            raise ValueError(
                f"its rules or schemas refer to each other {depth} levels deep; the limit is {MAX_GRAMMAR_DEPTH}"
            )


def _lark_depth(text: str) -> int:
    rules: dict[str, list[_Reference]] = {}
    roots: dict[int, Any] = {}  # the document of each inline schema and of its parts, by id
    references: list[_Reference] = []
    brackets = position = 0
    decoder = json.JSONDecoder()
    while (token := _TOKEN.search(text, position)) is not None:
        position = token.end()
        if (name := token["defined"]) is not None:
            references, brackets = rules.setdefault(name, []), 0
        elif (name := token["name"]) is not None:
            references.append((name, brackets + 1))
        elif token["bracket"] is not None:
            brackets += 1 if token["bracket"] in "([" else -1
        elif token["json"] is not None:
            try:
                schema, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                continue  # the compiler reports it
            references.append((schema, brackets + 1))
            roots[id(schema)] = schema

    def referred(node: Any) -> Iterable[_Reference]:
        if isinstance(node, str):
            return rules.get(node, ())
        root = roots[id(node)]
        found = list(_of_schema(node, root))
        roots.update((id(part), root) for part, _ in found)
        return found

    # The first rule is `start`; rules that it does not use are compiled by themselves, if at all.
    return _depth([("start", 1), *((name, 1) for name in rules)], referred)


def _of_schema(part: Any, root: Any) -> Iterable[_Reference]:
    """The schemas of a schema in their order, and the one that its `$ref` names."""
    for child in schema_children(part):
        yield child, 1
    if isinstance(reference := part.get("$ref"), str):
        yield resolve_reference(root, reference), 1


def _depth(roots: Iterable[_Reference], referred: Callable[[Any], Iterable[_Reference]]) -> int:
    """The number of levels to which a traversal descends that visits each node once, in order, as the compiler does."""
    deepest = 0
    seen: set[Any] = set()
    stack = [(0, iter(roots))]
    while stack:
        depth, remaining = stack[-1]
        deepest = max(deepest, depth)
        for node, levels in remaining:
            key = node if isinstance(node, str) else id(node)
            if isinstance(node, str | dict) and key not in seen:
                seen.add(key)
                stack.append((depth + levels, iter(referred(node))))
                break
        else:
            stack.pop()
    return deepest


_MAX_REASON_LENGTH = 400
# llguidance's position of an error in a Lark grammar, and the lines of the grammar that it appends to the reason.
_LOCATION = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_SOURCE_LINE = re.compile(r"^ +(\d+) \| (.*)$", re.MULTILINE)
# A rule of a grammar of calls that is a schema.
_JSON_RULE = re.compile(r"^(\w+: %json )(\{.*\})$", re.MULTILINE)
# White space in a document: a space, or a line break and an indentation. Bounded, or a model could write it endlessly.
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r"(\x20|\x0A[\x20\x09]{0,32})",
    "coerce_one_of": False,
}
_UNSATISFIABLE = "no output satisfies it"
_KIND_NAMES = {
    "json_schema": "JSON schema",
    "strict_json_schema": "JSON schema",
    "regex": "pattern",
    "choice": "list of choices",
}


class GrammarCompiler:
    """Compiler of grammars. tokenizer: its added tokens may be used in grammars."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prepare(self) -> None:
        """Load the library and build the vocabulary before the first request. Starts no thread: the process may fork."""
        self._compile("json_object", "", "")

    def compile(self, kind: str, value: str, alternative: str = "") -> str:
        """Return the serialized grammar; see `StructuredOutput` for the arguments. Raises RequestError with the reason.

        Patterns that are not supported, such as those with look-ahead, are ignored where the schema is not strict.
        """
        with ThreadPoolExecutor(1) as pool:
            try:
                with thread_stack_size(GRAMMAR_STACK_BYTES):
                    compiled = pool.submit(self._compile_or_relax, kind, value, alternative)
            except RuntimeError:  # a thread cannot be started
                raise MemoryError from None
            return compiled.result()

    def _compile_or_relax(self, kind: str, value: str, alternative: str) -> str:
        try:
            return self._compile(kind, value, alternative)
        except RequestError:
            relaxed = self._relaxed(kind, value), self._relaxed("lark", alternative)
            if relaxed == (value, alternative):
                raise
        return self._compile(kind, *relaxed)

    def _relaxed(self, kind: str, value: str) -> str:
        """Return a schema, or the Lark of calls, without the unsupported patterns of schemas that are not strict."""
        if kind == "json_schema":
            return self._without_patterns(value)
        if kind != "lark":
            return value
        return _JSON_RULE.sub(lambda rule: rule[1] + self._without_patterns(rule[2], only_lenient=True), value)

    def _without_patterns(self, text: str, *, only_lenient: bool = False) -> str:
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if not isinstance(schema, dict) or (only_lenient and not schema.get("x-guidance", {}).get("lenient")):
            return text
        return json.dumps(schema) if without_patterns(schema, self._is_pattern) else text

    def _is_pattern(self, pattern: str) -> bool:
        """Return whether a pattern is supported, or malformed in every dialect."""
        try:
            self._check("regex", _serialize_schema(json.dumps({"type": "string", "pattern": pattern})))
        except MemoryError:
            raise
        except BaseException:  # panics of the Rust libraries are not Exceptions
            return _is_malformed(pattern)  # which the compiler reports
        return True

    def _compile(self, kind: str, value: str, alternative: str) -> str:
        try:
            grammar = _serialize(kind, value)
        except MemoryError:
            raise
        except BaseException as error:  # panics of the Rust libraries are not Exceptions
            raise RequestError(_error_message(kind, str(error) or type(error).__name__)) from None
        self._check(kind, grammar)
        if alternative:
            grammar = _alternatives(grammar, alternative)
            self._check(kind, grammar)
        return grammar

    def _check(self, kind: str, grammar: str) -> None:
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(f"the grammar has {len(grammar)} characters; the limit is {MAX_GRAMMAR_CHARACTERS}")
        try:
            check_depth(grammar)
        except ValueError as error:
            raise RequestError(_error_message(kind, str(error))) from None
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._byte_tokenizer, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
        if matcher.is_error() or not any(matcher.compute_bitmask()) or matcher.is_error():
            raise RequestError(_error_message(kind, matcher.get_error() or _UNSATISFIABLE))

    @cached_property
    def _byte_tokenizer(self) -> LLTokenizer:
        """Vocabulary of single bytes and the model's added tokens at their ids: sufficient for checks and fast to build."""
        from llguidance import LLTokenizer, TokenizerWrapper

        added = self._tokenizer.backend.get_added_tokens_decoder()
        tokens = [b""] * (max(self._tokenizer.vocab_size, len(added)) + 257)
        for token_id, token in added.items():
            tokens[token_id] = token.content.encode()
        free = [token_id for token_id, token in enumerate(tokens) if not token][:257]
        for byte, token_id in enumerate(free[:256]):
            tokens[token_id] = bytes([byte])
        special = [token_id for token_id, token in added.items() if token.special]
        known = _ByteVocabulary(tokens, [*special, free[256]], {byte: free[byte] for byte in range(256)})
        return LLTokenizer(TokenizerWrapper(known), n_vocab=len(tokens), eos_token=free[256])


def _is_malformed(pattern: str) -> bool:
    """Return whether the brackets or repetitions of a pattern are wrong. Escapes differ among dialects."""
    try:
        re.compile(pattern)
    except re.error as error:
        return error.msg.startswith(("missing )", "unbalanced", "unterminated", "nothing to repeat"))
    except (OverflowError, RecursionError):
        return False
    return False


class _ByteVocabulary:
    """Vocabulary in llguidance's interface. The last special token is the end of a text."""

    def __init__(self, tokens: list[bytes], special: list[int], bytes_: dict[int, int]) -> None:
        self.tokens, self.special_token_ids, self._bytes = tokens, special, bytes_
        self.eos_token_id, self.bos_token_id = special[-1], None
        tokens[special[-1]] = b"<end of the probe>"

    def __call__(self, text: bytes) -> list[int]:
        return [self._bytes[byte] for byte in text]


def _alternatives(grammar: str, lark: str) -> str:
    """Return the grammar that permits either of two grammars."""
    # llguidance serializes Lark unchanged, and a schema as a list with one grammar.
    form = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    both = [{**form, "name": "form"}, {"lark_grammar": lark, "name": "calls"}]
    return json.dumps({"grammars": [{"lark_grammar": "start: @form | @calls"}, *both]})


def _serialize(kind: str, value: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match kind:
        case "json_object":
            return _serialize_schema('{"type": "object"}')
        case "json_schema" | "strict_json_schema":
            return _serialize_schema(value, strict=kind == "strict_json_schema")
        case "regex":
            return LLMatcher.grammar_from_regex(expand_ascii_classes(value))
        case "choice":
            choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(value))
            return LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
        case "grammar":
            return LLMatcher.grammar_from_lark(expand_ascii_classes_in_lark(any_to_lark(value)))
        case _:
            return LLMatcher.grammar_from_lark(value)


def _serialize_schema(text: str, *, strict: bool = False) -> str:
    """Return the grammar of a JSON schema. strict: reject keywords that cannot be enforced instead of ignoring them."""
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(_UNSATISFIABLE if schema is False else "a schema must be an object")
    if "x-guidance" in schema:
        raise ValueError("x-guidance is reserved for the server")
    _check_references(schema)
    if has_no_finite_document(schema):
        raise ValueError("no document satisfies it: a required member contains itself endlessly")
    from llguidance import LLMatcher

    options: JsonCompileOptions = {**_JSON_OPTIONS, "lenient": not strict}
    return LLMatcher.grammar_from_json_schema(json.dumps(enforced_schema(schema, strict=strict)), overrides=options)


def _check_references(schema: Any) -> None:
    """Reject keywords whose meaning differs between drafts."""
    stack = [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if isinstance(item.get("$ref"), str) and isinstance(item.get("$id"), str):
                raise ValueError("$id next to $ref has different meanings in older and newer drafts")
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _error_message(kind: str, reason: str) -> str:
    what = f"this {_KIND_NAMES.get(kind, 'grammar')}"
    if (location := _LOCATION.match(reason)) is not None:
        above = dict(_SOURCE_LINE.findall(reason)).get(str(int(location[1]) - 1), "")
        if above.startswith(PARAMETERS_OF):  # the client has not seen this grammar
            what = f"the schema in the parameters of {above.removeprefix(PARAMETERS_OF)!r}"
            reason = _SOURCE_LINE.split(reason)[0][location.end() :]
    line = " ".join(reason.partition("\n<state>")[0].split())[:_MAX_REASON_LENGTH]
    if line.startswith("NoExtension"):
        line = _UNSATISFIABLE
    # The library mentions an option that clients cannot set.
    line = line.split(" Enable 'coerce_one_of'")[0] + " Write anyOf." if "coerce_one_of" in line else line
    return f"{what} cannot be followed: {line}"
