"""The formats of calls by name, and which of them a chat template teaches its model."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from windlass.server.text.parsing.stream import StreamParser
from windlass.server.text.parsing.tools import forced
from windlass.server.text.parsing.tools.deepseek import DeepSeekParser
from windlass.server.text.parsing.tools.harmony import MARKERS, HarmonyParser
from windlass.server.text.parsing.tools.mistral import MistralParser
from windlass.server.text.parsing.tools.plain_json import Llama3JsonParser, PlainJsonParser
from windlass.server.text.parsing.tools.pythonic import PythonicParser
from windlass.server.text.parsing.tools.tagged_json import TaggedJsonParser
from windlass.server.text.parsing.tools.xml_parameters import XmlParametersParser, no_grammar

_LETTERS = string.ascii_letters + string.digits
_TAGS = frozenset({*TaggedJsonParser.openers, *TaggedJsonParser.closers})
_DEEPSEEK = frozenset(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write calls.

    parser: reads it. grammar: the Lark that forces it, None where the schemas have no such form.
    needles: a template that has all strings of one of these lists teaches it; the first format found counts.
    markers: its special tokens, which a parser has to see. short_ids: whether ids of calls have nine characters.
    """

    name: str
    parser: type[StreamParser]
    grammar: Callable[[forced.Forced], str | None]
    needles: tuple[tuple[str, ...], ...] = ()
    markers: frozenset[str] = frozenset()
    short_ids: bool = False

    def new_id(self) -> str:
        """An id for a call."""
        letters = "".join(secrets.choice(_LETTERS) for _ in range(9 if self.short_ids else 24))
        return letters if self.short_ids else f"call_{letters}"


_MISTRAL = frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"})
_PYTHON = frozenset({"<|python_start|>", "<|python_end|>"})
_CALLS_BEGIN = "<｜tool▁calls▁begin｜>"

PLAIN_JSON = ToolFormat("plain_json", PlainJsonParser, forced.plain_json)
FORMATS = {
    each.name: each
    for each in (
        ToolFormat("harmony", HarmonyParser, forced.harmony, (("<|channel|>", "<|message|>"),), MARKERS),
        ToolFormat("deepseek_v3", DeepSeekParser, forced.deepseek_v3, ((_CALLS_BEGIN, "```json"),), _DEEPSEEK),
        ToolFormat("deepseek_v31", DeepSeekParser, forced.deepseek_v31, ((_CALLS_BEGIN,),), _DEEPSEEK),
        ToolFormat("mistral_args", MistralParser, forced.mistral_args, (("[TOOL_CALLS]", "[ARGS]"),), _MISTRAL, True),
        ToolFormat("mistral", MistralParser, forced.mistral_list, (("[TOOL_CALLS]",),), _MISTRAL, True),
        ToolFormat("granite", TaggedJsonParser, forced.granite, (("<|tool_call|>",),), _TAGS),
        ToolFormat("qwen3_coder", XmlParametersParser, no_grammar, (("<function=",),), _TAGS),
        ToolFormat("hermes", TaggedJsonParser, forced.tagged, (("<tool_call>",),), _TAGS),
        ToolFormat("pythonic", PythonicParser, forced.pythonic, (("<|python_start|>",), ("[func_name1(",)), _PYTHON),
        ToolFormat(
            "llama3_json",
            Llama3JsonParser,
            forced.llama3_json,
            (("<|python_tag|>",), ("dictionary of argument name and its value",)),
            frozenset({"<|python_tag|>"}),
        ),
        PLAIN_JSON,
    )
}


def detect(template: str | None) -> ToolFormat:
    """The format that a chat template teaches; plain JSON where it names none that is known here."""
    for each in FORMATS.values():
        if any(all(needle in (template or "") for needle in needles) for needles in each.needles):
            return each
    return PLAIN_JSON
