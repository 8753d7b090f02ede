"""Folder of block files: only whole files appear, the oldest are removed, other files stay, killed writers do no harm."""

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
from helpers.eventually import eventually

from windlass.engine.cache.disk_tier import BlockDirectory, BlockFormat, DamagedBlockError, ForeignBlockError, PlaneForm
from windlass.engine.cache.non_prefix_reuse import PassageRecord
from windlass.engine.cache.prefix_cache import BlockKey

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


def test_written_and_read(tmp_path: Path) -> None:
    folder = directory(tmp_path)
    size = folder.write(key(1), 0, PASSAGE, planes(1))
    found = folder.read(key(1))
    assert found is not None and found.num_bytes == size and np.array_equal(found.planes[0], planes(1)[0])
    assert folder.passage_of(key(1)) == PASSAGE and list(folder.present()) == [key(1)]
    assert folder.read(key(2)) is None
    folder.remove(key(1))
    folder.remove(key(1))
    assert folder.read(key(1)) is None and list(folder.present()) == []


def test_only_its_owner_may_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = directory(tmp_path)
        put(folder, 1)
    finally:
        os.umask(before)
    (file,) = folder.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(folder.folder.stat().st_mode) == 0o700


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = directory(tmp_path)
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        put(folder, 1)
    assert list(folder.folder.iterdir()) == []


def test_a_folder_that_went_away_comes_again(tmp_path: Path) -> None:
    folder = directory(tmp_path)
    folder.folder.rmdir()
    assert list(folder.present()) == [] and folder.changed_at() == 0
    put(folder, 1)
    assert folder.read(key(1)) is not None


def test_names_and_kinds_that_are_not_ours(tmp_path: Path) -> None:
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


def test_a_file_under_another_name(tmp_path: Path) -> None:
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


def test_the_longest_unused_go_and_of_one_text_the_tail(tmp_path: Path) -> None:
    size = 8192  # on disk, header and all
    folder, other = directory(tmp_path, 16 * size), directory(tmp_path, 16 * size, b"m" * 32)
    for number in range(10):
        put(folder, number, index=number)
    for number in range(10):
        put(other, number, index=number)
    hour = time.time_ns() - 3600 * 10**9
    for path in other.folder.iterdir():
        os.utime(path, ns=(hour, path.stat().st_mtime_ns - 3600 * 10**9))
    other.touch(key(1), 0)
    (folder.folder / "notes.txt").write_bytes(b"x" * 10 * size)  # neither counted nor removed
    left, removed, fault = folder.enforce_cap()
    assert fault is None and left <= 14 * size and removed == 20 - left // size
    kept = {found.digest[0] for found in other.present()}
    assert 2 < removed < 8 and kept == set(range(10 - removed))
    assert len(list(folder.present())) == 10 and (folder.folder / "notes.txt").exists()
    assert folder.enforce_cap() == (left, 0, None)


def test_what_a_killed_writer_left_goes_after_a_while(tmp_path: Path) -> None:
    folder = directory(tmp_path)
    new, old = folder.folder / ".1.part", folder.folder / ".2.part"
    for part in (new, old):
        part.write_bytes(b"x" * 5000)
    os.utime(old, (time.time() - 1000, time.time() - 1000))
    assert folder.enforce_cap() == (8192, 0, None)
    assert new.exists() and not old.exists()


def test_files_that_vanish_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = directory(tmp_path, 1)
    for number in range(5):
        put(folder, number)
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **_: (unlink(path), unlink(path)))
    assert folder.enforce_cap() == (0, 5, None) and list(folder.present()) == []


def test_files_that_cannot_be_removed_are_counted_as_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay, and others are removed instead."""
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


def test_writers_killed_at_any_moment_leave_whole_files(tmp_path: Path) -> None:
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
