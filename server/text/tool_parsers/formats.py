"""Tool call formats by name, and detection of a chat template's format."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from windlass.server.text.stream_parser import CallOptions, StreamParser
from windlass.server.text.tool_parsers import call_grammars, gemma4, harmony, json_calls, pythonic, xml_parameters
from windlass.server.text.tool_parsers.call_grammars import CallGrammarOptions, CallLayout, call_grammar, marker_tokens
from windlass.server.text.tool_parsers.json_calls import JsonForm, JsonFormParser, SeparatedForm, SeparatedParser
from windlass.server.text.tool_parsers.pythonic import PythonForm, PythonParser
from windlass.server.text.tool_parsers.xml_parameters import XmlForm, XmlParametersParser

_ID_CHARACTERS = string.ascii_letters + string.digits
_JSON_EXAMPLE = re.compile(r"""\\?["']name\\?["']\s*:.{1,200}?\\?["']arguments\\?["']\s*:""", re.DOTALL)
_CALL = '{"name": "$name", "arguments": '
_PARAMETERS = '{"name": "$name", "parameters": '

Grammar = Callable[[CallGrammarOptions], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Syntax in which a model writes tool calls.

    parser: creates a parser. grammar: returns the Lark that permits only calls, None if the schemas cannot be expressed in
    this syntax. example: a call, shown to models whose chat template does not describe the syntax.
    template_markers: a chat template uses this format if it contains all strings of one tuple; the first format in
    `FORMATS` that matches is chosen. markers: special tokens that the parser must see.
    opens, closes: markers that certainly begin and end calls, so that a call after one of them ends the thinking.
    short_ids: whether call ids have nine characters, as Mistral's templates require.
    """

    name: str
    parser: Callable[[CallOptions], StreamParser]
    grammar: Grammar
    example: str
    template_markers: tuple[tuple[str, ...], ...] = ()
    markers: frozenset[str] = frozenset()
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    short_ids: bool = False

    def new_id(self) -> str:
        """Return a random call id."""
        letters = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9 if self.short_ids else 24))
        return letters if self.short_ids else f"call_{letters}"


def _example(layout: CallLayout) -> str:
    return layout.example("the function's name", "an argument's name", "its value")


def _format(
    name: str,
    parser: Callable[[CallOptions], StreamParser],
    layout: CallLayout,
    *template_markers: tuple[str, ...],
    opens: tuple[str, ...] = (),
    markers: tuple[str, ...] = (),
    grammar: Grammar | None = None,
    short_ids: bool = False,
) -> ToolFormat:
    return ToolFormat(
        name=name,
        parser=parser,
        grammar=grammar or partial(call_grammar, layout),
        example=_example(layout),
        template_markers=template_markers,
        markers=layout.tokens | marker_tokens(*opens, *markers),
        opens=opens,
        closes=layout.closes,
        short_ids=short_ids,
    )


def _json(name: str, form: JsonForm, layout: CallLayout, *template_markers: tuple[str, ...]) -> ToolFormat:
    return _format(
        name,
        partial(JsonFormParser, form),
        layout,
        *template_markers,
        opens=form.opens,
        markers=(*form.uncertain, *form.closes, *form.dropped),
    )


def _list(begin: str, end: str = "", call: str = _CALL) -> CallLayout:
    """Return the layout of a list of call objects."""
    return CallLayout(before=f"{begin}[", head=call, tail="}", between=", ", after=f"]{end}")


def _xml(
    name: str,
    form: XmlForm,
    layout: CallLayout,
    *template_markers: tuple[str, ...],
    parser: type[XmlParametersParser] = XmlParametersParser,
) -> ToolFormat:
    return _format(
        name,
        partial(parser, form),
        layout,
        *template_markers,
        opens=(*form.wrappers, form.function),
        markers=(*form.wrapper_ends, form.function_end, form.parameter_end),
    )


def _glm(name: str, tag: str, line: str, *template_markers: tuple[str, ...]) -> ToolFormat:
    """Return a format of GLM. tag: before the names of its tags. line: between its elements."""
    form = xml_parameters.glm_form(tag)
    layout = CallLayout(
        head=f"<{tag}tool_call>$name{line}",
        argument=f"<{tag}arg_key>$key</{tag}arg_key>{line}<{tag}arg_value>$value</{tag}arg_value>{line}",
        tail=f"</{tag}tool_call>",
        between=line,
        excluded=form.excluded,
    )
    return _xml(name, form, layout, *template_markers, parser=xml_parameters.GlmParser)


def _separated(name: str, form: SeparatedForm, layout: CallLayout, *template_markers: tuple[str, ...]) -> ToolFormat:
    return _format(
        name,
        partial(SeparatedParser, form),
        layout,
        *template_markers,
        opens=(form.calls, form.call),
        markers=form.markers,
    )


def _python(name: str, form: PythonForm, layout: CallLayout, *template_markers: tuple[str, ...]) -> ToolFormat:
    return _format(
        name,
        partial(PythonParser, form),
        layout,
        *template_markers,
        opens=form.opens if form.any_name else (),
        markers=(*form.opens, *form.closes),
    )


def _python_layout(before: str = "", between: str = ", ", after: str = "") -> CallLayout:
    return CallLayout(
        before=before, head="$name(", argument="$key=$value", separator=", ", tail=")", between=between, after=after
    )


def _gemma(name: str, form: gemma4.GemmaForm) -> ToolFormat:
    return ToolFormat(
        name=name,
        parser=partial(gemma4.Gemma4Parser, form),
        grammar=partial(gemma4.gemma_grammar, form),
        example=_example(form.layout),
        template_markers=((form.begin,),),
        markers=frozenset({form.begin, form.end, form.quote}),
        opens=(form.begin,),
        closes=(form.end,),
    )


def _mistral(name: str, layout: CallLayout, *template_markers: str) -> ToolFormat:
    return _format(
        name,
        json_calls.MistralParser,
        layout,
        template_markers,
        opens=("[TOOL_CALLS]",),
        markers=("[ARGS]", "[CALL_ID]"),
        short_ids=True,
    )


def _deepseek(head: str, tail: str, between: str) -> CallLayout:
    form = json_calls.DEEPSEEK
    return CallLayout(
        before=form.calls, head=form.call + head, tail=tail + form.call_end, between=between, after=form.calls_end
    )


def _dsml(wrapper: str) -> CallLayout:
    return CallLayout(
        before=f"<｜DSML｜{wrapper}>\n",
        head='<｜DSML｜invoke name="$name">\n',
        argument='<｜DSML｜parameter name="$key" string="$text">$value</｜DSML｜parameter>\n',
        tail="</｜DSML｜invoke>\n",
        after=f"</｜DSML｜{wrapper}>",
        excluded=xml_parameters.DSML.excluded,
    )


def _coder(wrapper: str, form: XmlForm, line: str) -> CallLayout:
    """Return the layout of Qwen3-Coder and Seed-OSS. line: around a value."""
    return CallLayout(
        head=f"<{wrapper}>\n<function=$name>\n",
        argument=f"<parameter=$key>{line}$value{line}</parameter>\n",
        tail=f"</function>\n</{wrapper}>",
        between="\n",
        excluded=form.excluded,
    )


_PLAIN_LIST = _list("")
_HARMONY = CallLayout(head="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>", single=True)
_NS = xml_parameters.M3_NAMESPACE

PLAIN_JSON = _format(
    "plain_json",
    partial(JsonFormParser, json_calls.PLAIN),
    _PLAIN_LIST,
    markers=(*json_calls.PLAIN.uncertain, *json_calls.PLAIN.closes),
    grammar=partial(call_grammars.plain_json, _PLAIN_LIST, CallLayout(head=_CALL, tail="}")),
)

_FORMATS = (
    _format(
        "harmony",
        harmony.HarmonyParser,
        _HARMONY,
        ("<|channel|>", "<|message|>"),
        markers=tuple(harmony.MARKERS),
        grammar=partial(call_grammars.harmony, _HARMONY),
    ),
    _xml("deepseek_v4", xml_parameters.DSML, _dsml("tool_calls"), ("｜DSML｜", "tool_calls>")),
    _xml("deepseek_v32", xml_parameters.DSML, _dsml("function_calls"), ("｜DSML｜",)),
    _separated(
        "deepseek_v3",
        json_calls.DEEPSEEK,
        _deepseek("function<｜tool▁sep｜>$name\n```json\n", "\n```", "\n"),
        (json_calls.DEEPSEEK.calls, "```json"),
    ),
    _separated(
        "deepseek_v31", json_calls.DEEPSEEK, _deepseek("$name<｜tool▁sep｜>", "", ""), (json_calls.DEEPSEEK.calls,)
    ),
    _separated(
        "kimi_k2",
        json_calls.KIMI_K2,
        CallLayout(
            before="<|tool_calls_section_begin|>",
            head="<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>",
            tail="<|tool_call_end|>",
            after="<|tool_calls_section_end|>",
        ),
        ("<|tool_call_begin|>",),
    ),
    _mistral("mistral_args", CallLayout(head="[TOOL_CALLS]$name[ARGS]"), "[TOOL_CALLS]", "[ARGS]"),
    _mistral("mistral", _list("[TOOL_CALLS]"), "[TOOL_CALLS]"),
    _gemma("gemma4", gemma4.GEMMA4),
    _gemma("functiongemma", gemma4.FUNCTION_GEMMA),
    _json("phi4_mini_functools", json_calls.PHI4_MINI, _list("functools"), ("functools[",)),
    _json("phi4_mini", json_calls.PHI4_MINI, _list("<|tool_call|>", "<|/tool_call|>"), ("<|/tool|>",)),
    _json("granite", json_calls.HERMES, _list("<|tool_call|>"), ("<|tool_call|>",)),
    _xml(
        "minimax_m3",
        xml_parameters.MINIMAX_M3,
        CallLayout(
            before=f"{_NS}<tool_call>\n",
            head=f'{_NS}<invoke name="$name">',
            argument=f"{_NS}<$key>$value{_NS}</$key>",
            tail=f"{_NS}</invoke>\n",
            after=f"{_NS}</tool_call>",
            excluded=(_NS,),
            elements=True,
        ),
        (_NS,),
        parser=xml_parameters.MiniMaxM3Parser,
    ),
    _xml(
        "minimax_m2",
        xml_parameters.MINIMAX_M2,
        CallLayout(
            before="<minimax:tool_call>\n",
            head='<invoke name="$name">\n',
            argument='<parameter name="$key">$value</parameter>\n',
            tail="</invoke>\n",
            after="</minimax:tool_call>",
            excluded=xml_parameters.MINIMAX_M2.excluded,
        ),
        ("<minimax:tool_call>",),
    ),
    _xml("seed_oss", xml_parameters.SEED, _coder("seed:tool_call", xml_parameters.SEED, ""), ("<seed:tool_call>",)),
    _xml(
        "minicpm5",
        xml_parameters.MINICPM5,
        CallLayout(
            head='<function name="$name">',
            argument='<param name="$key">$value</param>',
            tail="</function>",
            between="\n",
            excluded=xml_parameters.MINICPM5.excluded,
            cdata=True,
        ),
        ("<function name=", "<param name="),
    ),
    _glm("longcat", "longcat_", "\n", ("<longcat_tool_call>", "<longcat_arg_key>")),
    _json(
        "longcat_json",
        json_calls.LONGCAT,
        CallLayout(head=f"<longcat_tool_call>\n{_CALL}", tail="}\n</longcat_tool_call>"),
        ("<longcat_tool_call>",),
    ),
    _glm("glm47", "", "", ("</arg_key><arg_value>", "<tool_call>{function-name}<arg_key>")),
    _glm("glm45", "", "\n", ("<arg_key>",)),
    _xml(
        "qwen3_coder",
        xml_parameters.QWEN3_CODER,
        _coder("tool_call", xml_parameters.QWEN3_CODER, "\n"),
        ("<function=", "<parameter="),
    ),
    _xml(
        "functionary_v31",
        xml_parameters.QWEN3_CODER,
        CallLayout(head="<function=$name>", tail="</function>"),
        ("<function=",),
    ),
    _format(
        "functionary_v32",
        json_calls.RecipientParser,
        CallLayout(head="$name\n", between=f"\n{json_calls.RECIPIENT}"),  # the prompt contains the first marker
        (f"{json_calls.RECIPIENT}all",),
    ),
    _json("nemotron", json_calls.NEMOTRON, _list("<TOOLCALL>", "</TOOLCALL>"), ("<TOOLCALL>",)),
    _json("hunyuan", json_calls.HUNYUAN, _list("<tool_calls>", "</tool_calls>"), ("<tool_calls>",)),
    _json(
        "cohere",
        json_calls.COHERE,
        _list("<|START_ACTION|>", "<|END_ACTION|>", '{"tool_call_id": "$number", "tool_name": "$name", "parameters": '),
        ("<|START_ACTION|>",),
    ),
    _json(
        "command_r",
        json_calls.COHERE,
        _list("Action: ```json\n", "\n```", '{"tool_name": "$name", "parameters": '),
        ("Action:", "tool_name"),
    ),
    _json(
        "apertus",
        json_calls.APERTUS,
        _list("<|tools_prefix|>", "<|tools_suffix|>", '{"$name": '),
        ("<|tools_prefix|>",),
    ),
    _json(
        "internlm",
        json_calls.INTERNLM,
        CallLayout(head=f"<|action_start|><|plugin|>\n{_PARAMETERS}", tail="}<|action_end|>", single=True),
        ("<|action_start|>",),
    ),
    _json(
        "gigachat3",
        json_calls.GIGACHAT3,
        CallLayout(head=f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_CALL}", tail="}", single=True),
        ("function call", "<|role_sep|>"),
        ("<|function_call|>",),
    ),
    _json(
        "hermes",
        json_calls.HERMES,
        CallLayout(head=f"<tool_call>\n{_CALL}", tail="}\n</tool_call>", between="\n"),
        ("<tool_call>",),
    ),
    _json(
        "granite_20b",
        json_calls.GRANITE_20B,
        CallLayout(head=f"<function_call> {_CALL}", tail="}"),
        ("<function_call>",),
    ),
    _python(
        "olmo3", pythonic.OLMO3, _python_layout(pythonic.OLMO3_BEGIN, "\n", pythonic.OLMO3_END), (pythonic.OLMO3_BEGIN,)
    ),
    _python(
        "minicpm3",
        pythonic.LFM2,
        _python_layout(f"{pythonic.LFM2_BEGIN}\n```python\n", "\n", f"\n```\n{pythonic.LFM2_END}"),
        (pythonic.LFM2_BEGIN, "```python"),
    ),
    _python(
        "lfm2",
        pythonic.LFM2,
        _python_layout(f"{pythonic.LFM2_BEGIN}[", after=f"]{pythonic.LFM2_END}"),
        (pythonic.LFM2_BEGIN,),
        ("<|tool_list_start|>",),
        ("List of tools: [",),
    ),
    _python(
        "pythonic",
        pythonic.PYTHONIC,
        _python_layout("[", after="]"),
        ("<|python_start|>",),
        ("[func_name1(",),
        ("```tool_code",),
    ),
    _json(
        "llama3_json",
        json_calls.LLAMA3,
        CallLayout(head=_PARAMETERS, tail="}", between="; "),
        ("<|python_tag|>",),
        ("dictionary of argument name and its value",),
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


def is_known(template: str) -> bool:
    """Return whether a chat template describes a known format, or shows calls in plain JSON."""
    return detect(template) is not PLAIN_JSON or _JSON_EXAMPLE.search(template) is not None
