"""Short chat templates with the rules that the templates of model families have."""

from __future__ import annotations

# Tests `content` and not whether it is null; objects as arguments.
QWEN3_FIRST = """
{%- if tools %}<s>tools:{% for tool in tools %}{{ tool.function.name }};{% endfor %}
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' %}<{{ message.role }}>{{ message.content }}
{% elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if message.reasoning_content is not defined or message.reasoning_content is none %}
{%- if '</think>' in message.content %}{% set content = message.content.split('</think>')[-1] %}{% endif %}
{%- endif %}<assistant>{{ content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}:{{ call.function.arguments | tojson }}{% endfor %}
{% elif message.role == 'tool' %}<result>{{ message.content }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

# One system message, at the beginning.
QWEN35 = """
{%- if tools %}<system>{% if messages[0].role == 'system' %}{{ messages[0].content }}|{% endif %}tools:
{%- for tool in tools %}{{ tool.function.name }};{% endfor %}
{% elif messages[0].role == 'system' %}<system>{{ messages[0].content }}
{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- elif message.role == 'user' %}<user>{{ message.content }}
{% elif message.role == 'assistant' %}<assistant>{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}:
{%- for name, value in call.function.arguments | items %}{{ name }}={{ value }},{% endfor %}{% endfor %}
{% elif message.role == 'tool' %}<result>{{ message.content }}
{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

# No system message, no functions, alternating turns.
GEMMA = """
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}<{{ role }}>{{ message['content'] | trim }}
{% endfor %}
{%- if add_generation_prompt %}<model>{% endif %}"""

# Alternating turns apart from calls and results, ids of nine characters, every call with its result.
MISTRAL = """
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}
{%- endfor %}
{%- if system %}[SYS]{{ system }}[/SYS]{% endif %}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if loop.last and tools %}[TOOLS]{% for tool in tools %}{{ tool.function.name }};{% endfor %}[/TOOLS]{% endif %}
[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}[CALLS]
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- call.function.name }}{{ call.function.arguments | tojson }}{{ '' if loop.last else ';' }}{% endfor %}</s>
{%- elif message.role == 'assistant' %}{{ message.content }}</s>
{%- elif message.role == 'tool' %}[RESULT]{{ message.content }}[/RESULT]
{%- else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}
{%- endfor %}"""

# One call in a turn; functions are in the first user message.
LLAMA31 = """
{%- if messages[0]['role'] == 'system' %}{% set system, rest = messages[0]['content'] | trim, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}<system>{{ system }}
{% if tools %}<user>
{%- for tool in tools %}{{ tool.function.name }};{% endfor %}{{ rest[0]['content'] | trim }}{% set rest = rest[1:] %}
{% endif %}
{%- for message in rest %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
<{{ message.role }}>{{ message['content'] | trim }}
{% elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
<assistant>{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{% else %}<ipython>{{ message.content }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

# A first system or developer message, later ones are not shown; one call, a result must follow its call. Text with a call is
# shown as thinking, and refused if there is thinking, which is omitted before a later answer without calls.
GPT_OSS = """
{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}
{%- set instructions, rest = messages[0].content, messages[1:] %}
{%- else %}{% set instructions, rest = '', messages %}{% endif %}
{%- if instructions or tools %}<developer>{{ instructions }}
{%- if tools %}|tools:{% for tool in tools %}{{ tool.function.name }};{% endfor %}{% endif %}
{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- set call = message.tool_calls[0].function %}
{%- if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- set later = rest[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls', 'defined') | list %}
{%- if (message.content or message.thinking) and not later %}<analysis>{{ message.content or message.thinking }}
{% endif %}<assistant to={{ call.name }}>{{ call.arguments | tojson }}
{% set last.name = call.name %}
{%- elif message.role == 'assistant' %}<assistant>{{ message.content }}
{% set last.name = none %}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('no previous assistant message with a tool call') }}{% endif %}
<{{ last.name }}>{{ message.content | tojson }}
{% elif message.role == 'user' %}<user>{{ message.content }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

# Functions in a field of the system message, which no API has; later system messages are not shown.
PHI4_MINI = """
{%- for message in messages %}
{%- if message['role'] == 'system' and loop.first %}<|system|>{{ message['content'] }}
{%- if 'tools' in message and message['tools'] is not none %}<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}<|end|>
{%- elif message['role'] in ['user', 'assistant'] %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# Functions in a system message of their own; later system messages are not shown; arguments as text.
GLM4 = """[gMASK]<sop>
{%- if tools %}<|system|>tools:{% for tool in tools %}{{ tool.function.name }};{% endfor %}{% endif %}
{%- if messages[0].role == 'system' %}<|system|>{{ messages[0].content }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|user|>{{ message.content }}
{%- elif message.role == 'assistant' %}
{%- for call in message.tool_calls or [] %}<|assistant|>{{ call.function.name + ' ' + call.function.arguments }}
{%- else %}<|assistant|>{{ message.content }}{% endfor %}
{%- elif message.role == 'tool' %}<|observation|>{{ message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# Shows the name of a function only in the id of its call.
KIMI_K2 = """
{%- if tools %}<system>tools:{% for tool in tools %}{{ tool.function.name }};{% endfor %}
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<tool>Return of {{ message.tool_call_id }}: {{ message.content }}
{% else %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.id }}<arguments>
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}{% endfor %}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

# Shows the last system message only; arguments as text; null content has a form of its own.
DEEPSEEK = """
{%- set ns = namespace(system='') %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}{% endfor %}
{{- ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}<User>{{ message['content'] }}
{%- elif message['role'] == 'assistant' and message['content'] is none %}<calls>
{%- for call in message['tool_calls'] %}{{ call['function']['name'] + ' ' + call['function']['arguments'] }};{% endfor %}</calls>
{%- elif message['role'] == 'assistant' %}<Assistant>{{ message['content'] }}
{%- elif message['role'] == 'tool' %}<output>{{ message['content'] }}</output>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<Assistant>{% endif %}"""

KINDS = {
    "qwen3_first": QWEN3_FIRST,
    "qwen35": QWEN35,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "llama31": LLAMA31,
    "gpt_oss": GPT_OSS,
    "phi4_mini": PHI4_MINI,
    "glm4": GLM4,
    "kimi_k2": KIMI_K2,
    "deepseek": DEEPSEEK,
}
