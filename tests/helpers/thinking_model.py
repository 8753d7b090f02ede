"""The bundled model, dressed up as one that thinks: two of its special tokens are named as markers, its template opens them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import windlass

DEMO = Path(windlass.__file__).parent / "models" / "demo"
NAMES = {"<|pad|>": "</think>", "<|system|>": "<think>"}


def thinking_model(folder: Path, *, opened: bool = True) -> Path:
    """Its directory, made in `folder`. opened: whether the template opens the thinking in the prompt."""
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
            opening = "<|assistant|>\\n<think>\\n" if opened else "<|assistant|>\\n"
            template = config["chat_template"].replace("<|assistant|>\\n", opening)
            assert opening in template
            config["chat_template"] = "{#- <think> #}" + template
            text = json.dumps(config)
        (path / file).write_text(text, encoding="utf-8")
    return path
