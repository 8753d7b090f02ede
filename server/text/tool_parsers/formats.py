"""Tool call formats by name, and detection of a template's format."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from windlass.server.text.stream_parser import StreamParser
from windlass.server.text.tool_parsers import forced_calls, gemma4, harmony, json_calls, pythonic
from windlass.server.text.tool_parsers.gemma4 import gemma4 as forced_gemma4
from windlass.server.text.tool_parsers.json_calls import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
    DeepSeekParser,
    Llama3JsonParser,
    MistralParser,
    PlainJsonParser,
    TaggedJsonParser,
)
from windlass.server.text.tool_parsers.pythonic import PythonicParser
from windlass.server.text.tool_parsers.xml_parameters import XmlParametersParser, no_grammar

_LETTERS = string.ascii_letters + string.digits

_TAGS = frozenset({*TaggedJsonParser.openers, *TaggedJsonParser.closers})

_MISTRAL = frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"})

_PYTHON = frozenset({"<|python_start|>", "<|python_end|>"})

_NAME, _ARGUMENTS = "the function's name", '{"an argument\'s name": "its value"}'

_JSON_CALL = f'{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}'

_JSON_LIST = f"[{_JSON_CALL}]"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write calls.

    parser: reads it. grammar: the Lark that forces it, None where the schemas have no such form.
    form: an example, for models that are told of it in words.
    needles: a template that has all strings of one of these lists teaches it; the first format found counts.
    markers: its special tokens, which a parser has to see. short_ids: whether ids of calls have nine characters.
    """

    name: str
    parser: type[StreamParser]
    grammar: Callable[[forced_calls.CallGrammarOptions], str | None]
    example: str
    template_markers: tuple[tuple[str, ...], ...] = ()
    markers: frozenset[str] = frozenset()
    short_ids: bool = False

    def new_id(self) -> str:
        """An id for a call."""
        letters = "".join(secrets.choice(_LETTERS) for _ in range(9 if self.short_ids else 24))
        return letters if self.short_ids else f"call_{letters}"


PLAIN_JSON = ToolFormat("plain_json", PlainJsonParser, forced_calls.plain_json, _JSON_LIST)

_FORMATS = (
    ToolFormat(
        "harmony",
        harmony.HarmonyParser,
        forced_calls.harmony,
        f"<|channel|>commentary to=functions.{_NAME} <|constrain|>json<|message|>{_ARGUMENTS}<|call|>",
        (("<|channel|>", "<|message|>"),),
        harmony.MARKERS,
    ),
    ToolFormat(
        "deepseek_v3",
        DeepSeekParser,
        forced_calls.deepseek_v3,
        f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}{_NAME}\n```json\n{_ARGUMENTS}\n```{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}",
        ((DEEPSEEK_CALLS, "```json"),),
        json_calls.DEEPSEEK_MARKERS,
    ),
    ToolFormat(
        "deepseek_v31",
        DeepSeekParser,
        forced_calls.deepseek_v31,
        f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}{_NAME}{DEEPSEEK_SEPARATOR}{_ARGUMENTS}{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}",
        ((DEEPSEEK_CALLS,),),
        json_calls.DEEPSEEK_MARKERS,
    ),
    ToolFormat(
        "mistral_args",
        MistralParser,
        forced_calls.mistral_args,
        f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}",
        (("[TOOL_CALLS]", "[ARGS]"),),
        _MISTRAL,
        short_ids=True,
    ),
    ToolFormat(
        "mistral",
        MistralParser,
        forced_calls.mistral_list,
        f"[TOOL_CALLS]{_JSON_LIST}",
        (("[TOOL_CALLS]",),),
        _MISTRAL,
        short_ids=True,
    ),
    ToolFormat(
        "gemma4",
        gemma4.Gemma4Parser,
        forced_gemma4,
        f"{gemma4.BEGIN}call:{_NAME}{{an argument's name:{gemma4.QUOTE}its value{gemma4.QUOTE}}}{gemma4.END}",
        ((gemma4.BEGIN,),),
        gemma4.MARKERS,
    ),
    ToolFormat(
        "granite", TaggedJsonParser, forced_calls.granite, f"<|tool_call|>{_JSON_LIST}", (("<|tool_call|>",),), _TAGS
    ),
    ToolFormat(
        "qwen3_coder",
        XmlParametersParser,
        no_grammar,
        f"<tool_call>\n<function={_NAME}>\n<parameter=an argument's name>\nits value\n</parameter>\n</function>\n</tool_call>",
        (("<function=",),),
        _TAGS,
    ),
    ToolFormat(
        "hermes",
        TaggedJsonParser,
        forced_calls.tagged,
        f"<tool_call>\n{_JSON_CALL}\n</tool_call>",
        (("<tool_call>",),),
        _TAGS,
    ),
    ToolFormat(
        "lfm2",
        pythonic.Lfm2Parser,
        forced_calls.lfm2,
        f"{pythonic.LFM2_BEGIN}[{_NAME}(an argument's name=its value)]{pythonic.LFM2_END}",
        ((pythonic.LFM2_BEGIN,), ("<|tool_list_start|>",), ("List of tools: [",)),
        pythonic.LFM2_MARKERS,
    ),
    ToolFormat(
        "pythonic",
        PythonicParser,
        forced_calls.pythonic,
        f"[{_NAME}(an argument's name=its value)]",
        (("<|python_start|>",), ("[func_name1(",)),
        _PYTHON,
    ),
    ToolFormat(
        "llama3_json",
        Llama3JsonParser,
        forced_calls.llama3_json,
        _JSON_CALL.replace("arguments", "parameters"),
        (("<|python_tag|>",), ("dictionary of argument name and its value",)),
        frozenset({"<|python_tag|>"}),
    ),
    PLAIN_JSON,
)

FORMATS = {each.name: each for each in _FORMATS}


def format_of(parser: str, template: str | None) -> ToolFormat:
    """The format that an operator chose by its name; for "auto" the one that the chat template teaches."""
    return detect(template) if parser == "auto" else FORMATS.get(parser, PLAIN_JSON)


def detect(template: str | None) -> ToolFormat:
    """The format that a chat template teaches; plain JSON where it names none that is known here."""
    for each in FORMATS.values():
        if any(
            all(needle in (template or "") for needle in template_markers) for template_markers in each.template_markers
        ):
            return each
    return PLAIN_JSON
