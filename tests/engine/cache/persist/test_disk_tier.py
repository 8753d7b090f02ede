"""Block files and their folder: damage is detected, only whole files appear, the oldest are removed."""

import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.eventually import eventually
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from windlass.engine.cache.disk_tier import (
    BlockDirectory,
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
FILE_FORMS = [[PlaneForm((2, 4, 3), "BF16", 48), PlaneForm((2, 4), "F32", 32)], [PlaneForm((1, 8), "I8", 8)]]
FILE_PASSAGE = PassageRecord(b"p" * 32, 48, (5, 6, 7, 8), (b"passages one", b"passages two"))


def file_planes(group: int = 0, seed: int = 0) -> list[np.ndarray]:
    numbers = np.random.default_rng(seed)
    return [
        numbers.integers(0, 256, (form.shape[0], form.num_bytes // form.shape[0]), dtype=np.uint8)
        for form in FILE_FORMS[group]
    ]


def file_of(
    key: BlockKey = KEY, passage: PassageRecord | None = None, namespace: bytes = b"n" * 32, seed: int = 0
) -> bytes:
    pieces = BlockFormat(namespace, FILE_FORMS).encode(key, passage, file_planes(key.group, seed))
    return b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces)


FORMAT = BlockFormat(b"n" * 32, FILE_FORMS)


@pytest.mark.parametrize("passage", [None, FILE_PASSAGE])
@pytest.mark.parametrize("group", [0, 1])
def test_encoded_blocks_are_decoded_exactly(group: int, passage: PassageRecord | None) -> None:
    key = BlockKey(group, KEY.digest)
    data = bytearray(file_of(key, passage))
    found = FORMAT.decode(key, data)
    assert found.passage == passage and found.num_bytes == len(data)
    for plane, wanted in zip(found.planes, file_planes(group), strict=True):
        assert np.array_equal(plane, wanted)
    (record, _), _ = read_metadata(data[:4096])
    assert passage_in(record) == passage
    assert FORMAT.fits(group, len(data))


def test_block_files_are_safetensors_files() -> None:
    tensors = load(file_of())
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "plane0": (torch.bfloat16, (2, 4, 3)),
        "plane1": (torch.float32, (2, 4)),
    }
    assert tensors["plane0"].view(torch.uint8).numpy().tobytes() == file_planes()[0].tobytes()


@pytest.mark.parametrize("passage", [None, FILE_PASSAGE])
def test_every_changed_bit_is_detected(passage: PassageRecord | None) -> None:
    whole = file_of(passage=passage)
    for index in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[index] ^= 1 << bit
            with pytest.raises((DamagedBlockError, ForeignBlockError)):
                FORMAT.decode(KEY, data)


def test_every_missing_byte_is_detected() -> None:
    whole = file_of(passage=FILE_PASSAGE)
    for length in range(len(whole)):
        with pytest.raises(DamagedBlockError):
            FORMAT.decode(KEY, bytearray(whole[:length]))
    with pytest.raises(DamagedBlockError):
        FORMAT.decode(KEY, bytearray(whole + b"\0"))


@pytest.mark.parametrize(
    "file", [file_of(BlockKey(0, b"o" * 32)), file_of(BlockKey(1, KEY.digest)), file_of(namespace=b"m" * 32)]
)
def test_a_valid_file_of_another_block_is_foreign(file: bytes) -> None:
    with pytest.raises(ForeignBlockError):
        FORMAT.decode(KEY, bytearray(file))


def test_data_of_another_block_is_damaged() -> None:
    data = bytearray(file_of())
    data[-80:] = file_of(seed=1)[-80:]
    with pytest.raises(DamagedBlockError):
        FORMAT.decode(KEY, data)


@given(st.binary(max_size=300))
def test_random_bytes_are_damaged(data: bytes) -> None:
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
def test_invalid_headers_are_refused(header: str) -> None:
    text = header.encode()
    with pytest.raises((DamagedBlockError, ForeignBlockError)):
        FORMAT.decode(KEY, bytearray(len(text).to_bytes(8, "little") + text))


@pytest.mark.parametrize(
    "number", ["Infinity", "-Infinity", "NaN", "1e999", "4.5", "true", '"4"', "[4]", "null", "9" * 99]
)
@pytest.mark.parametrize("field", ["position", "token_ids"])
def test_a_passage_with_invalid_numbers_is_damaged(field: str, number: str) -> None:
    record = {"parent": "00", "position": 0, "token_ids": [1, 2], "scopes": ["00"]}
    assert passage_in(json.dumps({"passage": record})) is not None
    record[field] = "?" if field == "position" else [1, "?"]
    with pytest.raises(DamagedBlockError):
        passage_in(json.dumps({"passage": record}).replace('"?"', number))


FORMS = [[PlaneForm((2, 512), "F32", 4096)]]
PASSAGE = PassageRecord(b"p" * 32, 0, (1, 2), (b"scope",))


def directory(root: Path, max_bytes: int = 1 << 30, namespace: bytes = b"n" * 32) -> BlockDirectory:
    return BlockDirectory(root, BlockFormat(namespace, FORMS), max_bytes)


def key(number: int) -> BlockKey:
    return BlockKey(0, number.to_bytes(32, "little"))


def planes(number: int) -> list[np.ndarray]:
    return [np.full((2, 2048), number % 251, np.uint8)]


def put(folder: BlockDirectory, number: int, index: int = 0) -> None:
    folder.write(key(number), index, None, planes(number))


def test_blocks_are_written_read_and_removed(tmp_path: Path) -> None:
    folder = directory(tmp_path)
    size = folder.write(key(1), 0, PASSAGE, planes(1))
    found = folder.read(key(1))
    assert found is not None and found.num_bytes == size and np.array_equal(found.planes[0], planes(1)[0])
    assert folder.passage_of(key(1)) == PASSAGE and list(folder.present()) == [key(1)]
    assert folder.read(key(2)) is None
    folder.remove(key(1))
    folder.remove(key(1))
    assert folder.read(key(1)) is None and list(folder.present()) == []


def test_files_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = directory(tmp_path)
        put(folder, 1)
    finally:
        os.umask(before)
    (file,) = folder.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(folder.folder.stat().st_mode) == 0o700


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = directory(tmp_path)
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        put(folder, 1)
    assert list(folder.folder.iterdir()) == []


def test_a_deleted_folder_is_created_again(tmp_path: Path) -> None:
    folder = directory(tmp_path)
    folder.folder.rmdir()
    assert list(folder.present()) == [] and folder.changed_at() == 0
    put(folder, 1)
    assert folder.read(key(1)) is not None


def test_other_names_and_file_types_are_ignored(tmp_path: Path) -> None:
    folder = directory(tmp_path)
    put(folder, 1)
    name = key(2).digest.hex()
    for other in (
        "notes.txt",
        "x.safetensors",
        f"{name}.safetensors",
        f"{name}-.safetensors",
        f"{name}-²-0.safetensors",
    ):
        (folder.folder / other).write_bytes(b"x")
    (folder.folder / f"{'g' * 64}-0.safetensors").write_bytes(b"x")
    assert list(folder.present()) == [key(1)]
    os.mkfifo(folder.folder / f"{name}-0.safetensors")  # opening one waits for its writer
    with pytest.raises((DamagedBlockError, OSError)):
        folder.read(key(2))
    (folder.folder / f"{name}-0.safetensors").unlink()
    (folder.folder / f"{name}-0.safetensors").symlink_to("/dev/zero")
    with pytest.raises((DamagedBlockError, OSError)):
        folder.read(key(2))


def test_a_renamed_file_is_foreign(tmp_path: Path) -> None:
    folder, other = directory(tmp_path), directory(tmp_path, namespace=b"m" * 32)
    put(folder, 1)
    put(other, 2)
    (file,) = folder.folder.iterdir()
    file.rename(file.with_name(file.name.replace(key(1).digest.hex(), key(3).digest.hex())))
    with pytest.raises(ForeignBlockError):
        folder.read(key(3))
    (file,) = other.folder.iterdir()
    file.rename(folder.folder / file.name)
    with pytest.raises(ForeignBlockError):
        folder.read(key(2))


def test_least_recently_used_files_and_tails_are_removed_first(tmp_path: Path) -> None:
    size = 8192  # on disk, with its header
    folder, other = directory(tmp_path, 16 * size), directory(tmp_path, 16 * size, b"m" * 32)
    for number in range(10):
        put(folder, number, index=number)
    for number in range(10):
        put(other, number, index=number)
    hour = time.time_ns() - 3600 * 10**9
    for path in other.folder.iterdir():
        os.utime(path, ns=(hour, path.stat().st_mtime_ns - 3600 * 10**9))
    other.touch(key(1), 0)
    (folder.folder / "notes.txt").write_bytes(b"x" * 10 * size)  # is neither counted nor removed
    left, removed, fault = folder.enforce_cap()
    assert fault is None and left <= 14 * size and removed == 20 - left // size
    kept = {found.digest[0] for found in other.present()}
    assert 2 < removed < 8 and kept == set(range(10 - removed))
    assert len(list(folder.present())) == 10 and (folder.folder / "notes.txt").exists()
    assert folder.enforce_cap() == (left, 0, None)


def test_old_partial_files_are_removed(tmp_path: Path) -> None:
    folder = directory(tmp_path)
    new, old = folder.folder / ".1.part", folder.folder / ".2.part"
    for part in (new, old):
        part.write_bytes(b"x" * 5000)
    os.utime(old, (time.time() - 1000, time.time() - 1000))
    assert folder.enforce_cap() == (8192, 0, None)
    assert new.exists() and not old.exists()


def test_files_removed_by_others_are_counted_as_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = directory(tmp_path, 1)
    for number in range(5):
        put(folder, number)
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **_: (unlink(path), unlink(path)))
    assert folder.enforce_cap() == (0, 5, None) and list(folder.present()) == []


def test_files_that_cannot_be_removed_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are removed instead."""
    folder = directory(tmp_path, 8 * 8192)
    for number in range(10):
        put(folder, number, index=number)
    part = folder.folder / ".1.part"
    part.write_bytes(b"x" * 5000)
    os.utime(part, (time.time() - 1000, time.time() - 1000))
    kept = {f"{key(9).digest.hex()}-0.safetensors", f"{key(8).digest.hex()}-0.safetensors", part.name}  # the oldest
    unlink = Path.unlink

    def limited(path: Path, **options: bool) -> None:
        if path.name in kept:
            raise PermissionError(13, "Permission denied")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", limited)
    left, removed, fault = folder.enforce_cap()
    files = list(folder.folder.iterdir())
    assert isinstance(fault, PermissionError) and kept <= {file.name for file in files}
    assert (left, removed) == (7 * 8192, 4) and sum(file.stat().st_blocks * 512 for file in files) == left


_WRITER = """
import sys
from pathlib import Path
import numpy as np
from windlass.engine.cache.disk_tier import BlockDirectory, BlockFormat, PlaneForm
from windlass.engine.cache.prefix_cache import BlockKey

forms = [[PlaneForm((2, 512), "F32", 4096)]]
folder = BlockDirectory(Path(sys.argv[1]), BlockFormat(b"n" * 32, forms), 1 << 30)
print("ready", flush=True)
number = 0
while True:
    number = (number + 1) % 500
    folder.write(BlockKey(0, number.to_bytes(32, "little")), 0, None, [np.full((2, 2048), number % 251, np.uint8)])
"""


@pytest.mark.slow
def test_killed_writers_leave_only_complete_files(tmp_path: Path) -> None:
    moments = random.Random(5)
    for _ in range(5):
        writers = [
            subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        eventually(lambda: any(tmp_path.glob("*/*.safetensors")), 30)  # in the first round
        time.sleep(0.05 + 0.1 * moments.random())
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        folder = directory(tmp_path)
        keys = list(folder.present())
        assert keys
        for one in keys:
            found = folder.read(one)
            number = int.from_bytes(one.digest, "little")
            assert found is not None and np.array_equal(found.planes[0], planes(number)[0])
