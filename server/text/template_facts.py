"""Chat templates among a model's files, and their capabilities."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.engine.errors import LoadError
from windlass.server.text.tokenizer_files import one_line, read_json

RESERVED = ("messages", "tools", "add_generation_prompt")  # variables of templates that come from fields of a request
_USE = re.compile(r"""\barguments['"]?\s*\]?\)?\s*(\|\s*\w+|is\s+\w+|\.\s*\w+|[+~]|-?[%}]})?""")
_SHORT_IDS = re.compile(r"length\s*(!=|<)\s*9\b")
_QUOTED = re.compile(r"""(['"])([\w-]{1,64})\1""")
_IS_NONE = re.compile(r"""content['"]?\s*\]?\s+is\s+(not\s+)?none""")


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """Capabilities of a template, read from its text.

    tools: it shows them to the model. calls: it renders calls and their results. text_arguments: it expects arguments of calls
    as JSON text instead of objects. null_content: it tests whether content is null. short_ids: it accepts only call ids of nine
    characters. single_call: a message has at most one call. developer: it supports this role. quoted_words: words in quotes,
    including the roles that it tests for.
    """

    tools: bool
    calls: bool
    text_arguments: bool
    null_content: bool
    short_ids: bool
    single_call: bool
    developer: bool
    quoted_words: frozenset[str]

    @classmethod
    def from_source(cls, source: str) -> TemplateCapabilities:
        """The capabilities of a template."""
        uses = [use.strip() for use in _USE.findall(source)]
        as_object = any(use[:1] in ("|", ".") or use.startswith("is") for use in uses)
        return cls(
            tools=re.search(r"\btools\b", source) is not None,
            calls="tool_calls" in source,
            text_arguments=not as_object and any(use[:1] in ("+", "~", "-", "}") for use in uses),
            null_content=_IS_NONE.search(source) is not None,
            short_ids=_SHORT_IDS.search(source) is not None,
            single_call="single tool-call" in source,
            developer="developer" in source,
            quoted_words=frozenset(word for _, word in _QUOTED.findall(source)),
        )


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
