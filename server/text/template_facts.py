"""Chat templates among a model's files, their capabilities, and prompts of rerankers with placeholders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from windlass.engine.errors import LoadError
from windlass.server.text.tokenizer_files import one_line, read_json

RESERVED = ("messages", "tools", "add_generation_prompt")  # variables of templates that come from fields of a request


CallIds = Literal["any", "short", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """Capabilities of a template, found by rendering short conversations (`chat_template`). By default it has all.

    tools: it shows functions to the model. described_tools: each of which must have a description.
    calls: it shows calls and their results.
    text_arguments: it reads arguments of calls as JSON text instead of objects.
    null_content: it shows null content of a message with calls in a form of its own.
    empty_content, text_with_calls: it shows calls if the content is empty, and if it is a text, with that.
    text_before_calls: it shows a text as a turn of its own before a turn with calls.
    thinking_with_text: it shows that text even if the message has thinking.
    call_ids: "short" if it accepts only ids of nine characters, "named" if it shows the name of a function only in the id of a
    call, as `functions.name:0`.
    named_results: results must name their function.
    parallel_calls, open_calls: a message may have several calls, and a call may have no result.
    orphan_results, user_after_result: a result may have no call, and a user's message may follow a result.
    system: it shows a system message. several_systems: it shows several at the front. late_systems: it shows later ones.
    developer: it has this role. repeated_users, repeated_assistants: a turn may follow another one of its role.
    known_roles: roles that it compares with the role of a message.
    """

    tools: bool = True
    described_tools: bool = False
    calls: bool = True
    text_arguments: bool = False
    null_content: bool = False
    empty_content: bool = True
    text_with_calls: bool = True
    text_before_calls: bool = True
    thinking_with_text: bool = True
    call_ids: CallIds = "any"
    named_results: bool = False
    parallel_calls: bool = True
    open_calls: bool = True
    orphan_results: bool = True
    user_after_result: bool = True
    system: bool = True
    several_systems: bool = True
    late_systems: bool = True
    developer: bool = False
    repeated_users: bool = True
    repeated_assistants: bool = True
    known_roles: frozenset[str] = frozenset()

    @property
    def gathers_texts(self) -> bool:
        """Whether texts that accompany calls are shown only as the one turn without calls between two turns of the user."""
        shows_text = self.text_with_calls or self.repeated_assistants
        return self.calls and self.text_before_calls and not shows_text

    @property
    def single_call(self) -> bool:
        """Whether a message has at most one call."""
        return self.calls and not self.parallel_calls


def chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. Files override tokenizer_config.json, which overrides the older chat_template.json."""
    templates: dict[str, str] = {}
    for value in (read_json(directory / "chat_template.json").get("chat_template"), config.get("chat_template")):
        if isinstance(value, str):
            templates = {"default": value}
        elif isinstance(value, list):
            templates = {entry["name"]: entry["template"] for entry in value}
        elif isinstance(value, dict):
            templates = {str(name): str(text) for name, text in value.items()}
    files = {"default": directory / "chat_template.jinja"}
    files.update({file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))})
    try:
        on_disk = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    except (OSError, ValueError) as error:
        raise LoadError(
            f"cannot read a chat template in {directory} ({one_line(error)}): fetch the file again"
        ) from error
    return on_disk or templates


PairField = Literal["query", "document", "instruction"]

# As published with Qwen3-Reranker. The instruction is an optional first message.
QWEN3_RERANKER_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
    "{{ messages[0].content if messages | length > 2 else "
    "'Given a web search query, retrieve relevant passages that answer the query' }}\n"
    "<Query>: {{ messages[-2].content }}\n<Document>: {{ messages[-1].content }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n\n"  # Jinja removes the last newline
)


def names_pair_roles(source: str) -> bool:
    """Whether a template names both roles, which templates of chats do not."""
    return all(re.search(rf"['\"]{role}['\"]", source) for role in ("query", "document"))


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """A prompt with gaps. texts: around the gaps, one more than gaps. trimmed: per gap, whether its value is stripped."""

    texts: tuple[str, ...]
    pair_fields: tuple[PairField, ...]
    trimmed: tuple[bool, ...]

    @property
    def length(self) -> int:
        """Characters around the gaps."""
        return sum(map(len, self.texts))

    def fill(self, values: Mapping[PairField, str]) -> tuple[str, int, str]:
        """(text, offset of the document's first occurrence in it, the document as inserted)."""
        parts, size = [self.texts[0]], len(self.texts[0])
        begin, document = size, ""
        for pair_field, trimmed, text in zip(self.pair_fields, self.trimmed, self.texts[1:], strict=True):
            value = values[pair_field].strip() if trimmed else values[pair_field]
            if pair_field == "document" and not document:
                begin, document = size, value
            parts += (value, text)
            size += len(value) + len(text)
        return "".join(parts), begin, document


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The prompts of a reranker. instructed: with an instruction from the request, None if it has no gap for one."""

    plain: PairPrompt
    instructed: PairPrompt | None
