"""Finds the chat templates among a model's files. Compiles none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.engine.errors import LoadError
from windlass.server.text.special_tokens import one_line, read_json


def chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; files win over tokenizer_config.json, which wins over the older chat_template.json."""
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
