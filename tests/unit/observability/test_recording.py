"""`--record`: rotated files, and disks that are full for a while."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.eventually import eventually

from windlass.server.config.settings import RecordSettings
from windlass.server.observability.recording import WorkloadRecorder

HEAD = {"windlass_record": 1}


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[WorkloadRecorder]:
    recorder = WorkloadRecorder(RecordSettings(path=tmp_path / "load.jsonl", max_bytes=200))
    yield recorder
    recorder.close()


def put(recorder: WorkloadRecorder, number: int, header: dict[str, Any] = HEAD) -> None:
    recorder.put(lambda: {"number": number}, header=lambda: header)


def written(recorder: WorkloadRecorder, count: int) -> Callable[[], bool]:
    return lambda: recorder.written == count


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_new_file_has_a_header(recorder: WorkloadRecorder, tmp_path: Path) -> None:
    file, away = tmp_path / "load.jsonl", tmp_path / "away.jsonl"
    put(recorder, 1)
    put(recorder, 2)
    eventually(written(recorder, 2), 10)
    file.rename(away)
    put(recorder, 3)
    eventually(written(recorder, 3), 10)
    assert lines_of(away) == [HEAD, {"number": 1}, {"number": 2}]
    assert lines_of(file) == [HEAD, {"number": 3}]


def test_another_server_adds_its_header_to_an_existing_file(recorder: WorkloadRecorder, tmp_path: Path) -> None:
    (tmp_path / "load.jsonl").write_text(json.dumps(HEAD) + '\n{"number": 0}\n')
    other = {"windlass_record": 1, "model": "another"}
    put(recorder, 1, other)
    put(recorder, 2, other)
    eventually(written(recorder, 2), 10)
    assert lines_of(tmp_path / "load.jsonl") == [HEAD, {"number": 0}, other, {"number": 1}, {"number": 2}]


def test_a_full_disk_loses_requests_but_not_the_header(
    recorder: WorkloadRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(file: int, data: Any) -> int:
        if recorder.lost["disk"] < 2:
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("windlass.server.observability.recording.os.write", full)
    for number in range(4):
        put(recorder, number)
    eventually(written(recorder, 2), 10)
    assert recorder.lost == {"disk": 2}
    assert lines_of(tmp_path / "load.jsonl") == [HEAD, {"number": 2}, {"number": 3}]
