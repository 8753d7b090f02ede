"""Files of a tokenizer with more entries than any vocabulary are refused before they are parsed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from windlass.engine.bounded_files import MAX_JSON_BYTES, MAX_JSON_ENTRIES, MAX_TOKENIZER_BYTES, MAX_TOKENIZER_ENTRIES
from windlass.engine.errors import LoadError
from windlass.server.text.tokenizer import Tokenizer
from windlass.server.text.vocabularies.conversion import tokenizer_files
from windlass.server.text.vocabularies.vocabulary import MAX_BYTES, MAX_TOKENS


def objects(count: int) -> bytes:
    return b'{"vocab":[' + b",".join([b"{}"] * count) + b"]}"


def sparse(size: int) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        file.touch()
        with file.open("r+b") as opened:
            opened.truncate(size)

    return write


OVERSIZED: dict[str, tuple[str, bytes | Callable[[Path], None], str]] = {
    "pieces": ("tokenizer.model", b"\n\0" * (2 * MAX_TOKENS + 1), "larger than that of any model"),
    "bytes of pieces": ("tokenizer.model", sparse(MAX_BYTES + 1), f"has {MAX_BYTES + 1} bytes"),
    "lines": ("qwen.tiktoken", b"AA== 0\n" + b"\n" * MAX_TOKENS, "larger than that of any model"),
    "entries of tekken.json": ("tekken.json", objects(MAX_JSON_ENTRIES + 2), "larger than that of any model"),
    "entries": ("tokenizer.json", objects(MAX_TOKENIZER_ENTRIES + 2), f"more than {MAX_TOKENIZER_ENTRIES} entries"),
    "bytes": ("tokenizer.json", sparse(MAX_TOKENIZER_BYTES + 1), f"has {MAX_TOKENIZER_BYTES + 1} bytes"),
    "entries of tokenizer_config.json": (
        "tokenizer_config.json",
        objects(MAX_JSON_ENTRIES + 2),
        f"more than {MAX_JSON_ENTRIES} entries",
    ),
    "bytes of tokenizer_config.json": (
        "tokenizer_config.json",
        sparse(MAX_JSON_BYTES + 1),
        f"has {MAX_JSON_BYTES + 1} bytes",
    ),
}


@pytest.mark.parametrize("case", OVERSIZED)
def test_oversized_file_is_refused_before_it_is_parsed(case: str, tmp_path: Path) -> None:
    name, content, reason = OVERSIZED[case]
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        content(file)
    if name == "tokenizer_config.json":
        (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "qwen"}')
    size = file.stat().st_size
    tracemalloc.start()
    try:
        with pytest.raises(LoadError, match=reason) as caught:
            Tokenizer.from_directory(tmp_path) if file.suffix == ".json" and name != "tekken.json" else tokenizer_files(
                file
            )
        assert tracemalloc.get_traced_memory()[1] < 2 * size + (1 << 20)
    finally:
        tracemalloc.stop()
    assert str(file) in str(caught.value) and "again" in str(caught.value)
