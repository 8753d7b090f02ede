"""Token ids of llama.cpp's test vocabularies, compared with the expected ids that llama.cpp ships with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType
from tokenizers import Tokenizer
from unit_helpers.vocabulary_files import vocabulary_files

from windlass.engine.errors import LoadError
from windlass.server.text.vocabularies.conversion import gguf_tokenizer_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEPARATOR = "\n__ggml_vocab_test__\n"
WITH_IDS = (
    "command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3 qwen2 qwen35 refact starcoder"
).split()


@pytest.fixture(scope="module")
def files(request: pytest.FixtureRequest) -> Path:
    return vocabulary_files(Path(request.config.cache.mkdir("gguf-vocabularies")))


class QuickReader(GGUFReader):
    """Reader without a slice of the memory map per string, which would take many seconds for a vocabulary."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        return np.frombuffer(self.data, dtype, int(count), offset)


def read_tokenizer(path: Path) -> dict[str, Any]:
    """Return the metadata of a vocabulary-only file."""
    found = {}
    for name, field in QuickReader(path).fields.items():
        if name.startswith("GGUF."):
            continue
        if field.types[0] == GGUFValueType.ARRAY and field.types[-1] != GGUFValueType.STRING:
            found[name] = [field.parts[index].item() for index in field.data]
        elif field.types[0] == GGUFValueType.ARRAY:
            found[name] = [field.parts[index].tobytes().decode("utf-8") for index in field.data]
        else:
            found[name] = field.contents()
    return found


@pytest.mark.parametrize("name", WITH_IDS)
def test_ids_equal_llama_cpp(files, name):
    path = files / f"ggml-vocab-{name}.gguf"
    texts = path.with_name(path.name + ".inp").read_bytes().decode("utf-8").split(SEPARATOR)
    lines = (
        path.with_name(path.name + ".out").read_text(encoding="utf-8").split("\n")
    )  # an empty line for a text without ids
    expected = [[int(index) for index in line.split()] for line in lines]
    assert len(texts) > 40
    assert not any(expected[len(texts) :])
    made = Tokenizer.from_str(gguf_tokenizer_files(read_tokenizer(path), name).tokenizer)
    for text, ids in zip(texts, expected[: len(texts)], strict=True):
        assert made.encode(text, add_special_tokens=False).ids == ids, repr(text)


@pytest.mark.parametrize("name", ["baichuan", "aquila", "gpt-neox"])
def test_files_without_expected_ids(files, name):
    made = Tokenizer.from_str(gguf_tokenizer_files(read_tokenizer(files / f"ggml-vocab-{name}.gguf"), name).tokenizer)
    text = "Hello, world! 12345  naïve 東京 😀\n\n\tend"
    assert made.decode(made.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize("name", ["bert-bge", "nomic-bert-moe"])
def test_vocabularies_of_encoders_are_refused(files, name):
    with pytest.raises(LoadError, match="gpt2, llama and gemma4 are the supported kinds"):
        gguf_tokenizer_files(read_tokenizer(files / f"ggml-vocab-{name}.gguf"), name)
