"""Messages fitted to templates: capabilities found by probes, and conversations that a template does not accept as they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.template_kinds import KINDS
from transformers.utils.chat_template_utils import render_jinja_template
from unit_helpers.vocabulary_files import vocabulary_files

from windlass.server.schemas.chat import ChatMessage
from windlass.server.text.chat_messages import prepare_history, prepare_tools
from windlass.server.text.chat_template import ChatTemplate, ChatTemplateError, probe_template
from windlass.server.text.tokenizer_files import TemplateCapabilities

Message = dict[str, Any]
LOOK = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
INSTRUCTIONS = """You may call these functions:

{"name": "look", "parameters": {"type": "object", "properties": {}}}

To call functions, answer with nothing but calls in this form:
<form>
Otherwise answer in plain text. The results of calls come in the next message."""


def system(text: str, role: str = "system") -> Message:
    return {"role": role, "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calling(*names: str, content: str | None = None, arguments: str = '{"k": 1}') -> Message:
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}} for name in names
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(name: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": f"{name} done"}


CONVERSATIONS: dict[str, list[Message]] = {
    "null content": [user("Q"), calling("look"), result("look")],
    "several systems": [system("S"), system("D", "developer"), user("Q")],
    "late system": [system("S"), user("Q"), assistant("A"), system("L")],
    "consecutive turns": [user("Q"), user("R"), assistant("A"), assistant("B"), user("T")],
    "parallel calls": [user("Q"), calling("look", "find"), result("find"), result("look")],
    "call without a result": [user("Q"), calling("look"), user("R")],
    "result without a call": [
        *(result("look"), assistant("A"), user("Q"), assistant("B")),
        *(result("look"), user("T")),
    ],
    "text after a result": [user("Q"), calling("look"), result("look"), user("R")],
    "tools": [system("S"), user("Q")],  # with a function
    "text with a call": [user("Q"), calling("look", content="T"), result("look")],
    "cut off arguments": [user("Q"), calling("look", arguments='{"k": 1, "l'), result("look")],
}
# Changes and prompt of each conversation under each kind of template.
EXPECTED: dict[str, dict[str, tuple[str, str]]] = {
    "qwen3_first": {
        "null content": ("", '<user>Q\n<assistant><call>look:{"k": 1}<result>look done\n<assistant>'),
        "several systems": ("", "<system>S\n<system>D\n<user>Q\n<assistant>"),
        "late system": ("", "<system>S\n<user>Q\n<assistant>A<system>L\n<assistant>"),
        "consecutive turns": ("", "<user>Q\n<user>R\n<assistant>A<assistant>B<user>T\n<assistant>"),
        "parallel calls": (
            "",
            '<user>Q\n<assistant><call>look:{"k": 1}<call>find:{"k": 1}<result>find done\n<result>look done\n'
            "<assistant>",
        ),
        "call without a result": ("", '<user>Q\n<assistant><call>look:{"k": 1}<user>R\n<assistant>'),
        "result without a call": (
            "",
            "<result>look done\n<assistant>A<user>Q\n<assistant>B<result>look done\n<user>T\n<assistant>",
        ),
        "text after a result": ("", '<user>Q\n<assistant><call>look:{"k": 1}<result>look done\n<user>R\n<assistant>'),
        "tools": ("", "<s>tools:look;<system>S\n<user>Q\n<assistant>"),
        "text with a call": ("", '<user>Q\n<assistant>T<call>look:{"k": 1}<result>look done\n<assistant>'),
        "cut off arguments": (
            "",
            '<user>Q\n<assistant><call>look:{"arguments": "{\\"k\\": 1, \\"l"}<result>look done\n<assistant>',
        ),
    },
    "qwen35": {
        "null content": ("", "<user>Q\n<assistant><call>look:k=1,<result>look done\n<assistant>"),
        "several systems": ("system-joined", "<system>S\n\nD\n<user>Q\n<assistant>"),
        "late system": ("system-as-user", "<system>S\n<user>Q\n<assistant>A<user>L\n<assistant>"),
        "consecutive turns": ("", "<user>Q\n<user>R\n<assistant>A<assistant>B<user>T\n<assistant>"),
        "parallel calls": (
            "",
            "<user>Q\n<assistant><call>look:k=1,<call>find:k=1,<result>find done\n<result>look done\n<assistant>",
        ),
        "call without a result": ("", "<user>Q\n<assistant><call>look:k=1,<user>R\n<assistant>"),
        "result without a call": (
            "",
            "<result>look done\n<assistant>A<user>Q\n<assistant>B<result>look done\n<user>T\n<assistant>",
        ),
        "text after a result": ("", "<user>Q\n<assistant><call>look:k=1,<result>look done\n<user>R\n<assistant>"),
        "tools": ("", "<system>S|tools:look;<user>Q\n<assistant>"),
        "text with a call": ("", "<user>Q\n<assistant>T<call>look:k=1,<result>look done\n<assistant>"),
        "cut off arguments": (
            "",
            '<user>Q\n<assistant><call>look:arguments={"k": 1, "l,<result>look done\n<assistant>',
        ),
    },
    "gemma": {
        "null content": (
            "calls-as-text",
            '<user>Q\n<model>[{"name": "look", "arguments": {"k": 1}}]\n<user>Result of look:\nlook done\n<model>',
        ),
        "several systems": ("system-as-user,system-joined", "<user>S\n\nD\n\nQ\n<model>"),
        "late system": ("system-as-user", "<user>S\n\nQ\n<model>A\n<user>L\n<model>"),
        "consecutive turns": ("turns-merged", "<user>Q\n\nR\n<model>A\n\nB\n<user>T\n<model>"),
        "parallel calls": (
            "calls-as-text",
            "<user>Q\n"
            '<model>[{"name": "look", "arguments": {"k": 1}}, {"name": "find", "arguments": {"k": 1}}]\n'
            "<user>Result of find:\nfind done\n\nResult of look:\nlook done\n<model>",
        ),
        "call without a result": (
            "calls-as-text",
            '<user>Q\n<model>[{"name": "look", "arguments": {"k": 1}}]\n<user>R\n<model>',
        ),
        "result without a call": (
            "calls-as-text,turns-merged",
            "<user>Result of the function:\nlook done\n<model>A\n<user>Q\n<model>B\n"
            "<user>Result of the function:\nlook done\n\nT\n<model>",
        ),
        "text after a result": (
            "calls-as-text,turns-merged",
            '<user>Q\n<model>[{"name": "look", "arguments": {"k": 1}}]\n<user>Result of look:\nlook done\n\nR\n<model>',
        ),
        "tools": ("system-as-user,tools-as-text", "<user>S\n\nINSTRUCTIONS\n\nQ\n<model>"),
        "text with a call": (
            "calls-as-text",
            '<user>Q\n<model>T\n[{"name": "look", "arguments": {"k": 1}}]\n<user>Result of look:\nlook done\n<model>',
        ),
        "cut off arguments": (
            "calls-as-text",
            '<user>Q\n<model>[{"name": "look", "arguments": {"arguments": "{\\"k\\": 1, \\"l"}}]\n'
            "<user>Result of look:\nlook done\n<model>",
        ),
    },
    "mistral": {
        "null content": ("", '[INST]Q[/INST][CALLS]look{"k": 1}</s>[RESULT]look done[/RESULT]'),
        "several systems": ("system-joined", "[SYS]S\n\nD[/SYS][INST]Q[/INST]"),
        "late system": ("system-as-user", "[SYS]S[/SYS][INST]Q[/INST]A</s>[INST]L[/INST]"),
        "consecutive turns": ("turns-merged", "[INST]Q\n\nR[/INST]A\n\nB</s>[INST]T[/INST]"),
        "parallel calls": (
            "",
            '[INST]Q[/INST][CALLS]look{"k": 1};find{"k": 1}</s>[RESULT]find done[/RESULT][RESULT]look done[/RESULT]',
        ),
        "call without a result": (
            "result-added,text-in-result",
            '[INST]Q[/INST][CALLS]look{"k": 1}</s>[RESULT]No result: the call was interrupted.\n\nR[/RESULT]',
        ),
        "result without a call": (
            "result-as-text,turns-merged",
            "[INST]Result of the function:\n"
            "look done[/INST]A</s>[INST]Q[/INST]B</s>[INST]Result of the function:\nlook done\n\nT[/INST]",
        ),
        "text after a result": (
            "text-in-result",
            '[INST]Q[/INST][CALLS]look{"k": 1}</s>[RESULT]look done\n\nR[/RESULT]',
        ),
        "tools": ("", "[SYS]S[/SYS][TOOLS]look;[/TOOLS][INST]Q[/INST]"),
        "text with a call": ("calls-split", '[INST]Q[/INST]T</s>[CALLS]look{"k": 1}</s>[RESULT]look done[/RESULT]'),
        "cut off arguments": (
            "",
            '[INST]Q[/INST][CALLS]look{"arguments": "{\\"k\\": 1, \\"l"}</s>[RESULT]look done[/RESULT]',
        ),
    },
    "llama31": {
        "null content": (
            "",
            '<system>\n<user>Q\n<assistant>{"name": "look", "parameters": {"k": 1}}\n<ipython>look done\n<assistant>',
        ),
        "several systems": ("", "<system>S\n<system>D\n<user>Q\n<assistant>"),
        "late system": ("", "<system>S\n<user>Q\n<assistant>A\n<system>L\n<assistant>"),
        "consecutive turns": ("", "<system>\n<user>Q\n<user>R\n<assistant>A\n<assistant>B\n<user>T\n<assistant>"),
        "parallel calls": (
            "calls-split",
            '<system>\n<user>Q\n<assistant>{"name": "look", "parameters": {"k": 1}}\n<ipython>look done\n'
            '<assistant>{"name": "find", "parameters": {"k": 1}}\n<ipython>find done\n<assistant>',
        ),
        "call without a result": (
            "",
            '<system>\n<user>Q\n<assistant>{"name": "look", "parameters": {"k": 1}}\n<user>R\n<assistant>',
        ),
        "result without a call": (
            "",
            "<system>\n<ipython>look done\n<assistant>A\n<user>Q\n<assistant>B\n<ipython>look done\n<user>T\n"
            "<assistant>",
        ),
        "text after a result": (
            "",
            '<system>\n<user>Q\n<assistant>{"name": "look", "parameters": {"k": 1}}\n<ipython>look done\n'
            "<user>R\n<assistant>",
        ),
        "tools": ("", "<system>S\n<user>look;Q<assistant>"),
        "text with a call": (
            "calls-split",
            '<system>\n<user>Q\n<assistant>T\n<assistant>{"name": "look", "parameters": {"k": 1}}\n'
            "<ipython>look done\n<assistant>",
        ),
        "cut off arguments": (
            "",
            '<system>\n<user>Q\n<assistant>{"name": "look", "parameters": {"arguments": "{\\"k\\": 1, \\"l"}}\n'
            "<ipython>look done\n<assistant>",
        ),
    },
    "gpt_oss": {
        "null content": ("", '<user>Q\n<assistant to=look>{"k": 1}\n<look>"look done"\n<assistant>'),
        "several systems": ("system-joined", "<developer>S\n\nD<user>Q\n<assistant>"),
        "late system": ("system-as-user", "<developer>S<user>Q\n<assistant>A\n<user>L\n<assistant>"),
        "consecutive turns": ("", "<user>Q\n<user>R\n<assistant>A\n<assistant>B\n<user>T\n<assistant>"),
        "parallel calls": (
            "calls-split",
            '<user>Q\n<assistant to=look>{"k": 1}\n<look>"look done"\n<assistant to=find>{"k": 1}\n'
            '<find>"find done"\n<assistant>',
        ),
        "call without a result": ("", '<user>Q\n<assistant to=look>{"k": 1}\n<user>R\n<assistant>'),
        "result without a call": (
            "result-as-text",
            "<user>Result of the function:\nlook done\n<assistant>A\n<user>Q\n<assistant>B\n"
            "<user>Result of the function:\nlook done\n<user>T\n<assistant>",
        ),
        "text after a result": ("", '<user>Q\n<assistant to=look>{"k": 1}\n<look>"look done"\n<user>R\n<assistant>'),
        "tools": ("", "<developer>S|tools:look;<user>Q\n<assistant>"),
        "text with a call": (
            "",
            '<user>Q\n<analysis>T\n<assistant to=look>{"k": 1}\n<look>"look done"\n<assistant>',
        ),
        "cut off arguments": (
            "",
            '<user>Q\n<assistant to=look>{"arguments": "{\\"k\\": 1, \\"l"}\n<look>"look done"\n<assistant>',
        ),
    },
    "phi4_mini": {
        "null content": (
            "calls-as-text",
            '<|user|>Q<|end|><|assistant|>[{"name": "look", "arguments": {"k": 1}}]<|end|>'
            "<|user|>Result of look:\nlook done<|end|><|assistant|>",
        ),
        "several systems": ("system-joined", "<|system|>S\n\nD<|end|><|user|>Q<|end|><|assistant|>"),
        "late system": (
            "system-as-user",
            "<|system|>S<|end|><|user|>Q<|end|><|assistant|>A<|end|><|user|>L<|end|><|assistant|>",
        ),
        "consecutive turns": (
            "",
            "<|user|>Q<|end|><|user|>R<|end|><|assistant|>A<|end|><|assistant|>B<|end|><|user|>T<|end|><|assistant|>",
        ),
        "parallel calls": (
            "calls-as-text",
            "<|user|>Q<|end|>"
            '<|assistant|>[{"name": "look", "arguments": {"k": 1}}, {"name": "find", "arguments": {"k": 1}}]<|end|>'
            "<|user|>Result of find:\nfind done\n\nResult of look:\nlook done<|end|><|assistant|>",
        ),
        "call without a result": (
            "calls-as-text",
            '<|user|>Q<|end|><|assistant|>[{"name": "look", "arguments": {"k": 1}}]<|end|>'
            "<|user|>R<|end|><|assistant|>",
        ),
        "result without a call": (
            "calls-as-text",
            "<|user|>Result of the function:\nlook done<|end|><|assistant|>A<|end|>"
            "<|user|>Q<|end|><|assistant|>B<|end|><|user|>Result of the function:\nlook done<|end|>"
            "<|user|>T<|end|><|assistant|>",
        ),
        "text after a result": (
            "calls-as-text",
            '<|user|>Q<|end|><|assistant|>[{"name": "look", "arguments": {"k": 1}}]<|end|>'
            "<|user|>Result of look:\nlook done<|end|><|user|>R<|end|><|assistant|>",
        ),
        "tools": ("tools-as-text", "<|system|>S\n\nINSTRUCTIONS<|end|><|user|>Q<|end|><|assistant|>"),
        "text with a call": (
            "calls-as-text",
            '<|user|>Q<|end|><|assistant|>T\n[{"name": "look", "arguments": {"k": 1}}]<|end|>'
            "<|user|>Result of look:\nlook done<|end|><|assistant|>",
        ),
        "cut off arguments": (
            "calls-as-text",
            '<|user|>Q<|end|><|assistant|>[{"name": "look", "arguments": {"arguments": "{\\"k\\": 1, \\"l"}}]<|end|>'
            "<|user|>Result of look:\nlook done<|end|><|assistant|>",
        ),
    },
    "glm4": {
        "null content": ("", '[gMASK]<sop><|user|>Q<|assistant|>look {"k": 1}<|observation|>look done<|assistant|>'),
        "several systems": ("system-joined", "[gMASK]<sop><|system|>S\n\nD<|user|>Q<|assistant|>"),
        "late system": ("system-as-user", "[gMASK]<sop><|system|>S<|user|>Q<|assistant|>A<|user|>L<|assistant|>"),
        "consecutive turns": ("", "[gMASK]<sop><|user|>Q<|user|>R<|assistant|>A<|assistant|>B<|user|>T<|assistant|>"),
        "parallel calls": (
            "",
            "[gMASK]<sop>"
            '<|user|>Q<|assistant|>look {"k": 1}<|assistant|>find {"k": 1}<|observation|>find done'
            "<|observation|>look done<|assistant|>",
        ),
        "call without a result": ("", '[gMASK]<sop><|user|>Q<|assistant|>look {"k": 1}<|user|>R<|assistant|>'),
        "result without a call": (
            "",
            "[gMASK]<sop><|observation|>look done<|assistant|>A<|user|>Q<|assistant|>B<|observation|>look done"
            "<|user|>T<|assistant|>",
        ),
        "text after a result": (
            "",
            '[gMASK]<sop><|user|>Q<|assistant|>look {"k": 1}<|observation|>look done<|user|>R<|assistant|>',
        ),
        "tools": ("", "[gMASK]<sop><|system|>tools:look;<|system|>S<|user|>Q<|assistant|>"),
        "text with a call": (
            "calls-split",
            '[gMASK]<sop><|user|>Q<|assistant|>T<|assistant|>look {"k": 1}<|observation|>look done<|assistant|>',
        ),
        "cut off arguments": (
            "",
            "[gMASK]<sop>"
            '<|user|>Q<|assistant|>look {"arguments": "{\\"k\\": 1, \\"l"}<|observation|>look done<|assistant|>',
        ),
    },
    "kimi_k2": {
        "null content": (
            "",
            '<user>Q<assistant><call>functions.look:0<arguments>{"k": 1}<tool>Return of functions.look:0: look done\n'
            "<assistant>",
        ),
        "several systems": ("", "<system>S<system>D<user>Q<assistant>"),
        "late system": ("", "<system>S<user>Q<assistant>A<system>L<assistant>"),
        "consecutive turns": ("", "<user>Q<user>R<assistant>A<assistant>B<user>T<assistant>"),
        "parallel calls": (
            "",
            '<user>Q<assistant><call>functions.look:0<arguments>{"k": 1}<call>functions.find:1'
            '<arguments>{"k": 1}<tool>Return of functions.find:1: find done\n'
            "<tool>Return of functions.look:0: look done\n<assistant>",
        ),
        "call without a result": ("", '<user>Q<assistant><call>functions.look:0<arguments>{"k": 1}<user>R<assistant>'),
        "result without a call": (
            "",
            "<tool>Return of call_look: look done\n"
            "<assistant>A<user>Q<assistant>B<tool>Return of call_look: look done\n<user>T<assistant>",
        ),
        "text after a result": (
            "",
            '<user>Q<assistant><call>functions.look:0<arguments>{"k": 1}<tool>Return of functions.look:0: look done\n'
            "<user>R<assistant>",
        ),
        "tools": ("", "<system>tools:look;<system>S<user>Q<assistant>"),
        "text with a call": (
            "",
            '<user>Q<assistant>T<call>functions.look:0<arguments>{"k": 1}<tool>Return of functions.look:0: look done\n'
            "<assistant>",
        ),
        "cut off arguments": (
            "",
            '<user>Q<assistant><call>functions.look:0<arguments>{"arguments": "{\\"k\\": 1, \\"l"}'
            "<tool>Return of functions.look:0: look done\n"
            "<assistant>",
        ),
    },
    "deepseek": {
        "null content": ("", '<User>Q<calls>look {"k": 1};</calls><output>look done</output><Assistant>'),
        "several systems": ("system-joined", "S\n\nD<User>Q<Assistant>"),
        "late system": ("system-as-user", "S<User>Q<Assistant>A<User>L<Assistant>"),
        "consecutive turns": ("", "<User>Q<User>R<Assistant>A<Assistant>B<User>T<Assistant>"),
        "parallel calls": (
            "",
            '<User>Q<calls>look {"k": 1};find {"k": 1};</calls><output>find done</output><output>look done</output><Assistant>',
        ),
        "call without a result": ("", '<User>Q<calls>look {"k": 1};</calls><User>R<Assistant>'),
        "result without a call": (
            "",
            "<output>look done</output><Assistant>A<User>Q<Assistant>B<output>look done</output><User>T<Assistant>",
        ),
        "text after a result": ("", '<User>Q<calls>look {"k": 1};</calls><output>look done</output><User>R<Assistant>'),
        "tools": ("tools-as-text", "S\n\nINSTRUCTIONS<User>Q<Assistant>"),
        "text with a call": (
            "calls-split",
            '<User>Q<Assistant>T<calls>look {"k": 1};</calls><output>look done</output><Assistant>',
        ),
        "cut off arguments": (
            "",
            '<User>Q<calls>look {"arguments": "{\\"k\\": 1, \\"l"};</calls><output>look done</output><Assistant>',
        ),
    },
}


def render(
    template: ChatTemplate, capabilities: TemplateCapabilities, messages: Sequence[Message], tools: Any = None
) -> tuple[str, str]:
    """(changes, prompt) of a conversation."""
    fitted = prepare_history([ChatMessage(**message) for message in messages], tools, capabilities, "<form>")
    shown = prepare_tools(tools, capabilities)
    prompt = template.render(fitted.messages, tools=shown, null_content=capabilities.null_content)
    return ",".join(fitted.changes), prompt


@pytest.mark.quick_cases(22)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_fitted_to_each_kind_of_template(kind: str, conversation: str) -> None:
    template = ChatTemplate(KINDS[kind])
    tools = LOOK if conversation == "tools" else None
    changes, prompt = render(template, probe_template(template), CONVERSATIONS[conversation], tools)
    expected_changes, expected = EXPECTED[kind][conversation]
    assert prompt == expected.replace("INSTRUCTIONS", INSTRUCTIONS)
    assert changes == expected_changes


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_thinking_with_a_call(kind: str) -> None:
    """The next turn of an agent whose model thought, wrote what it was about to do, and made a call."""
    template = ChatTemplate(KINDS[kind])
    messages = [user("Q"), {**calling("look", content="T"), "reasoning_content": "R"}, result("look")]
    if kind == "gpt_oss":
        expected = '<user>Q\n<analysis>R\n\nT\n<assistant to=look>{"k": 1}\n<look>"look done"\n<assistant>'
        assert render(template, probe_template(template), messages) == ("text-in-thinking", expected)
    else:
        assert render(template, probe_template(template), messages) == EXPECTED[kind]["text with a call"]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("kind", KINDS)
def test_accepted_conversations_render_as_in_transformers(kind: str) -> None:
    template = ChatTemplate(KINDS[kind])
    capabilities, compared = probe_template(template), 0
    for seed in range(200):
        messages, texts = random_conversation(seed, kinds="ua")
        raw = [{**each, "role": each["role"].replace("developer", "system")} for each in messages]
        given = messages if capabilities.developer else raw
        try:
            expected = render_jinja_template([given], chat_template=KINDS[kind], add_generation_prompt=True)[0][0]
        except Exception:
            continue
        if all(text in expected for text in texts):
            assert render(template, capabilities, messages) == ("", expected), messages
            compared += 1
    assert compared >= 5


def random_conversation(
    seed: int, kinds: str = "uuaacccst", call_texts: bool = True
) -> tuple[list[Message], list[str]]:
    """Messages in any order, and the texts, names and values that a prompt of them must show."""
    r = random.Random(seed)
    texts: list[str] = []

    def text() -> str:
        texts.append(f"text{len(texts)}.")
        return texts[-1]

    messages = [system(text(), r.choice(["system", "developer"])) for _ in range(r.choice([0, 0, 1, 2]))]
    messages.append(user(text()))
    for number in range(r.randint(0, 6)):
        kind = r.choice(kinds)
        if kind == "u":
            messages.append(user(text()))
        elif kind == "a":
            messages.append(assistant(text()))
        elif kind == "s":
            messages.append(system(text(), r.choice(["system", "developer"])))
        elif kind == "t":
            messages.append({"role": "tool", "tool_call_id": "call_lost", "content": text()})
        else:
            names = [f"name{number}{letter}" for letter in "ab"[: r.choice([1, 1, 2])]]
            texts += names
            content = text() if call_texts and r.random() < 0.5 else r.choice([None, ""])
            messages.append(calling(*names, content=content, arguments=f'{{"k": "{text()}"}}'))
            done = [name for name in names if r.random() < 0.85]
            r.shuffle(done)
            messages += [result(name) for name in done]
            texts += [f"{name} done" for name in done]
    if r.random() < 0.8:
        messages.append(user(text()))
    return messages, texts


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_of_any_conversation_is_shown(kind: str) -> None:
    # To gpt-oss a text with a call is thinking, which its template omits once an answer follows.
    assert lost_texts(KINDS[kind], call_texts=kind != "gpt_oss") == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_models_show_every_text(request: pytest.FixtureRequest) -> None:
    """The templates in llama.cpp's source, about 70."""
    assert request.config.cache is not None
    folder = vocabulary_files(Path(request.config.cache.mkdir("gguf-vocabularies")))
    sources = {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}
    lost = {name: found for name, source in sources.items() if (found := lost_texts(source))}
    assert len(sources) > 60
    assert set(lost) == {
        "Cohere2MoE",  # omits a result without a call after several turns of the assistant, as the next one does
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        "fireworks-ai-llama-3-firefunction-v2",  # requires an unusual variable
        "openai-gpt-oss-120b",  # omits the text with a call, which is thinking to it, once an answer follows
        "mistralai-Mistral-Nemo-Instruct-2407",  # shows the system message only if the last message is the user's
    }


def lost_texts(source: str, call_texts: bool = True) -> dict[int, str]:
    """By seed, the texts that the prompt of a conversation does not show, or why there is no prompt."""
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    capabilities = probe_template(template)
    found = {}
    for seed in range(60):
        messages, texts = random_conversation(seed, call_texts=call_texts)
        try:
            prompt = render(template, capabilities, messages, LOOK)[1]
        except ChatTemplateError as error:
            found[seed] = error.message
            continue
        if missing := [text for text in texts if text not in prompt]:
            found[seed] = ", ".join(missing)
    return found


def test_texts_with_calls_move_to_the_one_turn_that_shows_them() -> None:
    """Mistral's templates count only turns without calls, and permit one of them between two turns of the user."""
    template = ChatTemplate(KINDS["mistral"])
    loop = [user("Q"), calling("look", content="T"), result("look"), calling("find", content="U"), result("find")]
    look, find = (f'[CALLS]{name}{{"k": 1}}</s>[RESULT]{name} done[/RESULT]' for name in ("look", "find"))
    for messages, changes, prompt in (
        (loop, "calls-split,turns-merged", f"[INST]Q[/INST]{look}T\n\nU</s>{find}"),
        ([*loop, assistant("A")], "calls-split,turns-merged", f"[INST]Q[/INST]{look}{find}T\n\nU\n\nA</s>"),
        (
            [*loop[:3], assistant("A"), user("R")],
            "calls-split,turns-merged",
            f"[INST]Q[/INST]{look}T\n\nA</s>[INST]R[/INST]",
        ),
        ([user("Q"), calling("look"), result("look"), assistant("A")], "", f"[INST]Q[/INST]{look}A</s>"),
    ):
        assert render(template, probe_template(template), messages) == (changes, prompt)


def test_a_template_that_shows_nothing_gets_messages_unchanged() -> None:
    assert probe_template(
        ChatTemplate("{{ messages[0]['content'][0]['text'] + undefined.name }}")
    ) == TemplateCapabilities(known_roles=frozenset())


def test_roles_that_a_template_compares_are_known() -> None:
    source = (
        "{% for message in messages %}{% if message.role == 'usr' or message['role'] in ('critic', 'judge') %}!"
        "{% elif message.role != 'user' %}{{ raise_exception('x') }}{% endif %}{{ message.content }}{% endfor %}"
    )
    assert probe_template(ChatTemplate(source)).known_roles == {"usr", "critic", "judge", "user"}
