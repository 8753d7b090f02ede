"""Steps on Triton programs never make the host wait for the device, checked by a dispatch mode that refuses it.

The steps contain prompts, for which nothing is captured: every kind of layer, adapters, moved keys, and encoders.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import save_adapter
from helpers.engines import greedy, make_core, run
from helpers.played_graphs import inside_a_program, is_wait, reads_refused
from helpers.tiny_encoders import make_encoder
from helpers.tiny_models import make_model
from helpers.tiny_unrotated import make_unrotated
from kernels_helpers.interpreted import PLAYED
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.request import EngineRequest, PoolingRule, SamplingParams
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.kernels import backend_selector
from windlass.kernels.triton import launch

pytestmark = [*PLAYED, pytest.mark.slow]
PROMPT = torch.randint(3, 128, (9,), generator=torch.Generator().manual_seed(0)).tolist()


class _NoWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_wait(func.name(), args):
            raise RuntimeError(f"operation not permitted: {func.name()}")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check every forward pass but the first, and return the number of rows of each."""
    own = backend_selector._NativeBackend(lambda options: None, backend_selector._triton, narrow=False)
    monkeypatch.setattr(backend_selector, "_NATIVE_BACKENDS", {"cpu": own})
    started, layers, seen = launch.launch, Decoder.run_layers, list[int]()

    def outside(*operands: Any, **sizes: Any) -> None:
        with inside_a_program():
            started(*operands, **sizes)

    def run_layers(self: Decoder, x: Tensor, *rest: Any) -> Tensor:
        seen.append(len(x))
        if len(seen) == 1:  # may create persistent tensors
            return layers(self, x, *rest)
        with _NoWaits(), reads_refused():
            return layers(self, x, *rest)

    for name, module in list(sys.modules.items()):
        if name.startswith("windlass.kernels.triton.") and getattr(module, "launch", None) is started:
            monkeypatch.setattr(module, "launch", outside)
    monkeypatch.setattr(Decoder, "run_layers", run_layers)
    return seen


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: int(x[0]),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0]) + x,
    ],
)
def test_waits_are_detected(read: Callable[[Tensor], object]) -> None:
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="not permitted"), _NoWaits(), reads_refused():
        read(x)
    read(x)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("gpt_oss", {}),
        ("qwen2_moe", {"quantization": "int8", "activations": "float32"}),
        ("deepseek_v2", {}),
        ("bloom", {}),
        ("gemma4_e2b", {}),
        ("qwen3_5", {}),
        ("lfm2", {}),
        ("falcon_h1", {}),
        ("llama", {"deterministic": True, "kv_cache_dtype": "int8"}),
    ],
)
def test_prompts_with_streams(family: str, options: dict[str, Any], tmp_path: Path, watched: list[int]) -> None:
    make = make_unrotated if family == "bloom" else make_model
    core = make_core(make(family, tmp_path / "m"), max_num_batched_tokens=8, **options)
    sent = [greedy("a", PROMPT[:3], 3, logprobs=1), greedy("b", PROMPT, 2, prompt_logprobs=1)]
    run(core, sent, every_logit=False)
    assert any(rows > 2 for rows in watched)


def test_adapters_and_moved_keys(tmp_path: Path, watched: list[int]) -> None:
    """Adjacent rows of two adapters, a context shift, a window with sinks, and dual chunks."""
    directory = make_model("llama", tmp_path / "m", num_hidden_layers=2)
    sources = tuple(AdapterSource(i, f"{i}", str(save_adapter(tmp_path / f"{i}", directory, seed=i))) for i in (1, 2))
    core = make_core(directory, lora=sources, max_model_len=64, shift_context=48)
    chunks = RopeScaling.from_dict({"rope_type": "dual_chunk", "chunk_size": 24, "local_size": 4})
    sent = [
        greedy("1", PROMPT, 2, adapter=1),
        greedy("2", PROMPT, 2, adapter=2),
        greedy("shift", PROMPT * 5, 10, context=ContextRule(overflow="shift")),
        greedy("window", PROMPT * 2, 3, context=ContextRule(attention_window=8, attention_sinks=2)),
        greedy("chunks", PROMPT * 3, 2, rope_scaling=chunks),
    ]
    run(core, sent, every_logit=False)
    assert len(watched) > 8


def test_encoders(tmp_path: Path, watched: list[int]) -> None:
    core = make_core(make_encoder("modernbert", tmp_path / "m"))
    rule, nothing = PoolingRule("mean", None, False), SamplingParams(max_tokens=0, temperature=0.0)
    for name in "xy":
        run(core, [EngineRequest(name, PROMPT, nothing, pooling=rule)])
    assert watched == [9, 9]
