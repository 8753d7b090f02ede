"""Files that are not a valid adapter of the model are refused with the reason, before any of their weights is used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import save_adapter
from helpers.engines import make_core
from helpers.little_memory import NO_ROOM
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file

from windlass.engine.core import adapter_manager
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import DeviceMemoryError, LoadError, RequestError
from windlass.engine.interface.config import AdapterConfig
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.model.loading import adapter_loader
from windlass.engine.model.loading.adapter_loader import read_peft_config

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
MODULE = A.removesuffix(".lora_A.weight")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def core(model: Path) -> EngineCore:
    return make_core(model, max_lora_rank=8)


def config(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "adapter_model.safetensors"
        found = load_file(path)
        edit(found)
        save_file(found, path)

    return change


def cut(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pipe(directory: Path) -> None:
    path = directory / "adapter_config.json"
    path.unlink()
    os.mkfifo(path)


CASES: list[tuple[Callable[[Path], None], str]] = [
    (config(peft_type="IA3"), "peft_type"),
    (config(use_dora=True), "DoRA"),
    (config(bias="all"), "bias"),
    (config(modules_to_save=["lm_head"]), "modules_to_save"),
    (config(target_modules=["lm_head"]), "lm_head"),
    (config(init_lora_weights="pissa_niter_4"), "pissa"),
    (config(init_lora_weights="lora_ga", lora_ga_config={"direction": "ArB2r"}), "lora_ga"),
    (config(use_something_new=True), "use_something_new"),
    (config(r=0), "r must be"),
    (config(r="4"), "r must be"),
    (config(r=9), "`adapters.max_rank`"),
    (config(r=5), "wrong|shape"),
    (config(lora_alpha=float("nan")), "lora_alpha"),
    (config(use_rslora="yes"), "use_rslora"),
    (config(alpha_pattern={"(a+)+$": 1.0}), "pattern"),
    (config(rank_pattern={"q_proj": 99}), "rank_pattern"),
    (lambda d: (d / "adapter_config.json").write_text("{"), "JSON"),
    (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json"),
    (lambda d: (d / "adapter_config.json").write_text(" " * (1 << 20) + "{}"), "larger than"),
    (pipe, "not a regular file"),
    (lambda d: (d / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    (lambda d: (d / "adapter_model.safetensors").write_bytes(b""), "cut off"),
    (cut, "bytes where"),
    (tensors(lambda t: t[A].view(-1)[3].fill_(float("nan"))), "NaN"),
    (tensors(lambda t: t.pop(A)), "only one of"),
    (tensors(lambda t: t.clear()), "no tensors"),
    (tensors(lambda t: t.update({A: t[A][:, :-1].contiguous()})), "another model or rank"),
    (tensors(lambda t: t.update({A: t[A].to(torch.int32)})), "I32"),
    (tensors(lambda t: t.update({A.replace("layers.0", "layers.77"): t[A].clone()})), "layers.77"),
    (tensors(lambda t: t.update({f"{MODULE}.lora_magnitude_vector": torch.ones(4)})), "magnitude"),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_invalid_adapter_is_refused(core: EngineCore, model: Path, tmp_path: Path, case: int) -> None:
    break_it, said = CASES[case]
    adapter = save_adapter(tmp_path / "adapter", model)
    break_it(adapter)
    with pytest.raises(RequestError, match=said) as raised:
        core.read_adapter(AdapterSource(1, "a", str(adapter))).result(30)
    assert raised.value.param == "lora_path" and raised.value.code
    assert core.stats().adapters_loaded == 0


def test_missing_memory_is_reported(
    core: EngineCore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = AdapterSource(1, "poet", str(save_adapter(tmp_path / "adapter", model)))

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError(NO_ROOM)

    with monkeypatch.context() as patched:
        patched.setattr(adapter_manager, "read_adapter", fails)
        with pytest.raises(DeviceMemoryError, match="the adapter poet"):
            core.read_adapter(source).result(30)
    assert core.stats().adapters_loaded == 0
    assert core.read_adapter(source).result(30).info.name == "poet"


def test_start_with_an_invalid_adapter_fails(model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", model, use_dora=True)
    with pytest.raises(LoadError, match=r"adapters\.sources=poet.*DoRA"):
        make_core(model, lora=(AdapterSource(1, "poet", str(adapter)),))


def test_patterns_are_compiled_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More patterns than the cache of `re` holds, and many modules."""
    patterns = {f"layers.{n}.q_proj": 1 + n % 8 for n in range(1000)} | {
        r"^model\.layers\.\d+\.v_proj": 3,
        "[ou]_proj": 5,
    }
    described = read_peft_config(save_adapter(tmp_path / "adapter", model, rank_pattern=patterns, alpha=4.0), 8)
    monkeypatch.setattr(adapter_loader, "re", None)
    found = [described.rank_of(f"model.layers.7.{name}_proj") for name in "qkvou"]
    assert found == [8, 4, 3, 5, 5]
    assert described.rank_of("model.layers.1007.q_proj") == described.rank_of("x.model.layers.7.v_proj") == 4
    assert described.scale_of("model.layers.7.q_proj") == 4.0 / 8


def test_number_of_adapters_is_bounded() -> None:
    assert AdapterConfig(max_loaded=1024).max_loaded == 1024
    with pytest.raises(LoadError, match=r"max_loaded.* at most 1024, got 1025"):
        AdapterConfig(max_loaded=1025)
