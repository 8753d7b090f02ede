"""Block files: readable by the safetensors library; every changed bit and missing byte is detected."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from windlass.engine.cache.disk_tier import (
    BlockFormat,
    DamagedBlockError,
    ForeignBlockError,
    PlaneForm,
    passage_in,
    read_metadata,
)
from windlass.engine.cache.non_prefix_reuse import PassageRecord
from windlass.engine.cache.prefix_cache import BlockKey

KEY = BlockKey(0, bytes(range(32)))
FORMS = [[PlaneForm((2, 4, 3), "BF16", 48), PlaneForm((2, 4), "F32", 32)], [PlaneForm((1, 8), "I8", 8)]]
PASSAGE = PassageRecord(b"p" * 32, 48, (5, 6, 7, 8), (b"passages one", b"passages two"))


def planes(group: int = 0, seed: int = 0) -> list[np.ndarray]:
    numbers = np.random.default_rng(seed)
    return [
        numbers.integers(0, 256, (form.shape[0], form.num_bytes // form.shape[0]), dtype=np.uint8)
        for form in FORMS[group]
    ]


def file_of(
    key: BlockKey = KEY, passage: PassageRecord | None = None, namespace: bytes = b"n" * 32, seed: int = 0
) -> bytes:
    pieces = BlockFormat(namespace, FORMS).encode(key, passage, planes(key.group, seed))
    return b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces)


FORMAT = BlockFormat(b"n" * 32, FORMS)


@pytest.mark.parametrize("passage", [None, PASSAGE])
@pytest.mark.parametrize("group", [0, 1])
def test_what_was_written_comes_back(group: int, passage: PassageRecord | None) -> None:
    key = BlockKey(group, KEY.digest)
    data = bytearray(file_of(key, passage))
    found = FORMAT.decode(key, data)
    assert found.passage == passage and found.num_bytes == len(data)
    for plane, wanted in zip(found.planes, planes(group), strict=True):
        assert np.array_equal(plane, wanted)
    (record, _), _ = read_metadata(data[:4096])
    assert passage_in(record) == passage
    assert FORMAT.fits(group, len(data))


def test_it_is_a_safetensors_file() -> None:
    tensors = load(file_of())
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "plane0": (torch.bfloat16, (2, 4, 3)),
        "plane1": (torch.float32, (2, 4)),
    }
    assert tensors["plane0"].view(torch.uint8).numpy().tobytes() == planes()[0].tobytes()


@pytest.mark.parametrize("passage", [None, PASSAGE])
def test_every_bit_counts(passage: PassageRecord | None) -> None:
    whole = file_of(passage=passage)
    for index in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[index] ^= 1 << bit
            with pytest.raises((DamagedBlockError, ForeignBlockError)):
                FORMAT.decode(KEY, data)


def test_every_byte_counts() -> None:
    whole = file_of(passage=PASSAGE)
    for length in range(len(whole)):
        with pytest.raises(DamagedBlockError):
            FORMAT.decode(KEY, bytearray(whole[:length]))
    with pytest.raises(DamagedBlockError):
        FORMAT.decode(KEY, bytearray(whole + b"\0"))


@pytest.mark.parametrize(
    "file",
    [
        file_of(BlockKey(0, b"o" * 32)),
        file_of(BlockKey(1, KEY.digest)),
        file_of(namespace=b"m" * 32),
    ],
)
def test_a_whole_file_of_something_else_is_foreign(file: bytes) -> None:
    with pytest.raises(ForeignBlockError):
        FORMAT.decode(KEY, bytearray(file))


def test_the_data_of_another_block_under_this_name_is_damaged() -> None:
    data = bytearray(file_of())
    data[-80:] = file_of(seed=1)[-80:]
    with pytest.raises(DamagedBlockError):
        FORMAT.decode(KEY, data)


@given(st.binary(max_size=300))
def test_anything_else_is_damaged(data: bytes) -> None:
    for file in (data, len(data).to_bytes(8, "little") + data, (2).to_bytes(8, "little") + b"[]" + data):
        with pytest.raises(DamagedBlockError):
            FORMAT.decode(KEY, bytearray(file))


@pytest.mark.parametrize(
    "header",
    [
        "{}",
        '{"__metadata__": 5}',
        '{"__metadata__": {"block": 5, "sha256": ""}}',
        '{"__metadata__": {"block": "5", "sha256": ""}}',
        '{"__metadata__": {"block": "x", "sha256": ""}}',
        "[" * 5000,
    ],
)
def test_headers_that_say_nothing(header: str) -> None:
    text = header.encode()
    with pytest.raises((DamagedBlockError, ForeignBlockError)):
        FORMAT.decode(KEY, bytearray(len(text).to_bytes(8, "little") + text))


@pytest.mark.parametrize(
    "number", ["Infinity", "-Infinity", "NaN", "1e999", "4.5", "true", '"4"', "[4]", "null", "9" * 99]
)
@pytest.mark.parametrize("field", ["position", "token_ids"])
def test_a_passage_of_numbers_that_are_none_of_ours_is_damaged(field: str, number: str) -> None:
    said = {"parent": "00", "position": 0, "token_ids": [1, 2], "scopes": ["00"]}
    assert passage_in(json.dumps({"passage": said})) is not None
    said[field] = "?" if field == "position" else [1, "?"]
    with pytest.raises(DamagedBlockError):
        passage_in(json.dumps({"passage": said}).replace('"?"', number))
