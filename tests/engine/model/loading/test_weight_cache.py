"""Weight cache: equal bits with and without it, and errors of the cache never prevent a start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import engine_config
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run
from helpers.eventually import exit_code
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file

from windlass import kernels
from windlass.engine.errors import LoadError
from windlass.engine.model.loading import weight_cache
from windlass.engine.model.loading.loader import LoadedModel, load_model
from windlass.engine.model.loading.tensor_reader import write_tensors
from windlass.engine.model.loading.weight_cache import FOLDER, WeightCache, decoder_tensors
from windlass.engine.model.weight_storage import RECIPES
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.torch.torch_backend import TorchBackend

FAMILIES = ("llama_bias", "gemma3", "glm")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(family, root / family) for family in FAMILIES}


@pytest.fixture
def model(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A tied model with biases, for each test."""
    return Path(shutil.copytree(originals["llama_bias"], tmp_path / "model"))


def load(directory: Path, cache: Path | str | None = "beside", **options: Any) -> LoadedModel:
    given: dict[str, Any] = {"quantization": "int8", "device": "cpu", **options}
    return load_model(engine_config(directory, weight_cache=None if cache is None else str(cache), **given))


def files(directory: Path) -> list[Path]:
    return sorted((directory / FOLDER).iterdir())


def same_weights(found: LoadedModel, wanted: LoadedModel) -> bool:
    mine, theirs = decoder_tensors(found.decoder), decoder_tensors(wanted.decoder)
    assert mine.keys() == theirs.keys()
    return all(bits(mine[name]) == bits(theirs[name]) for name in mine)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def notice(loaded: LoadedModel) -> str:
    (line,) = (line for line in loaded.notices if "weight" in line)
    assert "\n" not in line
    return line


def was_read(loaded: LoadedModel) -> bool:
    return "quantized weights read from" in notice(loaded)


@pytest.fixture
def no_quantizing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        def pack(*_: object) -> None:
            raise AssertionError("weights were quantized although they are cached")

        for backend in (CompiledBackend, TorchBackend):
            monkeypatch.setattr(backend, "pack", pack)

    return forbid


@ON_A_CPU
@pytest.mark.parametrize("width", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_weights_give_the_same_bits(
    family: str, width: str, originals: dict[str, Path], tmp_path: Path, no_quantizing: Callable[[], None]
) -> None:
    options = {"quantization": width, "prefix_caching": False}
    sent = [greedy("x", [5, 9, 3, 17, 11], 6)]
    want = run(make_core(originals[family], **options), sent)
    first = run(make_core(originals[family], weight_cache=str(tmp_path), **options), sent)
    no_quantizing()
    core = make_core(originals[family], weight_cache=str(tmp_path), **options)
    again = run(core, sent)
    assert any("read from" in line for line in core.info.notices)
    for got in (first, again):
        assert got["x", 0].token_ids == want["x", 0].token_ids
        for mine, theirs in zip(got["x", 0].logits, want["x", 0].logits, strict=True):
            assert torch.equal(mine, theirs)


def test_first_start_writes_one_safetensors_file(model: Path) -> None:
    loaded = load(model)
    (path,) = files(model)
    assert f"stored in {path}" in notice(loaded)
    assert path.name.startswith("int8-float32-") and path.suffix == ".safetensors"
    found = load_file(path)
    assert found.keys() == decoder_tensors(loaded.decoder).keys()
    for name, tensor in decoder_tensors(loaded.decoder).items():
        assert found[name].dtype == tensor.dtype and bits(found[name]) == bits(tensor), name
    assert "head.codes" not in found, "a tied head is the embedding's"
    umask = os.umask(0o022)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_other_options_have_separate_files(model: Path, tmp_path: Path) -> None:
    for options in ({}, {"quantization": "int4"}, {"dtype": "bfloat16"}):
        assert not was_read(load(model, **options))
        assert was_read(load(model, **options))
    assert len(files(model)) == 3
    # One folder for two models of one name.
    shared, other = tmp_path / "shared", tmp_path / "elsewhere" / "model"
    shutil.copytree(model, other)
    assert not was_read(load(model, shared)) and not was_read(load(other, shared))
    assert was_read(load(model, shared)) and was_read(load(other, shared))
    assert len(list(shared.iterdir())) == 2
    assert all(path.name.startswith("model-") for path in shared.iterdir())


def change_weights(model: Path) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, path, metadata={"format": "pt"})


def touch(model: Path) -> None:
    stat = (model / "model.safetensors").stat()
    os.utime(model / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def change_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_weights, "the checkpoint has changed"),
        (touch, "the checkpoint has changed"),
        (change_config, "config.json has changed"),
    ],
)
def test_stale_cache_is_replaced(change: Callable[[Path], None], reason: str, model: Path) -> None:
    load(model)
    change(model)
    stale = load(model)
    assert [line for line in stale.notices if "is not used" in line and reason in line]
    assert same_weights(stale, load(model, None))
    renewed = load(model)
    assert was_read(renewed) and same_weights(renewed, stale)
    assert len(files(model)) == 1, "a stale file was left beside its successor"


@pytest.mark.parametrize(
    ("where", "name", "value", "reason"),
    [
        (weight_cache, "__version__", "0.0.0", "another version"),
        (kernels, "LAYOUT_VERSION", 0, "another layout"),
    ],
)
def test_cache_of_another_version_is_replaced(
    where: Any, name: str, value: Any, reason: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(where, name, value)
        load(model)
    assert [line for line in load(model).notices if reason in line]
    assert was_read(load(model))


def test_cache_of_another_recipe_is_replaced(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same option with another choice of formats."""
    with monkeypatch.context() as patch:
        patch.setitem(RECIPES, "int4", lambda *_: "q5_k")
        load(model, quantization="int4")
        assert was_read(load(model, quantization="int4"))
    found = load(model, quantization="int4")
    assert [line for line in found.notices if "is not used" in line and "quantized in another way" in line]
    assert was_read(load(model, quantization="int4")) and len(files(model)) == 1


def test_cache_does_not_depend_on_the_processor(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantization gives the same bytes without compiled kernels, so that files can be copied to other machines."""
    load(model)
    with monkeypatch.context() as patch:
        patch.setattr("windlass.kernels.cpu.library.unavailable_reason", lambda: "not here")
        assert was_read(load(model))
        (file,) = files(model)
        read = file.read_bytes()
        file.unlink()
        load(model)
    assert files(model) == [file]
    assert file.read_bytes() == read


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    save_file({"a": torch.zeros(3)}, path)


def other_tensors(path: Path) -> None:
    """Write a file with the right fingerprint and tensors of other shapes."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    save_file({"a": torch.zeros(3)}, path, metadata=header["__metadata__"])


def damaged_metadata(path: Path) -> None:
    save_file(load_file(path), path, metadata={"kind": "windlass quantized weights", "fingerprint": "["})


def odd_metadata(path: Path) -> None:
    save_file(load_file(path), path, metadata={"kind": "windlass quantized weights", "fingerprint": "[1]"})


def not_finite(path: Path) -> None:
    """Write a file with the right fingerprint and a scale that is NaN."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = load_file(path)
    tensors["layers.1.out.scales"][0, 0, 0, 5] = torch.nan
    save_file(tensors, path, metadata=header["__metadata__"])


def test_non_finite_checkpoint_is_not_cached(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    for _ in range(2):
        with pytest.raises(LoadError, match=r"up_proj\.weight' contains numbers that are NaN or infinite"):
            load(model)
    assert not (model / FOLDER).exists()


@pytest.mark.parametrize(
    "damage", [not_finite, cut, garble, empty, foreign, other_tensors, damaged_metadata, odd_metadata]
)
def test_unusable_file_is_replaced(damage: Callable[[Path], None], model: Path) -> None:
    want = load(model)
    (path,) = files(model)
    damage(path)
    found = load(model)
    lines = [line for line in found.notices if "is not used" in line]
    assert len(lines) == 1 and lines[0].count(str(path)) == 1 and "\n" not in lines[0]
    assert same_weights(found, want)
    assert was_read(load(model)) and len(files(model)) == 1


def test_directory_in_place_of_the_file_is_ignored(model: Path) -> None:
    want = load(model)
    (path,) = files(model)
    path.unlink()
    path.mkdir()
    found = load(model)
    assert [line for line in found.notices if "is not used" in line]
    assert [line for line in found.notices if "cannot be written" in line]
    assert same_weights(found, want) and files(model) == [path]


def test_failing_read_gives_correct_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = load(model)
    original = weight_cache.read_tensors

    def broken(path: Path, place: Any) -> Any:
        for count, entry in enumerate(original(path, place)):
            if count == 5:
                raise OSError(5, "Input/output error")
            entry.tensor.view(-1).view(torch.uint8).fill_(0x5A)
            yield entry

    monkeypatch.setattr(weight_cache, "read_tensors", broken)
    found = load(model)
    assert any("Input/output error" in line for line in found.notices)
    assert same_weights(found, want)


@pytest.mark.skipif(os.name != "posix", reason="modes of folders")
def test_unwritable_folder_gives_a_notice(model: Path, tmp_path: Path) -> None:
    """Modes do not restrict root: a file is in the folder's place then."""
    for where in (tmp_path / "file" / "inside", a_place_without_permission(tmp_path)):
        (tmp_path / "file").touch()
        loaded = load(model, where)
        assert "cannot be written" in notice(loaded) and str(where) in notice(loaded)
        assert same_weights(loaded, load(model, None))


def a_place_without_permission(tmp_path: Path) -> Path:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    return locked if os.geteuid() else Path("/proc/1/windlass")


def test_full_disk_leaves_no_files(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        yield from list(write_tensors(*arguments))[:2]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_cache, "write_tensors", full)
    loaded = load(model, tmp_path / "cache")
    assert "No space left on device" in notice(loaded)
    assert list((tmp_path / "cache").iterdir()) == []


def test_old_temporary_files_are_removed(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    model = model.rename(tmp_path / "a [strange] name*")
    load(model, cache)
    (path,) = cache.iterdir()
    path.unlink()
    old, young, other = (
        path.with_name(f".{name}.part") for name in (f"{path.name}.01", f"{path.name}.23", "another.45")
    )
    for part in (old, young, other):
        part.write_bytes(b"half")
    for part in (old, other):
        os.utime(part, (time.time() - 7200,) * 2)
    load(model, cache)
    assert not old.exists() and young.exists() and other.exists() and path.exists()


def test_changing_checkpoint_is_not_cached(model: Path) -> None:
    loaded = load(model, None)
    cache = WeightCache("beside", model, "int8", loaded.decoder)
    touch(model)
    cache.store(loaded.decoder)
    assert "changed while it was read" in cache.notices[0]
    assert not (model / FOLDER).exists()


@ON_A_CPU
@pytest.mark.slow
def test_concurrent_starts_share_a_folder(model: Path) -> None:
    """Two processes and two threads with an empty folder: a later one reads a complete file."""
    want = load(model, None)
    script = (
        "import sys\nfrom windlass.engine.interface.config import ComputeConfig, EngineConfig, LoadingConfig\n"
        "from windlass.engine.model.loading.loader import load_model\n"
        "for _ in range(3):\n"
        "    compute = ComputeConfig(quantization='int8', device='cpu')\n"
        "    loading = LoadingConfig(weight_cache='beside')\n"
        "    m = load_model(EngineConfig(model=sys.argv[1], compute=compute, loading=loading))\n"
        "assert not [n for n in m.notices if 'not used' in n or 'cannot' in n], m.notices\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, str(model)]) for _ in range(2)]
    found: list[LoadedModel] = []
    threads = [threading.Thread(target=lambda: found.extend(load(model) for _ in range(4))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [exit_code(process, 60) for process in processes] == [0, 0]
    assert len(found) == 8 and all(same_weights(loaded, want) for loaded in found)
    assert len(files(model)) == 1 and was_read(load(model))


@pytest.mark.parametrize("options", [{"quantization": "none"}, {"load_format": "dummy"}], ids=str)
def test_option_without_effect_is_reported(options: dict[str, Any], model: Path) -> None:
    assert "`loading.weight_cache` has no effect" in notice(load(model, **options))
    assert not (model / FOLDER).exists()


def test_without_the_option_nothing_is_written(model: Path) -> None:
    before = sorted(model.rglob("*"))
    assert not [line for line in load(model, None).notices if "weight" in line]
    assert sorted(model.rglob("*")) == before


def test_unreadable_checkpoint_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"no model\.safetensors"):
        load(model)


@ON_A_CPU
@pytest.mark.slow
def test_reading_the_cache_does_not_duplicate_weights(tmp_path: Path) -> None:
    """130 MB of packed weights are read into place, and written without a copy."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 8000,
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    hidden, inner = 2048, 5504
    shapes = {"model.embed_tokens.weight": (8000, hidden), "model.norm.weight": (hidden,)}
    for i in range(2):
        rows = {"q": 2048, "k": 512, "v": 512, "o": 2048}
        shapes |= {f"model.layers.{i}.self_attn.{x}_proj.weight": (n, hidden) for x, n in rows.items()}
        shapes |= {f"model.layers.{i}.mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"model.layers.{i}.{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}
    save_file(
        {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    script = """
import sys
import windlass.engine.core.engine_core
from windlass.engine.interface.config import ComputeConfig, EngineConfig, LoadingConfig
from windlass.engine.model.loading.loader import load_model
def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
before = status("VmRSS")
compute, loading = ComputeConfig(quantization="int8", device="cpu"), LoadingConfig(weight_cache='beside')
loaded = load_model(EngineConfig(model=sys.argv[1], compute=compute, loading=loading))
print(status("VmHWM") - before, loaded.decoder.weight_bytes(), *loaded.notices)
"""
    grown: list[int] = []
    for where, expected in (("None", ""), ("'beside'", "stored in"), ("'beside'", "read from")):
        run_here = script.replace("'beside'", where)
        output = subprocess.check_output([sys.executable, "-c", run_here, str(tmp_path)], text=True)
        peak, weights, said = (output + " ").split(" ", 2)
        assert expected in said
        grown.append(int(peak))
    without, making, reading = grown
    assert making < without + 0.6 * int(weights), "writing the file took memory of its own"
    assert 0.9 * int(weights) < reading < 1.5 * int(weights)
