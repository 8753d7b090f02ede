"""Storage dtype of adapters: the narrowest exact one by default, or the configured one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.adapters import save_adapter
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.interface.model_info import AdapterSource

PROMPT = list(range(3, 20))
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama") / "model")


def with_adapter(model: Path, adapter: Path, **options: object) -> EngineCore:
    return make_core(model, lora=(AdapterSource(1, "a", str(adapter)),), **options)


def logits(core: EngineCore) -> torch.Tensor:
    return torch.stack(run(core, [greedy("r", PROMPT, adapter=1)])["r", 0].logits)


def num_bytes(core: EngineCore) -> int:
    return core.adapters.loaded.num_bytes


def rewritten(adapter: Path, target: Path, dtype: torch.dtype) -> Path:
    """Return the numbers rounded to this dtype, in float32."""
    target.mkdir()
    (target / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: t.to(dtype).float() for name, t in tensors.items()}, target / "adapter_model.safetensors")
    return target


@ON_A_CPU
@pytest.mark.parametrize("dtype", HALVES)
def test_configured_dtype_rounds_and_halves_the_memory(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    adapter = save_adapter(tmp_path / "wide", llama, rank=5)
    name = str(dtype).removeprefix("torch.")
    exact, rounded = with_adapter(llama, adapter), with_adapter(llama, adapter, lora_dtype=name)
    assert 2 * num_bytes(rounded) == num_bytes(exact)
    # The rounded numbers are exact in this dtype, which is therefore their default.
    same = with_adapter(llama, rewritten(adapter, tmp_path / "narrow", dtype))
    assert num_bytes(same) == num_bytes(rounded)
    found = logits(rounded)
    assert torch.equal(found, logits(same)) and not torch.equal(found, logits(exact))
    wide = with_adapter(llama, tmp_path / "narrow", lora_dtype="float32")
    assert num_bytes(wide) == num_bytes(exact)
    assert torch.equal(found, logits(wide))


def test_numbers_beyond_the_dtype_are_refused(llama: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "large", llama, strength=1e5)
    with pytest.raises(LoadError, match=r"too large for `adapters.dtype=float16`"):
        with_adapter(llama, adapter, lora_dtype="float16")
    with pytest.raises(LoadError, match="unknown dtype 'int3'"):
        with_adapter(llama, adapter, lora_dtype="int3")
    assert num_bytes(with_adapter(llama, adapter, lora_dtype="bfloat16")) > 0
