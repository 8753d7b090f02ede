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
from windlass.server.text.tool_parsers.call_grammars import CallGrammarOptions
from windlass.server.text.tool_parsers.json_calls import JsonForm, JsonFormParser
from windlass.server.text.tool_parsers.xml_parameters import XmlForm, XmlParametersParser

_ID_CHARACTERS = string.ascii_letters + string.digits
_NAME, _ARGUMENT, _VALUE = "the function's name", "an argument's name", "its value"
_ARGUMENTS = f'{{"{_ARGUMENT}": "{_VALUE}"}}'
_JSON_CALL = f'{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}'
_PARAMETERS_CALL = _JSON_CALL.replace("arguments", "parameters")
_JSON_LIST = f"[{_JSON_CALL}]"
_PYTHON_CALL = f"{_NAME}({_ARGUMENT}={_VALUE})"
_TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
_JSON_EXAMPLE = re.compile(r"""\\?["']name\\?["']\s*:.{1,200}?\\?["']arguments\\?["']\s*:""", re.DOTALL)

Grammar = Callable[[CallGrammarOptions], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Syntax in which a model writes tool calls.

    parser: creates a parser. grammar: returns the Lark that permits only calls, None if the schemas cannot be expressed in
    this syntax. example: a call, shown to models whose chat template does not describe the syntax.
    template_markers: a chat template uses this format if it contains all strings of one tuple; the first format in
    `FORMATS` that matches is chosen. markers: special tokens that the parser must see.
    opens: markers that certainly begin calls, so that a call after one of them ends the thinking.
    short_ids: whether call ids have nine characters, as Mistral's templates require.
    """

    name: str
    parser: Callable[[CallOptions], StreamParser]
    grammar: Grammar
    example: str
    template_markers: tuple[tuple[str, ...], ...] = ()
    markers: frozenset[str] = frozenset()
    opens: tuple[str, ...] = ()
    short_ids: bool = False

    def new_id(self) -> str:
        """Return a random call id."""
        letters = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9 if self.short_ids else 24))
        return letters if self.short_ids else f"call_{letters}"


def _tokens(*texts: str) -> frozenset[str]:
    """Return the parts of these texts that may be special tokens."""
    return frozenset(token for text in texts for token in _TOKEN.findall(text))


def _json(name: str, form: JsonForm, grammar: Grammar, example: str, *template_markers: tuple[str, ...]) -> ToolFormat:
    return ToolFormat(
        name=name,
        parser=partial(JsonFormParser, form),
        grammar=grammar,
        example=example,
        template_markers=template_markers,
        markers=_tokens(*form.opens, *form.uncertain, *form.closes, *form.dropped),
        opens=form.opens,
    )


def _no_grammar(options: CallGrammarOptions) -> None:
    """Text values cannot be constrained by a schema."""


def _xml(
    name: str,
    form: XmlForm,
    *template_markers: tuple[str, ...],
    parser: type[XmlParametersParser] = XmlParametersParser,
    example: str = "",
    grammar: Grammar = _no_grammar,
    tokens: tuple[str, ...] = (),
) -> ToolFormat:
    opens = (*form.wrappers, form.function)
    if not example:
        quote, line = ('"', "") if form.function.endswith("name=") else ("", "\n")
        begin, end = (f"{form.wrappers[0]}\n", f"\n{form.wrapper_ends[0]}") if form.wrappers else ("", "")
        example = (
            f"{begin}{form.function}{quote}{_NAME}{quote}>\n{form.parameter}{quote}{_ARGUMENT}{quote}>{line}{_VALUE}{line}"
            f"{form.parameter_end}\n{form.function_end}{end}"
        )
    return ToolFormat(
        name=name,
        parser=partial(parser, form),
        grammar=grammar,
        example=example,
        template_markers=template_markers,
        markers=_tokens(*opens, *form.wrapper_ends, form.function_end, form.parameter, form.parameter_end).union(
            tokens
        ),
        opens=opens,
    )


def _separated(
    name: str, form: json_calls.SeparatedForm, grammar: Grammar, call: str, *template_markers: tuple[str, ...]
) -> ToolFormat:
    return ToolFormat(
        name=name,
        parser=partial(json_calls.SeparatedParser, form),
        grammar=grammar,
        example=f"{form.calls}{form.call}{call}{form.call_end}{form.calls_end}",
        template_markers=template_markers,
        markers=frozenset(form.markers),
        opens=(form.calls, form.call),
    )


def _python(
    name: str,
    form: pythonic.PythonForm,
    grammar: Grammar,
    example: str,
    *template_markers: tuple[str, ...],
) -> ToolFormat:
    return ToolFormat(
        name=name,
        parser=partial(pythonic.PythonParser, form),
        grammar=grammar,
        example=example,
        template_markers=template_markers,
        markers=_tokens(*form.opens, *form.closes),
        opens=form.opens if form.any_name else (),
    )


def _gemma(name: str, form: gemma4.GemmaForm) -> ToolFormat:
    return ToolFormat(
        name=name,
        parser=partial(gemma4.Gemma4Parser, form),
        grammar=partial(gemma4.gemma_grammar, form),
        example=form.call(_NAME, _ARGUMENT, _VALUE),
        template_markers=((form.begin,),),
        markers=frozenset({form.begin, form.end, form.quote}),
        opens=(form.begin,),
    )


def _glm(name: str, form: XmlForm, *template_markers: tuple[str, ...]) -> ToolFormat:
    key_end, value_begin = form.parameter.replace("<", "</"), form.parameter_end.replace("</", "<")
    return _xml(
        name,
        form,
        *template_markers,
        parser=xml_parameters.GlmParser,
        example=(
            f"{form.function}{_NAME}\n{form.parameter}{_ARGUMENT}{key_end}\n"
            f"{value_begin}{_VALUE}{form.parameter_end}\n{form.function_end}"
        ),
        tokens=(key_end, value_begin),
    )


def _mistral(name: str, grammar: Grammar, example: str, *template_markers: str) -> ToolFormat:
    return ToolFormat(
        name=name,
        parser=json_calls.MistralParser,
        grammar=grammar,
        example=example,
        template_markers=(template_markers,),
        markers=frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
        opens=("[TOOL_CALLS]",),
        short_ids=True,
    )


PLAIN_JSON = _json("plain_json", json_calls.PLAIN, call_grammars.plain_json, _JSON_LIST)
_DEEPSEEK, _KIMI = json_calls.DEEPSEEK, json_calls.KIMI_K2
_M3 = xml_parameters.M3_NAMESPACE

_FORMATS = (
    ToolFormat(
        name="harmony",
        parser=harmony.HarmonyParser,
        grammar=call_grammars.harmony,
        example=f"<|channel|>commentary to=functions.{_NAME} <|constrain|>json<|message|>{_ARGUMENTS}<|call|>",
        template_markers=(("<|channel|>", "<|message|>"),),
        markers=harmony.MARKERS,
    ),
    _xml("deepseek_v32", xml_parameters.DSML, ("｜DSML｜",), tokens=("｜DSML｜",)),
    _separated(
        "deepseek_v3",
        _DEEPSEEK,
        call_grammars.deepseek_v3,
        f"function{_DEEPSEEK.separator}{_NAME}\n```json\n{_ARGUMENTS}\n```",
        (_DEEPSEEK.calls, "```json"),
    ),
    _separated(
        "deepseek_v31",
        _DEEPSEEK,
        call_grammars.deepseek_v31,
        f"{_NAME}{_DEEPSEEK.separator}{_ARGUMENTS}",
        (_DEEPSEEK.calls,),
    ),
    _separated(
        "kimi_k2", _KIMI, call_grammars.kimi_k2, f"functions.{_NAME}:0{_KIMI.separator}{_ARGUMENTS}", (_KIMI.call,)
    ),
    _mistral(
        "mistral_args", call_grammars.mistral_args, f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}", "[TOOL_CALLS]", "[ARGS]"
    ),
    _mistral(
        "mistral", partial(call_grammars.json_list, begin="[TOOL_CALLS]"), f"[TOOL_CALLS]{_JSON_LIST}", "[TOOL_CALLS]"
    ),
    _gemma("gemma4", gemma4.GEMMA4),
    _gemma("functiongemma", gemma4.FUNCTION_GEMMA),
    _json(
        "phi4_mini",
        json_calls.PHI4_MINI,
        partial(call_grammars.json_list, begin="<|tool_call|>", end="<|/tool_call|>"),
        f"<|tool_call|>{_JSON_LIST}<|/tool_call|>",
        ("functools[",),
        ("<|/tool|>",),
    ),
    _json(
        "granite",
        json_calls.HERMES,
        partial(call_grammars.json_list, begin="<|tool_call|>"),
        f"<|tool_call|>{_JSON_LIST}",
        ("<|tool_call|>",),
    ),
    _xml(
        "minimax_m3",
        xml_parameters.MINIMAX_M3,
        (_M3,),
        parser=xml_parameters.MiniMaxM3Parser,
        example=(
            f'{_M3}<tool_call>\n{_M3}<invoke name="{_NAME}">{_M3}<{_ARGUMENT}>{_VALUE}{_M3}</{_ARGUMENT}>{_M3}</invoke>\n'
            f"{_M3}</tool_call>"
        ),
        tokens=(_M3,),
    ),
    _xml("minimax_m2", xml_parameters.MINIMAX_M2, ("<minimax:tool_call>",)),
    _xml("seed_oss", xml_parameters.SEED, ("<seed:tool_call>",)),
    _xml("minicpm5", xml_parameters.MINICPM5, ("<function name=", "<param name=")),
    _glm("longcat", xml_parameters.LONGCAT, ("<longcat_tool_call>",)),
    _glm("glm45", xml_parameters.GLM, ("<arg_key>",)),
    _xml("qwen3_coder", xml_parameters.QWEN3_CODER, ("<function=", "<parameter=")),
    _xml(
        "functionary_v31",
        xml_parameters.QWEN3_CODER,
        ("<function=",),
        example=f"<function={_NAME}>{_ARGUMENTS}</function>",
        grammar=call_grammars.functionary_v31,
    ),
    ToolFormat(
        name="functionary_v32",
        parser=json_calls.RecipientParser,
        grammar=call_grammars.functionary_v32,
        example=f"{json_calls.RECIPIENT}{_NAME}\n{_ARGUMENTS}",
        template_markers=((f"{json_calls.RECIPIENT}all",),),
    ),
    _json(
        "nemotron",
        json_calls.NEMOTRON,
        partial(call_grammars.json_list, begin="<TOOLCALL>", end="</TOOLCALL>"),
        f"<TOOLCALL>{_JSON_LIST}</TOOLCALL>",
        ("<TOOLCALL>",),
    ),
    _json(
        "hunyuan",
        json_calls.HUNYUAN,
        partial(call_grammars.json_list, begin="<tool_calls>", end="</tool_calls>"),
        f"<tool_calls>{_JSON_LIST}</tool_calls>",
        ("<tool_calls>",),
    ),
    _json(
        "cohere",
        json_calls.COHERE,
        call_grammars.cohere,
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "{_NAME}", "parameters": {_ARGUMENTS}}}]<|END_ACTION|>',
        ("<|START_ACTION|>",),
    ),
    _json(
        "command_r",
        json_calls.COHERE,
        call_grammars.command_r,
        f'Action: ```json\n[{{"tool_name": "{_NAME}", "parameters": {_ARGUMENTS}}}]\n```',
        ("Action:", "tool_name"),
    ),
    _json(
        "apertus",
        json_calls.APERTUS,
        call_grammars.apertus,
        f'<|tools_prefix|>[{{"{_NAME}": {_ARGUMENTS}}}]<|tools_suffix|>',
        ("<|tools_prefix|>",),
    ),
    _json(
        "internlm",
        json_calls.INTERNLM,
        call_grammars.internlm,
        f"<|action_start|><|plugin|>\n{_PARAMETERS_CALL}<|action_end|>",
        ("<|action_start|>",),
    ),
    _json(
        "gigachat3",
        json_calls.GIGACHAT3,
        call_grammars.gigachat3,
        f"function call<|role_sep|>\n{_JSON_CALL}",
        ("function call", "<|role_sep|>"),
        ("<|function_call|>",),
    ),
    _json(
        "hermes", json_calls.HERMES, call_grammars.tagged, f"<tool_call>\n{_JSON_CALL}\n</tool_call>", ("<tool_call>",)
    ),
    _json(
        "granite_20b",
        json_calls.GRANITE_20B,
        call_grammars.granite_20b,
        f"<function_call> {_JSON_CALL}",
        ("<function_call>",),
    ),
    _python(
        "olmo3",
        pythonic.OLMO3,
        call_grammars.olmo3,
        f"<function_calls>{_PYTHON_CALL}</function_calls>",
        ("<function_calls>",),
    ),
    _python(
        "minicpm3",
        pythonic.LFM2,
        call_grammars.minicpm3,
        f"<|tool_call_start|>\n```python\n{_PYTHON_CALL}\n```\n<|tool_call_end|>",
        ("<|tool_call_start|>", "```python"),
    ),
    _python(
        "lfm2",
        pythonic.LFM2,
        call_grammars.lfm2,
        f"{pythonic.LFM2_BEGIN}[{_PYTHON_CALL}]{pythonic.LFM2_END}",
        (pythonic.LFM2_BEGIN,),
        ("<|tool_list_start|>",),
        ("List of tools: [",),
    ),
    _python(
        "pythonic",
        pythonic.PYTHONIC,
        call_grammars.pythonic,
        f"[{_PYTHON_CALL}]",
        ("<|python_start|>",),
        ("[func_name1(",),
        ("```tool_code",),
    ),
    _json(
        "llama3_json",
        json_calls.LLAMA3,
        call_grammars.llama3_json,
        _PARAMETERS_CALL,
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
