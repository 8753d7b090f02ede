"""Makes the directory that stands for a GGUF model: config.json, tokenizer and the index of its tensors, in a cache.

What is in it is the business of `engine.model.gguf` and `server.text.gguf`; the weights stay in the GGUF file. A later start
reads this directory only, which takes milliseconds, and imports neither numpy nor gguf.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from windlass.clients.terminal.lines import say
from windlass.engine.model.gguf.split_files import find_parts, model_stem
from windlass.server.startup.derived import Derivation, write_files

_POOLING = "1_Pooling"
_DERIVATION = Derivation(
    folder="gguf",
    index="gguf.json",
    files=("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    made_by=4,
)
_MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF, by its name or, where that says nothing, by its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def derive_directory(path: Path) -> Path:
    """The directory of the model in a GGUF file, or in any part of a split one; made where it is not there yet.

    A file that has changed gets a new one in place of the old. Raises LoadError, one line, for a file that cannot be served.
    """
    parts = find_parts(path.absolute())
    return _DERIVATION.directory(model_stem(path.name), parts, str(path), lambda directory: _fill(directory, parts))


def source_stem(directory: Path) -> str | None:
    """The name of the model whose derived directory this is; None for a directory of another kind."""
    files = (_DERIVATION.read_index(directory) or {}).get("files")
    return model_stem(Path(files[0]["path"]).name) if files else None


def _fill(directory: Path, parts: Sequence[Path]) -> None:
    from windlass.engine.model.gguf.gguf_description import describe_gguf
    from windlass.server.text.gguf.tokenizer_files import tokenizer_files

    found = describe_gguf(parts)
    tokenizer = tokenizer_files(found.metadata, str(parts[0]))
    for notice in tokenizer.notices:
        say(f"notice: {notice}")
    texts = {
        "config.json": json.dumps(found.config, indent=2),
        "generation_config.json": json.dumps(found.generation, indent=2),
        "tokenizer.json": tokenizer.tokenizer,
        "tokenizer_config.json": tokenizer.config,
        _DERIVATION.index: json.dumps(found.index),
    }
    if found.pooling is not None:  # as sentence-transformers says it; embeddings are normalized, as llama.cpp has them
        modules = [("Transformer", ""), ("Pooling", _POOLING), ("Normalize", "2_Normalize")]
        listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules]
        texts["modules.json"] = json.dumps(listed)
        texts[f"{_POOLING}/config.json"] = json.dumps({"pooling_mode": found.pooling})
    write_files(directory, texts)
