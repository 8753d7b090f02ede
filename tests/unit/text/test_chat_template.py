"""Chat templates compared with transformers, and malicious templates."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest
from helpers import toy_tokenizers as toys
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template
from unit_helpers.conversations import conversation
from unit_helpers.vocabulary_files import vocabulary_files

from windlass.server.text.chat_template import ChatTemplate, ChatTemplateError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- elif message.content %}
        {%- for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ {"name": call.function.name, "arguments": call.function.arguments} | tojson(indent=2) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{#- The system message is taken out, so that it can carry the date. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls|length > 1 %}
        {{- raise_exception("This model only supports single tool-calls at once!") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages -%}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

MISTRAL = """{%- set ns = namespace(index=0, system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = message.content %}{% continue %}{% endif %}
    {%- if ns.index > 40 %}{% break %}{% endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message.role == 'user' %}
        {{- bos_token if loop.first else '' }}[INST] {# no newline here -#}
        {{ ns.system ~ '\\n\\n' if ns.system and ns.index == 1 else '' }}{{ message.content }} [/INST]
    {%- else %}
        {% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

ODDS = """{%- macro show(value, depth=0) -%}
{{ '  ' * depth }}{{ value | tojson(sort_keys=true, separators=(',', ':')) }}
{% endmacro %}
{%- for message in messages recursive %}
{{ loop.index }}/{{ loop.length }} {{ loop.last }} {{ loop.cycle('a', 'b') }} {{ "%s-%03d" % (message.role, loop.index) }}
  {% if loop.previtem is defined %}after {{ loop.previtem.role }}{% endif %}
{{ show(message, 2) }}
{% else %}none{% endfor %}
{{ dict(a=1).items() | list }} {{ range(3) | join(', ') }} {{ image_token }} {{ pad_token }} {{ unknown_name }}
{% set parts = [] %}
{% for key, value in messages[0] | dictsort if value is string %}{{ key }}={{ value[::-1] }};{% endfor %}
{{ documents is none }} {{ tools is none }}
{{ messages | map(attribute='role') | unique | list }} <&"'>
{% for message in messages %}{{ message.thinking or '' }}{{ message.reasoning_content or '' }}{% endfor %}
"""

THINKING = ("reasoning_content", "thinking", "reasoning")
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "odds": ODDS}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "Größe <b>", "parameters": {"a": [1, 2.5]}}}]
CHATS = {
    "plain": [{"role": "user", "content": " Hi <there> & 'you'\n "}],
    "turns": [
        {"role": "user", "content": "Größe? 東京 😀"},
        {"role": "assistant", "content": "  12 m  \n"},
        {"role": "user", "content": "and\n\n{{ messages }} {% raw %}"},
    ],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": "Yes", "reasoning": "hm", "tool_calls": None},
    ],
    "nulls": [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "image": "x"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é", "y": [1]}}}],
        },
    ],
}


def transformers_render(source: str, messages: list[dict], **options) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=toys.byte_level(), bos_token="<s>", eos_token="</s>", pad_token="<pad>", image_token="<image>"
    )
    return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)


@pytest.mark.quick_cases(24)
@pytest.mark.parametrize(
    "options", [{}, {"tools": TOOLS}, {"enable_thinking": False, "date_string": "1 May", "eos_token": "E"}]
)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_same_bytes_as_transformers(name, chat, prompt, options):
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    try:
        expected = transformers_render(TEMPLATES[name], CHATS[chat], add_generation_prompt=prompt, **options)
    except Exception:
        with pytest.raises(ChatTemplateError):
            template.render(CHATS[chat], add_generation_prompt=prompt, **options)
        return
    assert template.render(CHATS[chat], add_generation_prompt=prompt, **options) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_conversations_render_as_in_transformers(name):
    assert same_on_any_conversation(TEMPLATES[name], range(60)) >= 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_templates_of_many_models(request):
    """The templates in llama.cpp's source, about 70."""
    files = sorted(vocabulary_files(Path(request.config.cache.mkdir("gguf-vocabularies"))).glob("*.jinja"))
    rendered = {file.stem: same_on_any_conversation(file.read_text(encoding="utf-8"), range(80)) for file in files}
    assert len(files) > 60 and sum(rendered.values()) > 40 * len(files)
    # One reads fields that messages of no API have, the other requires an unusual variable.
    assert [name for name, count in rendered.items() if count < 5] == [
        "CohereForAI-c4ai-command-r-plus-tool_use",
        "fireworks-ai-llama-3-firefunction-v2",
    ]


def same_on_any_conversation(source: str, seeds: range) -> int:
    """Number of conversations that render to the same text as transformers; both refuse the others."""
    template, rendered = ChatTemplate(source, SPECIAL), 0
    own_name = re.search(r"\.reasoning\b|['\"]reasoning['\"]", source) is not None
    for seed in seeds:
        messages, options = conversation(seed)
        given = messages
        if own_name:  # such a template gets the thinking under this name, whatever its name in the message
            given = [
                message | {"reasoning": next(message[key] for key in THINKING if key in message)}
                if any(key in message for key in THINKING)
                else message
                for message in messages
            ]
        try:
            expected = render_jinja_template([given], chat_template=source, **{**SPECIAL, **options})[0][0]
        except Exception:
            with pytest.raises(ChatTemplateError):
                template.render(messages, **options)
            continue
        assert template.render(messages, **options) == expected, seed
        rendered += 1
    return rendered


def test_most_combinations_render():
    rendered = 0
    for source in TEMPLATES.values():
        for messages in CHATS.values():
            try:
                rendered += bool(ChatTemplate(source, SPECIAL).render(messages))
            except ChatTemplateError:
                continue
    assert rendered >= 15
    assert datetime.datetime.now().strftime("%Y") in ChatTemplate(LLAMA3, SPECIAL).render(CHATS["plain"])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["Sure, ", "Sure", "", " two words ", [{"type": "text", "text": "part "}]])
def test_continue_final_message_as_transformers(name, content):
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": content}]
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    try:
        expected = transformers_render(TEMPLATES[name], messages, **options)
    except Exception:
        with pytest.raises(ChatTemplateError):
            template.render(messages, **options)
        return
    assert template.render(messages, **options) == expected
    assert messages[1]["content"] == content and "CONTINUE" not in expected


def test_continue_final_message_by_field_and_refusals():
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "", "reasoning": "because"}]
    source = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}|{{ m.content }}{% endfor %}"
    options = {"add_generation_prompt": False, "continue_final_message": "reasoning"}
    assert ChatTemplate(source).render(messages, **options) == transformers_render(source, messages, **options)
    template = ChatTemplate(CHATML)
    with pytest.raises(ChatTemplateError, match="cannot be combined"):
        template.render(messages, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match='no "content"'):
        template.render([{"role": "assistant"}], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="changes or drops"):
        ChatTemplate("{{ messages[0].role }}{# content #}").render(
            [{"role": "assistant", "content": "x"}], add_generation_prompt=False, continue_final_message=True
        )


def test_errors_are_short_and_specific():
    with pytest.raises(ChatTemplateError, match=r"^System role not supported$"):
        ChatTemplate(GEMMA, SPECIAL).render([{"role": "system", "content": "x"}])
    with pytest.raises(ChatTemplateError, match="does not parse, line 2"):
        ChatTemplate("ok\n{% if %}")
    with pytest.raises(ChatTemplateError, match="at least one message"):
        ChatTemplate(CHATML).render([])
    with pytest.raises(ChatTemplateError, match="must be an object"):
        ChatTemplate(CHATML).render(["hello"])
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate("{{ raise_exception('long ' * 5000) }}").render(CHATS["plain"])
    assert len(caught.value.message) <= 300 and "\n" not in caught.value.message
    with pytest.raises(ChatTemplateError, match="failed on these messages"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(CHATS["plain"])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_reserved_variables_are_refused(name):
    with pytest.raises(ChatTemplateError, match=name):
        ChatTemplate(CHATML).render(CHATS["plain"], variables={name: []})
    assert ChatTemplate("{{ self_ }}{{ x }}").render(CHATS["plain"], variables={"x": 1, "variables": 2}) == "1"


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ raise_exception.__globals__.keys() }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ dict.__class__.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ (namespace | attr('_check')).__globals__ }}",
    "{% set n = namespace(__class__=1) %}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ '{0.__class__.__base__}'.format(messages) }}",
    "{{ ('{0.__class__}' | format(messages)).x.y }}{{ ''['for' ~ 'mat'].__self__.__class__.__base__.x }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__base__.__subclasses__() }}",
    "{% include 'x' %}",
    "{% import '/etc/passwd' as x %}{{ x }}",
    "{{ [].__reduce_ex__(2) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_sandbox_escapes_are_refused(source):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_output_limit_is_exact():
    template = ChatTemplate("{{ messages[0].content }}", max_output_chars=100)
    assert len(template.render([{"role": "user", "content": "x" * 100}])) == 100
    with pytest.raises(ChatTemplateError, match="more than 100 characters"):
        template.render([{"role": "user", "content": "x" * 101}])
