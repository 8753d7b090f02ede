"""Tool call formats by name, and detection of a chat template's format."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from windlass.server.text.stream_parser import StreamParser
from windlass.server.text.tool_parsers import call_grammars, gemma4, harmony, json_calls, pythonic
from windlass.server.text.tool_parsers.xml_parameters import XmlParametersParser

_ID_CHARACTERS = string.ascii_letters + string.digits
_TAGS = frozenset({*json_calls.TaggedJsonParser.openers, *json_calls.TaggedJsonParser.closers})
_MISTRAL_MARKERS = frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"})
_NAME, _ARGUMENTS = "the function's name", '{"an argument\'s name": "its value"}'
_JSON_CALL = f'{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}'
_JSON_LIST = f"[{_JSON_CALL}]"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Syntax in which a model writes tool calls.

    grammar: returns the Lark that permits only calls, None if the schemas cannot be expressed in this syntax.
    example: a call, shown to models whose chat template does not describe the syntax.
    template_markers: a chat template uses this format if it contains all strings of one tuple; the first format in
    `FORMATS` that matches is chosen. markers: special tokens that the parser must see.
    short_ids: whether call ids have nine characters, as Mistral's templates require.
    """

    name: str
    parser: type[StreamParser]
    grammar: Callable[[call_grammars.CallGrammarOptions], str | None]
    example: str
    template_markers: tuple[tuple[str, ...], ...] = ()
    markers: frozenset[str] = frozenset()
    short_ids: bool = False

    def new_id(self) -> str:
        """Return a random call id."""
        letters = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9 if self.short_ids else 24))
        return letters if self.short_ids else f"call_{letters}"


PLAIN_JSON = ToolFormat("plain_json", json_calls.PlainJsonParser, call_grammars.plain_json, _JSON_LIST)

_FORMATS = (
    ToolFormat(
        "harmony",
        harmony.HarmonyParser,
        call_grammars.harmony,
        f"<|channel|>commentary to=functions.{_NAME} <|constrain|>json<|message|>{_ARGUMENTS}<|call|>",
        (("<|channel|>", "<|message|>"),),
        harmony.MARKERS,
    ),
    ToolFormat(
        "deepseek_v3",
        json_calls.DeepSeekParser,
        call_grammars.deepseek_v3,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ((json_calls.DEEPSEEK_CALLS, "```json"),),
        json_calls.DEEPSEEK_MARKERS,
    ),
    ToolFormat(
        "deepseek_v31",
        json_calls.DeepSeekParser,
        call_grammars.deepseek_v31,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ((json_calls.DEEPSEEK_CALLS,),),
        json_calls.DEEPSEEK_MARKERS,
    ),
    ToolFormat(
        "mistral_args",
        json_calls.MistralParser,
        call_grammars.mistral_args,
        f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}",
        (("[TOOL_CALLS]", "[ARGS]"),),
        _MISTRAL_MARKERS,
        short_ids=True,
    ),
    ToolFormat(
        "mistral",
        json_calls.MistralParser,
        call_grammars.mistral_list,
        f"[TOOL_CALLS]{_JSON_LIST}",
        (("[TOOL_CALLS]",),),
        _MISTRAL_MARKERS,
        short_ids=True,
    ),
    ToolFormat(
        "gemma4",
        gemma4.Gemma4Parser,
        gemma4.gemma4_grammar,
        f"{gemma4.BEGIN}call:{_NAME}{{an argument's name:{gemma4.QUOTE}its value{gemma4.QUOTE}}}{gemma4.END}",
        ((gemma4.BEGIN,),),
        gemma4.MARKERS,
    ),
    ToolFormat(
        "granite",
        json_calls.TaggedJsonParser,
        call_grammars.granite,
        f"<|tool_call|>{_JSON_LIST}",
        (("<|tool_call|>",),),
        _TAGS,
    ),
    ToolFormat(
        "qwen3_coder",
        XmlParametersParser,
        lambda options: None,  # text values cannot be constrained by a schema
        f"<tool_call>\n<function={_NAME}>\n<parameter=an argument's name>\nits value\n</parameter>\n</function>\n</tool_call>",
        (("<function=",),),
        _TAGS,
    ),
    ToolFormat(
        "hermes",
        json_calls.TaggedJsonParser,
        call_grammars.tagged,
        f"<tool_call>\n{_JSON_CALL}\n</tool_call>",
        (("<tool_call>",),),
        _TAGS,
    ),
    ToolFormat(
        "lfm2",
        pythonic.Lfm2Parser,
        call_grammars.lfm2,
        f"{pythonic.LFM2_BEGIN}[{_NAME}(an argument's name=its value)]{pythonic.LFM2_END}",
        ((pythonic.LFM2_BEGIN,), ("<|tool_list_start|>",), ("List of tools: [",)),
        pythonic.LFM2_MARKERS,
    ),
    ToolFormat(
        "pythonic",
        pythonic.PythonicParser,
        call_grammars.pythonic,
        f"[{_NAME}(an argument's name=its value)]",
        (("<|python_start|>",), ("[func_name1(",)),
        frozenset({pythonic.START, pythonic.END}),
    ),
    ToolFormat(
        "llama3_json",
        json_calls.Llama3JsonParser,
        call_grammars.llama3_json,
        _JSON_CALL.replace("arguments", "parameters"),
        (("<|python_tag|>",), ("dictionary of argument name and its value",)),
        frozenset({"<|python_tag|>"}),
    ),
    PLAIN_JSON,
)

FORMATS = {each.name: each for each in _FORMATS}


def format_of(parser: str, template: str | None) -> ToolFormat:
    """Return the format named by `--tool-call-parser`; "auto" detects it in the chat template."""
    return detect(template) if parser == "auto" else FORMATS.get(parser, PLAIN_JSON)


def detect(template: str | None) -> ToolFormat:
    """Return the format that a chat template describes, plain JSON if it describes no known one."""
    for each in FORMATS.values():
        if any(all(marker in (template or "") for marker in markers) for markers in each.template_markers):
            return each
    return PLAIN_JSON
