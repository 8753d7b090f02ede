"""Short chat templates of models that coding agents use, and answers as each of these models writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from helpers.live_server import Live, live_server
from helpers.toy_tokenizers import taught

Call = tuple[str, dict[str, Any]]  # name and arguments

_CHATML_TURNS = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}SYSTEMS
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}CALL{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}OPEN{% endif %}"""

_CHATML_HEAD = """
{%- if tools or messages[0].role == 'system' %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{%- for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}
{%- if tools %}TEACHES{% endif %}{{ '<|im_end|>\\n' }}{% endif %}"""


def _chatml(call: str, *, teaches: str, systems: str = "", opens: str = "") -> str:
    text = _CHATML_HEAD.replace("TEACHES", teaches) + _CHATML_TURNS.replace("CALL", call)
    return text.replace("SYSTEMS", systems).replace("OPEN", opens)


QWEN3 = _chatml(
    """{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson
    + '}\\n</tool_call>' }}""",
    teaches='<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>',
)
QWEN35 = _chatml(
    """{{ '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}""",
    teaches="<tool_call><function=name><parameter=key>value</parameter></function></tool_call>",
    systems="{% if message.role == 'system' %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}",
    opens="{{ '<think>\\n' }}",
)
LFM25 = _chatml(
    """{{ '<|tool_call_start|>[' + call.function.name + '(' }}
{%- for name, value in call.function.arguments.items() %}
{{- name + '=' + (("'" + value + "'") if value is string else value | string) + ('' if loop.last else ', ') }}{% endfor %}
{{- ')]<|tool_call_end|>' }}""",
    teaches="List of tools: [<|tool_call_start|>",
)
# Tools before the last message of the user; a text with a call is not shown; ids of nine characters.
MISTRAL3 = """
{%- if messages[0].role == 'system' %}{{ '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}{% endif %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{ message.content + eos_token }}
{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}
{%- endfor %}"""
# Results continue the turn of the model; keys of arguments are sorted.
GEMMA4 = """
{%- macro shown(value) %}
{%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is mapping %}{{ '{' }}
{%- for key, item in value | dictsort %}{{ key + ':' + shown(item) + ('' if loop.last else ',') }}{% endfor %}{{ '}' }}
{%- elif value is sequence %}{{ '[' }}{% for item in value %}{{ shown(item) + ('' if loop.last else ',') }}{% endfor %}{{ ']' }}
{%- else %}{{ value | tojson }}{% endif %}
{%- endmacro %}
{%- set first = messages[0].role in ['system', 'developer'] %}
{%- if tools or first %}{{ '<|turn>system\\n' }}{% if first %}{{ messages[0].content | trim }}{% endif %}
{%- for tool in tools or [] %}{{ '<|tool>declaration:' + tool.function.name + shown(tool.function) + '<tool|>' }}{% endfor %}
{{- '<turn|>\\n' }}{% endif %}
{%- for message in (messages[1:] if first else messages) %}
{%- if message.role == 'tool' %}{{ '<|tool_response>response{value:' + shown(message.content) + '}<tool_response|>' }}
{%- elif message.role == 'assistant' %}
{%- if loop.index0 == 0 or loop.previtem.role != 'tool' %}{{ '<|turn>model\\n' }}{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + shown(call.function.arguments) + '<tool_call|>' }}{% endfor %}
{%- if not message.tool_calls %}{{ '<turn|>\\n' }}{% endif %}
{%- else %}{{ '<|turn>' + message.role + '\\n' + message.content | trim + '<turn|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\\n<|channel>thought\\n<channel|>' }}{% endif %}"""
# One call in a turn, thinking or a text with it, which are omitted before a later answer.
GPT_OSS = """
{%- set first = messages[0].role in ['system', 'developer'] %}
{%- set rest = messages[1:] if first else messages %}
{%- if tools or first %}{{ '<|start|>developer<|message|>' }}{% if first %}{{ messages[0].content }}{% endif %}
{%- for tool in tools or [] %}{{ '// ' + tool.function.description + '\\ntype ' + tool.function.name + '\\n' }}{% endfor %}
{{- '<|end|>' }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- set later = rest[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls', 'defined') | list %}
{%- if (message.content or message.thinking) and not later %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}{% endif %}
{%- set call = message.tool_calls[0].function %}{% set last.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('no previous assistant message with a tool call') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- elif message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
GLM46 = """[gMASK]<sop>
{%- if tools %}{{ '<|system|>\\n' }}{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) + '\\n' }}{% endfor %}
{{- '<tool_call>{function-name}<arg_key>{arg-key}</arg_key><arg_value>{arg-value}</arg_value></tool_call>' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>\\n<think>' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}{{ message.reasoning_content }}{% endif %}{{ '</think>' }}
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>\\n' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}
{%- elif message.role == 'tool' %}{{ '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{ '<|' + message.role + '|>\\n' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(f"<parameter={key}>\n{_value(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _lfm(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call_start|>[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]<|tool_call_end|>"


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma_value(item)}' for key, item in sorted(value.items()))}}}"
    return f"[{','.join(map(_gemma_value, value))}]" if isinstance(value, list) else json.dumps(value)


def _glm(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_value(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"\n<tool_call>{name}\n{values}</tool_call>"


def _harmony(thinking: str, text: str, call: Call | None) -> str:
    begin = f"<|channel|>analysis<|message|>{thinking}<|end|><|start|>assistant"
    if call is None:
        return f"{begin}<|channel|>final<|message|>{text}"
    preamble = f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant" if text else ""
    arguments = json.dumps(call[1])
    return (
        f"{begin}{preamble}<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>{arguments}<|call|>"
    )


def _writer(
    call_text: Callable[[str, dict[str, Any]], str], thought: str = ""
) -> Callable[[str, str, Call | None], str]:
    """Return a function that writes an answer. thought: the form of the thinking, empty for models that do not think."""

    def write(thinking: str, text: str, call: Call | None) -> str:
        return thought.replace("…", thinking) + text + ("" if call is None else call_text(*call))

    return write


@dataclass(frozen=True)
class AgentModel:
    """A kind of model. end: token that ends an answer. result: text before each result in a prompt.

    write: writes thinking, text and possibly a call as the model does. tokens: added ones.
    """

    template: str
    end: str
    result: str
    write: Callable[[str, str, Call | None], str]
    tokens: tuple[str, ...]

    @contextmanager
    def serve(self, **options: Any) -> Iterator[Live]:
        """Serve a toy model with this template. options: of `live_server`."""
        backend = taught((*self.tokens, self.end))
        ends = [backend.token_to_id(name) for name in (self.end, "<|call|>")]
        model = {
            "vocab_size": backend.get_vocab_size(),
            "max_model_len": 1 << 20,
            "eos_token_ids": tuple(token for token in ends if token is not None),
        }
        with live_server(template=self.template, backend=backend, model=model, **options) as live:
            yield live


_CHATML_TOKENS = (
    "<|im_start|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
)
_RESPONSE = "<tool_response>"
MODELS = {
    "qwen3": AgentModel(QWEN3, "<|im_end|>", _RESPONSE, _writer(_hermes, "<think>\n…\n</think>\n\n"), _CHATML_TOKENS),
    "qwen35": AgentModel(QWEN35, "<|im_end|>", _RESPONSE, _writer(_qwen3_coder, "…\n</think>\n\n"), _CHATML_TOKENS),
    "mistral3": AgentModel(
        MISTRAL3,
        "</s>",
        "[TOOL_RESULTS]",
        _writer(lambda name, arguments: f"[TOOL_CALLS]{json.dumps([{'name': name, 'arguments': arguments}])}"),
        (
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
        ),
    ),
    "gemma4": AgentModel(
        GEMMA4,
        "<turn|>",
        "<|tool_response>",
        _writer(lambda name, arguments: f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>"),
        (
            *("<|turn>", "<|tool_call>", "<tool_call|>", "<|tool>", "<tool|>", "<|tool_response>", "<tool_response|>"),
            *("<|channel>", "<channel|>", '<|"|>'),
        ),
    ),
    "gpt_oss": AgentModel(
        GPT_OSS,
        "<|return|>",
        " to=assistant<|channel|>commentary",
        _harmony,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    ),
    "lfm25": AgentModel(
        LFM25,
        "<|im_end|>",
        _RESPONSE,
        _writer(_lfm, "<think>\n…\n</think>\n\n"),
        (*_CHATML_TOKENS, "<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "glm46": AgentModel(
        GLM46,
        "<|user|>",
        _RESPONSE,
        _writer(_glm, "\n<think>…</think>\n"),
        (
            *(
                "<|system|>",
                "<|assistant|>",
                "<|observation|>",
                "[gMASK]",
                "<sop>",
                "<think>",
                "</think>",
                "<tool_call>",
            ),
            *(
                "</tool_call>",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
                "<tool_response>",
                "</tool_response>",
            ),
        ),
    ),
}


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the share of the first prompt with which the second one begins."""
    count = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return count / len(one)
