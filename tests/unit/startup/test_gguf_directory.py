"""The directory derived from a GGUF model: created once, found again, replaced with the file, and never incomplete."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.gguf_conversion import byte_vocabulary, convert, metadata_of, tensors_of, write
from helpers.tiny_models import make_model

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.sentence_transformers_files import read_pooling
from windlass.server.startup import derived_files
from windlass.server.startup.derived_files import derive_gguf_directory, source_stem
from windlass.server.startup.model_files import choose_model, resolve_model

FILES = {"config.json", "generation_config.json", "gguf.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("hf"), vocab_size=261, num_hidden_layers=2)


@pytest.fixture
def file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("WINDLASS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "models").mkdir()
    return convert(source, tmp_path / "models" / "tiny-Q8_0.gguf", kind="Q8_0", tokenizer=byte_vocabulary())


def split(source: Path, directory: Path) -> list[Path]:
    """A model in three files, as llama.cpp's gguf-split leaves them: the first one has all the metadata."""
    config = json.loads((source / "config.json").read_text())
    tensors = list(tensors_of(source, config))
    paths = [directory / f"tiny-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        part = {
            "general.architecture": "llama",
            "split.no": number,
            "split.count": 3,
            "split.tensors.count": len(tensors),
        }
        metadata = {**metadata_of(config), **byte_vocabulary(), **part} if number == 0 else part
        write(path, metadata, dict(tensors[number::3]))
    return paths


def test_a_directory_is_created_once(file: Path, tmp_path: Path) -> None:
    made = resolve_model(str(file))
    assert made.parent == tmp_path / "cache" / "windlass" / "gguf" and made.name.startswith("tiny-Q8_0-")
    assert {path.name for path in made.iterdir()} == FILES and list(made.parent.iterdir()) == [made]
    assert choose_model(str(file)) == ("tiny-Q8_0", made) and source_stem(made) == "tiny-Q8_0"
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    assert resolve_model(str(file)) == resolve_model(str(file.parent)) == made
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before
    assert choose_model(str(file.parent)) == ("tiny-Q8_0", made)


@pytest.mark.parametrize(
    ("number", "kind"), [(None, None), (0, None), (1, "mean"), (2, "first"), (3, "last"), ([0], None)], ids=str
)
def test_pooling_of_embeddings(source: Path, file: Path, number: int | list[int] | None, kind: str | None) -> None:
    extra = {} if number is None else {"llama.pooling_type": number}
    convert(source, file, kind="Q8_0", tokenizer={**byte_vocabulary(), **extra})
    found = read_pooling(derive_gguf_directory(file))
    assert (found.kind, found.normalize, found.declared, found.refusal) == (
        kind or "last",
        True,
        kind is not None,
        None,
    )


def test_a_later_start_imports_neither_numpy_nor_gguf(file: Path) -> None:
    code = (
        "import sys\nfrom windlass.server.startup.model_files import resolve_model\nresolve_model(sys.argv[1])\n"
        "print([m for m in ('numpy', 'gguf', 'tokenizers', 'torch') if m in sys.modules])"
    )
    derive_gguf_directory(file)
    result = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"


def test_the_directory_of_a_changed_file_is_replaced_once_unused(file: Path) -> None:
    code = (
        "import sys\nfrom windlass.server.startup.model_files import resolve_model\n"
        "print(resolve_model(sys.argv[1]), flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        old = Path(server.stdout.readline().strip())
        os.utime(file, ns=(0, 0))
        new = derive_gguf_directory(file)
        assert new != old and set(new.parent.iterdir()) == {old, new}
        server.communicate("")
    os.utime(file, ns=(1, 1))
    newer = derive_gguf_directory(file)
    assert set(newer.parent.iterdir()) == {new, newer}  # this process has used both


def test_directories_of_other_files_remain(file: Path) -> None:
    first = derive_gguf_directory(file)
    other = file.with_name("other.gguf")
    shutil.copy(file, other)
    assert {first, derive_gguf_directory(other)} == set(first.parent.iterdir())


@pytest.mark.parametrize("damage", ["config.json", "gguf.json", "tokenizer.json", "cut off"])
def test_a_damaged_directory_is_replaced(damage: str, file: Path) -> None:
    made = derive_gguf_directory(file)
    whole = (made / "config.json").read_bytes()
    if damage == "cut off":
        (made / "gguf.json").write_text('{"files": [')
    else:
        (made / damage).unlink()
    assert derive_gguf_directory(file) == made and list(made.parent.iterdir()) == [made]
    assert {path.name for path in made.iterdir()} == FILES and (made / "config.json").read_bytes() == whole


def test_two_servers_at_once(file: Path) -> None:
    """Both find none, and both create one."""
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(derive_gguf_directory, [file] * 8))
    assert len(made) == 1 and list(next(iter(made)).parent.iterdir()) == list(made)
    assert {path.name for path in next(iter(made)).iterdir()} == FILES


def test_a_refused_file_leaves_no_directory(file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(LoadError, match="beyond the end of the file"):
        derive_gguf_directory(file)
    assert list((tmp_path / "cache" / "windlass" / "gguf").iterdir()) == []


def test_without_a_writable_cache(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    removed = []
    monkeypatch.setattr(derived_files.atexit, "register", lambda function, path, **_: removed.append(path))
    made = derive_gguf_directory(file)
    assert {path.name for path in made.iterdir()} == FILES and removed == [made]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot be cached" in said and "WINDLASS_CACHE" in said
    shutil.rmtree(made)


def test_a_split_model_by_any_of_its_files(source: Path, file: Path) -> None:
    paths = split(source, file.parent)
    made = {resolve_model(str(path)) for path in paths}
    assert len(made) == 1
    directory = made.pop()
    index = json.loads((directory / "gguf.json").read_text())
    assert [entry["path"] for entry in index["files"]] == list(map(str, paths))
    assert {entry["file"] for entry in index["tensors"].values()} == {0, 1, 2}
    assert source_stem(directory) == "tiny"
    whole = json.loads((derive_gguf_directory(file) / "config.json").read_text())
    assert json.loads((directory / "config.json").read_text()) == whole


def test_a_part_is_missing(source: Path, file: Path) -> None:
    first, second, third = split(source, file.parent)
    second.unlink()
    for path in (first, third):
        with pytest.raises(LoadError, match=r"^tiny-00002-of-00003\.gguf is missing next to .*part 2 of the 3"):
            resolve_model(str(path))
    first.rename(second)
    with pytest.raises(LoadError, match=r"tiny-00001-of-00003\.gguf is missing"):
        resolve_model(str(second))


def test_parts_with_wrong_numbers(source: Path, file: Path) -> None:
    first, second, third = split(source, file.parent)
    second.rename(file)
    third.rename(second)
    file.rename(third)
    with pytest.raises(LoadError, match=r"tiny-00002-of-00003\.gguf declares part 2 \(from 0\) of 3.*part 1 of 3"):
        resolve_model(str(first))
    whole = first.with_name("renamed.gguf")
    first.rename(whole)
    with pytest.raises(LoadError, match="declares part 0"):
        resolve_model(str(whole))
    odd = first.with_name("tiny-00007-of-00003.gguf")
    odd.touch()
    with pytest.raises(LoadError, match="is not a part of a split model"):
        resolve_model(str(odd))


def test_a_directory_with_several_models(file: Path) -> None:
    """Vision and audio parts, and importance matrices, are not models."""
    for name in ("mmproj-F16.gguf", "tiny.imatrix.gguf"):
        shutil.copy(file, file.with_name(name))
    assert source_stem(resolve_model(str(file.parent))) == "tiny-Q8_0"
    shutil.copy(file, file.with_name("tiny-F16.gguf"))
    with pytest.raises(
        LoadError, match=r"several GGUF files \(tiny-F16\.gguf, tiny-Q8_0\.gguf\): name one, such as .*/models/tiny-F16"
    ):
        resolve_model(str(file.parent))
    (file.parent / "config.json").write_text("{}")
    (file.parent / "model.safetensors").touch()
    assert resolve_model(str(file.parent)) == file.parent  # safetensors come first


def test_a_file_without_the_suffix(file: Path) -> None:
    blob = file.with_name("sha256-0123")
    file.rename(blob)
    assert source_stem(resolve_model(str(blob))) == "sha256-0123"
