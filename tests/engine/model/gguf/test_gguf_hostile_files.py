"""Truncated, changed and malicious files give a LoadError of one line, in bounded time and memory."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_conversion import metadata_of, tensors_of, write
from helpers.tiny_models import make_model

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.gguf_description import describe_gguf
from windlass.engine.model.gguf.gguf_reader import read_header

U32, STRING, ARRAY, U64 = 4, 8, 9, 10
_MOST_MEMORY = 64 << 20  # bytes, that a file of a few kilobytes may make the reader allocate


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small valid file, with every kind of value before its tensors."""
    directory = tmp_path_factory.mktemp("whole")
    source = make_model(
        "llama", directory / "hf", num_hidden_layers=1, hidden_size=16, intermediate_size=8, vocab_size=8
    )
    config = json.loads((source / "config.json").read_text())
    metadata = {
        **metadata_of(config),
        "tokenizer.ggml.tokens": ["<unk>", "a", "é"],
        "tokenizer.ggml.scores": [0.0, -1.5, 2.0],
        "tokenizer.ggml.token_type": [2, 1, 1],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    write(directory / "whole.gguf", metadata, dict(tensors_of(source, config)))
    describe_gguf([directory / "whole.gguf"])
    return (directory / "whole.gguf").read_bytes()


def header_size(data: bytes, directory: Path) -> int:
    path = directory / "size.gguf"
    path.write_bytes(data)
    return min(tensor.begin for tensor in read_header(path).tensors.values())


def refusal(data: bytes, directory: Path) -> str | None:
    """Return the message about a file; None if it can be read."""
    path = directory / "hostile.gguf"
    path.write_bytes(data)
    try:
        describe_gguf([path])
    except LoadError as error:
        assert str(error).startswith((str(path), f"cannot read {path}")) and "\n" not in str(error), error
        return str(error)
    return None


def test_truncated_file_is_refused(whole: bytes, tmp_path: Path) -> None:
    end = header_size(whole, tmp_path)
    for length in (*range(0, 40), *range(40, end, 13), end, len(whole) - 1):
        assert refusal(whole[:length], tmp_path) is not None, length


def test_changed_bytes_give_load_errors(whole: bytes, tmp_path: Path) -> None:
    """One changed byte, then several, anywhere in the header: the file is refused, or has another valid value."""
    end = header_size(whole, tmp_path)
    draw = random.Random(0)
    refused = 0
    for place in range(0, end, 11):
        data = bytearray(whole)
        data[place] ^= 1 << draw.randrange(8)
        refused += refusal(bytes(data), tmp_path) is not None
    assert refused > end // 30
    for _ in range(80):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 9)):
            place, kind = draw.randrange(end), draw.randrange(3)
            if kind == 0:
                data[place] = draw.randrange(256)
            elif kind == 1:
                data[place : place + 8] = struct.pack(
                    "<Q", draw.choice((0, 2**63, 2**64 - 1, 10**18, 2**32, len(data)))
                )
            else:
                data[place : place + 4] = struct.pack("<I", draw.randrange(20))
        refusal(bytes(data), tmp_path)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def made(
    *keys: bytes, tensors: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None, version: int = 3
) -> bytes:
    """Return a file of these keys and tensor descriptions, followed by a little data."""
    found = counts or (len(tensors), len(keys))
    head = struct.pack("<4sIQQ", b"GGUF", version, *found) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(64)


def number(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<II", U32, value)


def array(key: bytes, kind: int, count: int, data: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, kind, count) + data


def tensor(name: bytes, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "something else": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "version 1": (made(version=1), "GGUF version 1, supported are 2 and 3"),
    "version 9": (made(version=9), "GGUF version 9"),
    "big endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
    "keys": (made(counts=(0, 10**18)), "announces 1000000000000000000 keys"),
    "tensors": (made(counts=(2**64 - 1, 0)), "announces 0 keys and 18446744073709551615 tensors"),
    "fewer keys": (made(number(b"a", 1), counts=(0, 9000)), "."),
    "a long name": (made(struct.pack("<Q", 2**63) + b"abc"), "name of more than"),
    "a long text": (made(text(b"a") + struct.pack("<IQ", STRING, 2**64 - 1)), "a text of 18446744073709551615 bytes"),
    "a text beyond": (made(text(b"a") + struct.pack("<IQ", STRING, 5000)), "beyond its end"),
    "an array": (made(array(b"a", U32, 10**18)), "more than 2097152 numbers"),
    "an array beyond": (made(array(b"a", U64, 2_000_000)), "beyond its end"),
    "texts": (made(array(b"a", STRING, 10**18)), "more than 1048576 texts"),
    "texts beyond": (made(array(b"a", STRING, 1_000_000, text(b"x"))), "beyond its end"),
    "empty texts": (made(array(b"a", STRING, 3_000_000, bytes(24_000_000))), "more than 1048576 texts"),
    "empty texts of many keys": (
        made(*(array(b"%d" % i, STRING, 50_000, bytes(400_000)) for i in range(30))), "more than 1048576 texts"
    ),
    "many long texts": (
        made(*(text(b"%d" % i) + struct.pack("<I", STRING) + text(bytes(1 << 23)) for i in range(9))), "more than 67108864 bytes"
    ),
    "a long text among them": (made(array(b"a", STRING, 1, struct.pack("<Q", 2**63))), "a text of 9223372036854775808 bytes"),
    "nested": (made(array(b"a", ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 50)), "an array of arrays"),
    "an unknown kind": (made(text(b"a") + struct.pack("<II", 77, 1)), "77"),
    "an array of an unknown kind": (made(array(b"a", 77, 1)), "77"),
    "a key twice": (made(number(b"a", 1), number(b"a", 2)), "key a appears twice"),
    "bytes that are no text": (made(number(b"\xff\xfe", 1)), "damaged"),
    "no alignment": (made(number(b"general.alignment", 0)), "alignment"),
    "an odd alignment": (made(number(b"general.alignment", 24)), "alignment"),
    "a huge alignment": (made(number(b"general.alignment", 2**31), tensors=(tensor(b"t", 4),)), "beyond the end"),
    "an alignment of text": (made(text(b"general.alignment") + struct.pack("<I", STRING) + text(b"x")), "alignment"),
    "dimensions": (made(tensors=(text(b"t") + struct.pack("<I", 2**32 - 1),)), "beyond its end"),
    "nine dimensions": (made(tensors=(tensor(b"t", *[1] * 9),)), "has the shape"),
    "no dimension": (made(tensors=(tensor(b"t"),)), "has the shape"),
    "no elements": (made(tensors=(tensor(b"t", 0, 5),)), "has the shape"),
    "elements": (made(tensors=(tensor(b"t", 2**32, 2**32),)), "beyond the end"),
    "a product that wraps": (made(tensors=(tensor(b"t", 2**62 + 1, 4, 1, 1),)), "beyond the end"),
    "an offset": (made(tensors=(tensor(b"t", 4, offset=2**64 - 32),)), "beyond the end"),
    "an odd offset": (made(tensors=(tensor(b"t", 4, offset=1),)), "not a multiple of 32"),
    "an unknown type": (made(tensors=(tensor(b"t", 32, kind=999),)), "type 999.*update it with pip"),
    "a type that is gone": (made(tensors=(tensor(b"t", 32, kind=4),)), "type 4"),
    "half a block": (made(tensors=(tensor(b"t", 33, kind=2),)), "not whole blocks of 32"),
    "a tensor twice": (made(tensors=(tensor(b"t", 4), tensor(b"t", 4, offset=32))), "tensor t appears twice"),
    "one over another": (made(tensors=(tensor(b"s", 8), tensor(b"t", 8))), "overlaps another"),
    "no architecture": (made(tensors=(tensor(b"t", 8),)), "names no general.architecture"),
    "an architecture of numbers": (made(number(b"general.architecture", 1)), "names no general.architecture"),
    "a strange name": (made(number(b"general.architecture\n\x1b[31m", 1), number(b"general.architecture\n\x1b[31m", 1)), "twice"),
}  # fmt: skip


_SLOW = "empty texts of many keys"  # a million allocations are traced


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=pytest.mark.slow) if one == _SLOW else one for one in HOSTILE]
)
def test_malicious_file_is_refused(case: str, tmp_path: Path) -> None:
    data, says = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(LoadError, match=says) as caught:
            path = tmp_path / "hostile.gguf"
            path.write_bytes(data)
            describe_gguf([path])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(str(path)) and message.isprintable()
    assert peak < _MOST_MEMORY


def test_directory_and_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(LoadError, match=f"cannot read {path}"):
            read_header(path)


def test_large_vocabulary_equals_that_of_the_package(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "large.gguf"
    tokens = [f"token {i} é" for i in range(5000)]
    scores = [float(i) for i in range(5000)]
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores}
    write(path, metadata | {"a.flag": True, "a.empty": "", "a.small": -1.5}, {"t": np.arange(8, dtype=np.float32)})
    header, theirs = read_header(path), gguf.GGUFReader(path)
    for key, value in header.metadata.items():
        assert value == theirs.fields[key].contents(), key
    assert header.tensors["t"].begin == theirs.tensors[0].data_offset
