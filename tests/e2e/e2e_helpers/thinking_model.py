"""The bundled model, dressed up as one that thinks: two of its special tokens are named as markers, its template opens them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import windlass

DEMO = Path(windlass.__file__).parent / "models" / "demo"
NAMES = {"<|pad|>": "</think>", "<|system|>": "<think>"}


# Chat template: it opens the thinking in the prompt, unless a parameter leaves that to the model.
OPENING = "{%- if add_generation_prompt and opened | default(true) %}{{- '<think>\\n' }}{%- endif %}"


def thinking_model(folder: Path) -> Path:
    """Its directory, made in `folder`."""
    path = folder / "thinker"
    path.mkdir()
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DEMO / file, path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (DEMO / file).read_text(encoding="utf-8")
        for old, new in NAMES.items():
            text = text.replace(old, new)
        if file == "tokenizer_config.json":
            config = json.loads(text)
            config["chat_template"] += OPENING
            text = json.dumps(config)
        (path / file).write_text(text, encoding="utf-8")
    return path
