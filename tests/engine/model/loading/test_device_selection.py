"""Device selection, with GPUs that only patched answers of torch report."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import engine_config
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.device_selection import choose_device, is_out_of_memory
from windlass.engine.model.loading.preflight import DeviceCapabilities, prepare_model
from windlass.kernels import backend_selector

BUILDS = backend_selector.compiler_refusal
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx"
)
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver …"


class Gpus:
    """Answers of torch about GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capabilities: list[tuple[int, int]] = []
        self.fault: str | None = None
        monkeypatch.setattr(torch.cuda, "init", self._init)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(self.capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capabilities[device.index or 0])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *of: object() if name == "triton" else found(name, *of)
        )
        monkeypatch.setattr(backend_selector, "compiler_refusal", lambda: None)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *shape, device="cpu", **more: empty(*shape, device="meta", **more))

    def _init(self) -> None:
        if self.fault is not None:
            raise RuntimeError(self.fault)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def refusal(name: str) -> str:
    with pytest.raises(LoadError) as refused:
        choose_device(name)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_each_rank_has_a_gpu(gpus: Gpus) -> None:
    gpus.capabilities = [(8, 0), (9, 0)]
    assert [choose_device(name, rank, 2).device for name in ("cuda", "auto") for rank in (0, 1)] == [
        torch.device("cuda:0"),
        torch.device("cuda:1"),
    ] * 2
    assert choose_device("cpu", 1, 4).device == torch.device("cpu")
    with pytest.raises(LoadError, match=r"tensor_parallel=3` takes a GPU for each rank, and there are 2 GPUs: use 2"):
        choose_device("cuda", 0, 3)
    with pytest.raises(LoadError, match=r"`compute\.device=cuda:1` is one GPU, .* use `compute.device=cuda`, and name"):
        choose_device("cuda:1", 0, 2)
    gpus.capabilities = [(8, 0), (7, 5)]
    with pytest.raises(LoadError, match=r"has compute capability 7\.5"):
        choose_device("cuda", 1, 2)
    gpus.capabilities = [(8, 0)]
    with pytest.raises(LoadError, match=r"and there is one GPU: use 1 or less, or `compute\.device=cpu`"):
        choose_device("auto", 0, 2)
    gpus.capabilities = []
    assert choose_device("auto", 1, 2).device == torch.device("cpu")


def test_gpu_is_the_default(gpus: Gpus) -> None:
    assert choose_device("auto") == (torch.device("cpu"), ())
    gpus.capabilities = [(8, 0), (12, 0)]
    assert choose_device("auto") == (torch.device("cuda"), ())
    assert choose_device("cpu") == (torch.device("cpu"), ())
    assert choose_device("cuda:1") == (torch.device("cuda:1"), ())


def test_missing_compiler_of_triton_is_reported(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus.capabilities = [(9, 0)]
    monkeypatch.setattr(backend_selector, "compiler_refusal", BUILDS)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C compiler" in refusal("cuda") and refusal("cuda").endswith("use `compute.device=cpu`")
    device, (notice,) = choose_device("auto")
    assert device == torch.device("cpu") and notice.startswith("running on the CPU: Triton finds no C compiler")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "clang" else None)
    assert "no Python.h" in refusal("cuda")
    (tmp_path / "Python.h").touch()
    assert choose_device("cuda") == (torch.device("cuda"), ())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CC", "cc")
    assert choose_device("cuda") == (torch.device("cuda"), ())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (NO_DRIVER, "Found no NVIDIA driver on your system"),
        (OLD_DRIVER, "The NVIDIA driver on your system is too old (found version 11040)"),
        ("No CUDA GPUs are available", "No CUDA GPUs are available"),
    ],
)
def test_missing_driver_is_reported(gpus: Gpus, fault: str, said: str) -> None:
    gpus.fault = fault
    assert refusal("cuda:1") == f"`compute.device=cuda:1`: {said}: use `compute.device=cpu`"


def test_unknown_gpu_number_is_refused(gpus: Gpus) -> None:
    gpus.capabilities = [(9, 0)]
    assert refusal("cuda:1").startswith(
        "`compute.device=cuda:1`: there is one GPU, cuda:0: name one that is there, or "
    )
    gpus.capabilities = [(9, 0)] * 4
    assert "there are 4 GPUs, cuda:0 to cuda:3" in refusal("cuda:4")
    assert choose_device("cuda:3").device.index == 3


def test_unsupported_gpu_is_refused(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.capabilities = [(7, 5), (8, 6)]
    said = "NVIDIA T4 (cuda:0) has compute capability 7.5, and 8.0 or later is needed"
    assert refusal("cuda:0") == f"`compute.device=cuda:0`: {said}: use `compute.device=cpu`"
    device, notices = choose_device("auto")
    assert device.type == "cpu" and notices == (f"running on the CPU: {said.replace('cuda:0', 'cuda')}",)
    assert choose_device("cuda:1").device.index == 1
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None)
    assert "Triton is not installed" in refusal("cuda:1")


def test_weights_larger_than_gpu_memory_are_refused(tmp_path: Path) -> None:
    config = engine_config(make_model("llama", tmp_path / "model"), dtype="float32")
    with pytest.raises(
        LoadError, match=r"^the weights need 0\.\d MiB of memory, 0\.3 MiB are free on cuda: use `compute.d"
    ):
        prepare_model(config, DeviceCapabilities("cuda:1", False, free=300 << 10))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("named", [True, False])
def test_auto_dtype_is_that_of_the_checkpoint(tmp_path: Path, stored: torch.dtype, named: bool) -> None:
    model = make_model("llama", tmp_path / "model")
    path, weights = model / "config.json", model / "model.safetensors"
    save_file({key: tensor.to(stored) for key, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    config: dict[str, Any] = json.loads(path.read_text())
    name = str(stored).removeprefix("torch.")
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    path.write_text(json.dumps(config | ({"dtype": name} if named else {})))
    prepared = prepare_model(engine_config(model), DeviceCapabilities("cuda", False))
    assert prepared.compute_dtype == prepared.weight_dtype == prepared.cache_dtype == name
    asked = replace(engine_config(model), compute=replace(engine_config(model).compute, dtype="float16"))
    assert prepare_model(asked, DeviceCapabilities("cuda", False)).compute_dtype == "float16"


def test_out_of_memory_errors_are_recognized() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as of_cpu:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(of_cpu.value)
    assert not is_out_of_memory(RuntimeError("unsupported memory format")) and not is_out_of_memory(KeyError("memory"))
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    assert not is_out_of_memory(lost) and not is_out_of_memory(RuntimeError("size mismatch"))
